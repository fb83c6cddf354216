"""The `rachis` command: a module named after each command registers it, thin over the parts that do the work.

All of these modules are imported whatever is called, so they import nothing that takes long. Where a command's work
needs more (numpy, Ray, an engine), it stands beside it in NAME_run.py, which is imported when the command runs.
"""

import os

# gRPC's handlers for a fork run in children that are about to become something else, and have ended one before it did.
# Read when gRPC is first used.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
