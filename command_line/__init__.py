"""The `rachis` command: a module named after each command registers it, thin over the parts that do the work.

All of these modules are imported whatever is called, so they import nothing that takes long. Where a command's work
needs more (numpy, Ray, an engine), it stands beside it in NAME_run.py, which is imported when the command runs.
"""
