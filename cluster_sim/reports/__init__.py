"""The figures of a simulated run, and how they are shown: a table, plots, a page."""
