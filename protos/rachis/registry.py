"""Where the registry keeps what: the Redis keys shared by the workers that write and the routers that read.

rachis:<service>:generation           counter, at least the time in ms; each start takes the next
rachis:<service>:workers              set of worker ids that ever registered
rachis:<service>:worker:<worker id>   serialised WorkerRegistration; expires with the worker's lease
"""


def generation_key(service_id: str) -> str:
    return f"rachis:{service_id}:generation"


def workers_key(service_id: str) -> str:
    return f"rachis:{service_id}:workers"


def worker_key(service_id: str, worker_id: str) -> str:
    return f"rachis:{service_id}:worker:{worker_id}"
