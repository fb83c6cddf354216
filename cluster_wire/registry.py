"""Where the registry and the prefix index keep what: the Redis keys shared by the workers and the routers.

What stands in braces is the hash tag: keys of one tag lie on one slot of a Redis Cluster, so that a script or a
transaction may touch them together.

rachis:{<service>}:generation             counter, at least Redis's own time in ms; each start takes the next
rachis:{<service>}:workers                set of worker ids that ever registered
rachis:{<service>}:worker:<worker id>     serialised WorkerRegistration; expires with the worker's lease
rachis:{<service>}:holder:<worker id>     generation of that record, and expires with it; an older one is not written
rachis:{<service>}:replication            name of the router that copies hot prefixes; expires with its lease
rachis:{<service>}:loads                  hash: RouterLoads of each router, by its id; expires when none lives
rachis:{<service>}:sizes                  JSON of the size that each pool is meant to have
rachis:{<service>}:adapters               hash: Adapter of each LoRA adapter, by its name; the field "": the hash's own
rachis:{<service>}:rate:<limit>:<tenant>  what a tenant may still have, and when that was; expires when it is full again
rachis:{<service>}:rate:<limit>:<tenant>:<router>  the number of what that router told of it last; expires
rachis:{<service>}:lease                  JSON of who serves under this name; expires, renewed while that one lives
rachis:{<service>:<worker id>}:claims     stream of ClaimBatch; an entry's id is <generation>-<sequence>
rachis:{<service>:<worker id>}:snapshot   ClaimSnapshot; the stream starts after it
rachis:{<service>:<worker id>}:resync     set by a router that needs a snapshot; expires
rachis:{<service>:<family>}:accesses      stream of AccessBatch for the prefixes of this family
rachis:{<service>:<family>}:hotness       snapshot of their hotness

What a worker or a router renews stays `KEPT_MS` after it was written last, and then goes by itself: the counter, the
set, accesses and hotness (these 32 half-lives, if that is longer).

No clock but Redis's own counts, and living workers tell a registry that has lost its data which generations it gave
away. A generation may still be lower than one before: Redis lost its data while no worker lived, and its clock is
behind. What the registry says for a while is the truth then, see `control_plane.prefix_index.claim_following`.
"""

# Prefixes that begin with the same chunk are one family; families share so many slots.
FAMILIES = 16
# Four days: over a weekend a service finds again what it left.
KEPT_MS = 345_600_000


def generation_key(service_id: str) -> str:
    return f"rachis:{{{service_id}}}:generation"


def workers_key(service_id: str) -> str:
    return f"rachis:{{{service_id}}}:workers"


def worker_key(service_id: str, worker_id: str) -> str:
    return f"rachis:{{{service_id}}}:worker:{worker_id}"


def holder_key(service_id: str, worker_id: str) -> str:
    return f"rachis:{{{service_id}}}:holder:{worker_id}"


def replication_key(service_id: str) -> str:
    return f"rachis:{{{service_id}}}:replication"


def loads_key(service_id: str) -> str:
    return f"rachis:{{{service_id}}}:loads"


def sizes_key(service_id: str) -> str:
    return f"rachis:{{{service_id}}}:sizes"


def adapters_key(service_id: str) -> str:
    return f"rachis:{{{service_id}}}:adapters"


def rate_key(service_id: str, limit: str, tenant: str) -> str:
    return f"rachis:{{{service_id}}}:rate:{limit}:{tenant}"


def told_rate_key(bucket: str, router_id: str) -> str:
    return f"{bucket}:{router_id}"


def lease_key(service_id: str) -> str:
    return f"rachis:{{{service_id}}}:lease"


def claims_key(service_id: str, worker_id: str) -> str:
    return f"rachis:{{{service_id}:{worker_id}}}:claims"


def snapshot_key(service_id: str, worker_id: str) -> str:
    return f"rachis:{{{service_id}:{worker_id}}}:snapshot"


def resync_key(service_id: str, worker_id: str) -> str:
    return f"rachis:{{{service_id}:{worker_id}}}:resync"


def accesses_key(service_id: str, family: int) -> str:
    return f"rachis:{{{service_id}:f{family}}}:accesses"


def hotness_key(service_id: str, family: int) -> str:
    return f"rachis:{{{service_id}:f{family}}}:hotness"
