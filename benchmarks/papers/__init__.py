"""Figures of the papers, run in the simulator and set beside what the papers say."""
