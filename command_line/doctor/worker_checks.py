"""Checks of the workers: whether they answer, get requests, are alike and can reach each other. Pure."""

from collections.abc import Callable, Iterable
from functools import partial

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import worker_pb2 as wire

from cluster_configs.listening import is_loopback
from cluster_core.ports import PortRange
from cluster_core.versions import Versions, differences
from command_line.doctor.findings import Fault, Verdicts
from command_line.doctor.seen import Seen, is_ready, is_usable, name_of
from command_line.router_admin import pool_name
from control_plane.model.worker_snapshot import Pool
from control_plane.overview import complaints
from control_plane.overview.rows import state_name
from control_plane.prefix_index.followed_index import whole_blocks

# As in the alerts RachisClockSkew and RachisHostMemoryFull.
MOST_CLOCK_SKEW_S = 10.0
LEAST_MEMORY_SHARE = 0.05
_MIB = 1 << 20


def _pool_without_worker(pool: Pool, consequence: str, seen: Seen) -> Verdicts:
    """Of a pool that is meant to have workers."""
    name = pool_name(pool)
    section = seen.config.pools.in_use.get(name)
    own = [view for view in seen.workers if view.registration.pool == pool]
    is_meant = bool(own) or (section is not None and section.workers > 0)
    if is_meant and not seen.usable(pool):
        there = ", ".join(f"{name_of(view)} {_why_unusable(view)}" for view in own) or "there is none"
        yield Fault(name, f"no {name} worker may get requests ({there}): {consequence}")


decode_pool = partial(_pool_without_worker, wire.POOL_DECODE, "no request is answered")
shared_pool = partial(_pool_without_worker, wire.POOL_SHARED, "no request is answered")
prefill_pool = partial(
    _pool_without_worker, wire.POOL_PREFILL, "nothing is handed off, decode workers compute every prompt themselves"
)


def pool_sizes(seen: Seen) -> Verdicts:
    """Of a pool without any worker that is told by the checks of that pool."""
    for pool in seen.pools:
        if pool.ready_workers < pool.minimum_workers and seen.usable(pool.pool):
            name = pool_name(pool.pool)
            sentence = f"the {name} pool has {pool.ready_workers} ready workers and needs {pool.minimum_workers}"
            details = "; ".join(f"{worker.worker_id}: {worker.detail}" for worker in pool.workers if worker.detail)
            yield Fault(name, f"{sentence}{f' ({details})' if details else ''}")


def lost(seen: Seen) -> Verdicts:
    """Those that hang while they answer are told by `hangs`."""
    for view in seen.workers:
        name = name_of(view)
        if complaints.stalled(view) or view.version_skew:
            continue
        if is_ready(view) and not view.HasField("load"):
            yield Fault(name, f"{name} is registered as ready and does not answer at {view.registration.address}")
        elif view.suspect:
            yield Fault(name, f"{name} gets no requests: a call to it has failed, and it has not answered since")


def _complains(kind: str, seen: Seen) -> Verdicts:
    """What `rachis status` says of workers."""
    for view in seen.workers:
        for complaint in complaints.of_worker(view):
            if complaint.kind == kind:
                yield Fault(name_of(view), f"{name_of(view)} {complaint.sentence}")


hangs = partial(_complains, "hangs")
versions = partial(_complains, "versions")
quarantine = partial(_complains, "quarantine")


def drains(seen: Seen) -> Verdicts:
    """A worker that leaves its pool, or is started again, goes once it has nothing to do: the second look finds it no
    more. Where nobody else of the pool gets requests, that is the finding."""
    for view in seen.workers:
        name, again = name_of(view), seen.again(view)
        stays = _drains_idly(view) and again is not None and _drains_idly(again)
        if stays and seen.usable(view.registration.pool):
            yield Fault(name, f"{name} was drained, stays in its pool, and gets no requests until it is resumed")


