"""`rachis bench`: measured comparisons, a command each, and what these share."""
