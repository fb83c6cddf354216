"""Engines of simulated workers: a light one of few lines, and one with vLLM's real schedulers in it."""