def _drains_idly(view: admin.WorkerView) -> bool:
    load = view.load
    is_idle = not (load.running_requests or load.waiting_requests or load.leased_handoffs or load.active_calls)
    return is_idle and view.registration.state == wire.WORKER_STATE_DRAINING and view.HasField("load")


def command_version(seen: Seen) -> Verdicts:
    router = Versions(rachis=seen.router.version)
    for clause in differences(Versions(rachis=seen.here.rachis), "this host", router, "the router's"):
        yield Fault("rachis doctor", f"{clause}: what this command says of the service may be wrong")


def clocks(seen: Seen) -> Verdicts:
    for view in seen.workers:
        ahead_s = view.registration.clock_ahead_ms / 1000
        if abs(ahead_s) > MOST_CLOCK_SKEW_S:
            off = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} Redis's"
            yield Fault(name_of(view), f"the clock of the host of {name_of(view)} is {off}")


def models(seen: Seen) -> Verdicts:
    """Of all workers that have told theirs."""
    told = [view for view in seen.workers if view.registration.HasField("model")]
    kinds: tuple[tuple[str, Callable[[wire.WorkerRegistration], object]], ...] = (
        ("the model", lambda record: record.model.name),
        ("a vocabulary of", lambda record: record.model.vocabulary_size),
        ("the precision", lambda record: record.model.dtype),
        ("blocks of", lambda record: record.block_size_tokens),
    )
    for what, of in kinds:
        values = {of(view.registration): name_of(view) for view in reversed(told)}
        if len(values) > 1:
            each = ", ".join(f"{name} has {what} {value}" for value, name in values.items())
            yield Fault("workers", f"workers are not alike, and cannot use each other's blocks: {each}")
            return


def index_blocks(seen: Seen) -> Verdicts:
    """The router's chunks have to be the workers'."""
    for view in seen.workers:
        block = view.registration.block_size_tokens
        if not block:
            continue
        theirs, ours = whole_blocks(seen.config.index.chunk_tokens, block), seen.index.chunk_tokens
        if theirs != ours:
            yield Fault(
                name_of(view),
                f"{name_of(view)} tells of chunks of {theirs} tokens and the index knows chunks of {ours}: its cached "
                "prefixes are never found",
            )


def addresses(seen: Seen) -> Verdicts:
    """Workers on several hosts have to reach each other, on the ports that are open between these."""
    several = len({view.registration.node for view in seen.workers}) > 1
    ports = PortRange.parse(seen.config.pools.ports) if seen.config.pools.ports is not None else None
    for view in seen.workers:
        name, address = name_of(view), view.registration.address
        host, _, port = address.rpartition(":")
        if several and address and is_loopback(host):
            yield Fault(name, f"{name} listens at {address}, which workers on other hosts cannot reach")
        elif ports is not None and port and not ports.first <= int(port) <= ports.last:
            yield Fault(name, f"{name} listens at {address}, outside of pools.ports {seen.config.pools.ports}")


def host_memory(seen: Seen) -> Verdicts:
    for node, counters in _nodes(seen.workers):
        share = counters.node_available_bytes / counters.node_memory_bytes
        if share < LEAST_MEMORY_SHARE:
            left = f"{counters.node_available_bytes // _MIB} MiB of memory left, {share:.0%} of what it has"
            yield Fault(node, f"host {node} has {left}: when nothing is left, a worker there is ended")


def _nodes(views: Iterable[admin.WorkerView]) -> list[tuple[str, wire.WorkerCounters]]:
    """Of the nodes with a worker that tells, what one of them tells."""
    told = {view.registration.node: view.counters for view in views if view.counters.node_memory_bytes}
    return sorted(told.items())


def _why_unusable(view: admin.WorkerView) -> str:
    if complaints.stalled(view):
        return "hangs"
    if view.version_skew:
        return "has other versions"
    if view.suspect:
        return "has failed a call"
    assert not is_usable(view), "it is asked of those alone"
    return f"is {state_name(view.registration.state)}"
