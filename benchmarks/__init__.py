"""Measured comparisons, each against its baseline in the same run."""
