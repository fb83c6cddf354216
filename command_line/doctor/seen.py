"""What `rachis doctor` has seen of a service: a snapshot that the checks judge, and nothing else.

A part that could not be seen stays as empty as its default, and `missing` says why: the checks that need it are then
not made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from benchmarks.identity import Divergence
from cluster_configs.schema import RachisConfig
from cluster_core.versions import Versions
from control_plane.fleet.membership import may_work
from control_plane.model.worker_snapshot import Pool, serves
from control_plane.placement.disaggregation import LOCAL


class Part(StrEnum):
    """What a check may need beside the router's status and its workers."""

    CONFIGURATION = "configuration"
    POOLS = "pools"
    INDEX = "index"
    CLAIMS = "claims"
    ADAPTERS = "adapters"
    METRICS = "metrics"
    GATEWAY = "gateway"
    CERTIFICATE = "certificate"
    DISKS = "disks"
    PROBES = "probes"
    WORKER_ALONE = "worker_alone"


@dataclass(frozen=True, slots=True)
class Probe:
    """A request that the doctor has sent.

    reason: why it was, or was not, prefilled apart from its decode; empty where the router does not remember it.
    error: gRPC's status and sentence of one that has no answer; is_late: because its time was up, or the router full.
    """

    prompt_tokens: int
    completion: generation.Completion = field(default_factory=generation.Completion)
    reason: str = ""
    error: str = ""
    is_late: bool = False

    @property
    def route(self) -> generation.Route:
        return self.completion.route

    @property
    def computed_by(self) -> str:
        """The worker that prefilled it."""
        return self.route.prefill_worker_id or self.route.decode_worker_id

    @property
    def is_local(self) -> bool:
        """Its router had the decode worker compute the prompt."""
        return self.reason in LOCAL if self.reason else not self.route.prefill_worker_id


@dataclass(frozen=True, slots=True)
class Comparison:
    """The answer to a probe beside that of one worker alone. exact: their precision lets both only be equal."""

    prompt_tokens: int
    worker_id: str
    exact: bool
    divergence: Divergence | None


@dataclass(frozen=True, slots=True)
class Disk:
    """what: is written there."""

    what: str
    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """now_unix_s: when. here: versions of the command. later: the workers once the probes were over; None: nobody has
    looked again. waiting_requests: in the router and in the engines, the least of two looks. sources: by key of the
    configuration, where its value came from. claims: of the last check of the index. metrics: of the router's page, by
    name and labels. gateway_error: empty where HTTP answers, or is not configured. certificate_ends_s: of the router's,
    Unix time; None: it has none. probes: of one prompt, in the order in which they were sent. session: a prompt that
    came as a session, where the router did not hand off the first of them.
    """

    now_unix_s: float
    here: Versions
    router: admin.GetRouterStatusResponse
    workers: Sequence[admin.WorkerView] = ()
    later: Sequence[admin.WorkerView] | None = None
    waiting_requests: int = 0
    config: RachisConfig = field(default_factory=RachisConfig)
    sources: Mapping[str, str] = field(default_factory=dict)
    pools: Sequence[admin.PoolStatus] = ()
    index: admin.GetIndexStatusResponse = field(default_factory=admin.GetIndexStatusResponse)
    claims: Sequence[admin.WorkerCheck] = ()
    adapters: Sequence[admin.AdapterView] = ()
    metrics: Mapping[tuple[str, frozenset[tuple[str, str]]], float] = field(default_factory=dict)
    gateway_error: str = ""
    certificate_ends_s: float | None = None
    disks: Sequence[Disk] = ()
    probes: Sequence[Probe] = ()
    session: Probe | None = None
    comparisons: Sequence[Comparison] = ()
    missing: Mapping[Part, str] = field(default_factory=dict)

    def without(self, part: Part, why: str) -> "Seen":
        """That part could not be seen."""
        return replace(self, missing={**self.missing, part: why})

    def usable(self, pool: Pool) -> list[admin.WorkerView]:
        """Workers that may get requests of a pool; those that do both are of either, as everywhere."""
        return [view for view in self.workers if serves(view.registration.pool, pool) and is_usable(view)]

    def of_pool(self, pool: Pool) -> list[admin.WorkerView]:
        return [view for view in self.workers if serves(view.registration.pool, pool)]

    def again(self, view: admin.WorkerView) -> admin.WorkerView | None:
        """The same worker in the second look; None where it has gone or begun anew."""
        views = self.workers if self.later is None else self.later
        own = (name_of(view), view.registration.generation)
        return next((each for each in views if (name_of(each), each.registration.generation) == own), None)

    def is_set(self, key: str) -> bool:
        """Somebody has set this key of the configuration."""
        return self.sources.get(key, "default") != "default"


def is_usable(view: admin.WorkerView) -> bool:
    """Requests are sent there."""
    return may_work(view.registration) and not view.suspect and not view.version_skew


def name_of(view: admin.WorkerView) -> str:
    return view.registration.worker_id


def is_ready(view: admin.WorkerView) -> bool:
    """By its own account."""
    return view.registration.state == wire.WORKER_STATE_READY
