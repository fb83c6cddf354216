"""The labels that metrics have, what each says, and how many values it can have: one literal table."""

from dataclasses import dataclass

from tools.reference.table import code


@dataclass(frozen=True, slots=True)
class Label:
    """most: values that one router tells of; None: as many as there are workers or nodes, or one for each of these."""

    name: str
    values: str
    most: int | None

    @property
    def bound(self) -> str:
        if self.most is not None:
            return str(self.most)
        return f"one for each {code('worker')}" if self.name in OF_A_WORKER else "the workers of the service"


# What a worker has one of.
OF_A_WORKER = frozenset({"pool", "node", "rachis", "vllm", "nixl"})

LABELS = (
    Label(
        "worker",
        "A worker's name, `prefill-0`. One that is started again has the same; one that left is not told of.",
        None,
    ),
    Label("node", "A host that runs workers.", None),
    Label("rachis", "The version of a worker.", None),
    Label("vllm", "The version of a worker's vLLM.", None),
    Label("nixl", "The version of a worker's NIXL.", None),
    Label("version", "The version of the router.", 1),
    Label("pool", "`prefill` and `decode`, or `shared` of workers that do both.", 3),
    Label("tier", "`device` or `host`.", 2),
    Label("class", "Of a request: `interactive`, or `best_effort` of a priority above 0.", 2),
    Label("direction", "`out` to host memory, or `back`.", 2),
    Label("since", "`open` or `finish` of a session.", 2),
    Label("state", "`running`, or `waiting` in an engine and `loading` in a batch.", 2),
    Label("strategy", "What happened to the blocks of a preempted session: `swap` or `recompute`.", 2),
    Label("cause", "Why a request waits to join a batch.", 3),
    Label("mode", "What decides who joins a batch.", 3),
    Label("what", "What memory of a router is for.", 5),
    Label("outcome", "How a request ended, or what became of a hand-off, a block, a token, a response.", 5),
    Label("policy", "A policy that the configuration knows.", 8),
    Label("way", "A way of placement by the objectives: `whole`, `append` or `apart`.", 3),
    Label("event", "An event of a session, as in its record.", 8),
    Label("limit", "A limit of a tenant: `requests_per_s` or `tokens_per_s`. No tenant is named.", 2),
    Label("reason", "Why something was decided, refused or dropped.", 8),
    Label("status", "A gRPC status but `OK`.", 16),
)
