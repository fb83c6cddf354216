"""The `rachis` command: one module for each command, thin over the parts that do the work."""
