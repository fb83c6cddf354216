"""The way of one request through the pools, from its placement to its last token."""
