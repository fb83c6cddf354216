"""Commands start children while threads of theirs are inside gRPC, whose handlers for a fork used to end some of them.

Without the setting of `command_line`, 8 of 150 children ended with SIGABRT, and all but two forks met the handlers.
"""

import json
import subprocess
import sys

from tests import ROOT

_CHILDREN = 40
_BUSY = """
import command_line, json, os, subprocess, sys, threading
from concurrent import futures

import grpc

from cluster_core.bound_child import bind_to_parent

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)

server = grpc.server(futures.ThreadPoolExecutor(4))
server.add_generic_rpc_handlers((Echo(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()

def ask():
    method = grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary("/a/b")
    while True:
        method(b"x", timeout=30)

for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
ended = [
    subprocess.Popen(["true"], preexec_fn=bind_to_parent).wait(30) for _ in range(int(sys.argv[1]))
]
print(json.dumps(ended), flush=True)
os._exit(0)
"""


def test_children_of_a_command_that_speaks_grpc_live() -> None:
    command = [sys.executable, "-c", _BUSY, str(_CHILDREN)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)

    assert json.loads(done.stdout) == [0] * _CHILDREN
    assert "fork() handlers" not in done.stderr
