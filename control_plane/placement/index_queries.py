"""What operators ask of the index, of placement and of requests, answered from this router's memory. Only `check` asks
the workers.

No question changes anything: it counts as no access and no request, and leaves the seeded choice of placement alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice

from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import worker_pb2 as wire

from cluster_core.errors import InvalidInputError, NotFoundError
from control_plane.access.access import Access
from control_plane.access.roles import Identity, Role
from control_plane.fleet.membership import Membership
from control_plane.intake import validation
from control_plane.intake.tokenization import Tokenizer
from control_plane.model.limits import DEFAULT_MAX_TOKENS
from control_plane.model.prefix_scope import PrefixScope
from control_plane.placement.decision_log import Explanation
from control_plane.placement.explanation import MOST_TRACED, decisions_on, explained, not_known, pool_choices
from control_plane.placement.index_ports import IndexPorts
from control_plane.placement.placer import Placer
from control_plane.prefix_index.hot_prefix import HotPrefix
from control_plane.prefix_index.index import Matches
from control_plane.prefix_index.index_check import IndexCheck
from control_plane.prefix_index.redis_index import IndexHealth
from control_plane.tracing.told import listed, told
from control_plane.tracing.told import not_known as not_traced
from control_plane.tracing.traces import Traces
from kv_transfer.claims.prefix_chunks import Keys, PackedPrompt, short_name

MOST_HOTTEST = 1000
MOST_PLACEMENTS = 100
# The shortest completion: a lookup wants none.
_SHORTEST = 1


@dataclass(frozen=True, slots=True)
class QueryRules:
    """As requests are taken: adapters are by name, those that may be asked for now."""

    access: Access
    adapters: Mapping[str, wire.Adapter]
    traces: Traces


class IndexQueries:
    """health: how far the index is followed. policy: the configured one, by name. caller: who asks; what is said of
    requests and prompts is of their tenant's."""

    def __init__(
        self,
        membership: Membership,
        index: IndexPorts,
        placer: Placer,
        tokenizer: Tokenizer,
        check: IndexCheck,
        *,
        health: Callable[[], IndexHealth],
        policy: str,
        rules: QueryRules,
    ) -> None:
        self.rules = rules
        self._membership = membership
        self._index = index.index
        self._placer = placer
        self._tokenizer = tokenizer
        self._check = check
        self._health = health
        self._now_s = index.now_s
        self._policy = policy

    def hottest(self, request: admin.GetHottestPrefixesRequest) -> admin.GetHottestPrefixesResponse:
        found = self._index.hottest(min(request.at_most, MOST_HOTTEST), self._now_s())
        return admin.GetHottestPrefixesResponse(prefixes=[self._prefix(each) for each in found])

    async def lookup(self, request: admin.LookupPrefixRequest, caller: Identity) -> admin.LookupPrefixResponse:
        """Raises ClientFault, or UnavailableError while no worker is known."""
        token_ids, scope = await self._checked(request, _SHORTEST, caller)
        prompt = self._placer.packed(token_ids, scope)
        keys = prompt.keys
        explanation = self._supposed(prompt, _SHORTEST, scope, caller)
        matches = self._placer.matches(keys)
        first, whole = self._rates(keys)
        return admin.LookupPrefixResponse(
            prompt_tokens=len(token_ids),
            chunks=len(keys),
            chunk_tokens=self._placer.chunk_tokens,
            first_requests_per_s=first,
            whole_requests_per_s=whole,
            workers=[self._holder(member.registration, matches) for member in self._membership.members()],
            choices=pool_choices(explanation, self._policy),
        )

    async def explain(self, request: admin.ExplainPlacementRequest, caller: Identity) -> admin.ExplainPlacementResponse:
        """Raises NotFoundError for a request that is not remembered, ClientFault for a prompt that is none."""
        if request.WhichOneof("asked") == "request_id":
            validation.check_request_id(request.request_id)
            log, tenant = self._placer.log, _tenant_of(caller)
            explanation = log.explanation(request.request_id, tenant)
            if explanation is None:
                raise NotFoundError(not_known(request.request_id, log.request_ids(tenant)), field="request_id")
            return explained(explanation, self._policy)
        if not request.HasField("supposed"):
            raise InvalidInputError("one of request_id or supposed must be set", field="asked")
        supposed = request.supposed
        max_tokens = supposed.max_tokens if supposed.HasField("max_tokens") else DEFAULT_MAX_TOKENS
        token_ids, scope = await self._checked(supposed, max_tokens, caller)
        prompt = self._placer.packed(token_ids, scope)
        return explained(self._supposed(prompt, max_tokens, scope, caller), self._policy)

    def placements(self, request: admin.ListPlacementsRequest, caller: Identity) -> admin.ListPlacementsResponse:
        most = min(request.at_most, MOST_PLACEMENTS)
        latest = islice(self._placer.log.latest(_tenant_of(caller)), most)
        return admin.ListPlacementsResponse(placements=[explained(each, self._policy, MOST_TRACED) for each in latest])

    def trace(self, request: admin.GetTraceRequest, caller: Identity) -> admin.GetTraceResponse:
        """Raises NotFoundError for a request that is not remembered, ClientFault for a name that is none."""
        validation.check_request_id(request.request_id)
        traces, tenant = self.rules.traces, _tenant_of(caller)
        trace = traces.find(request.request_id, tenant)
        if trace is None:
            raise NotFoundError(not_traced(request.request_id), field="request_id")
        decisions = decisions_on(self._placer.log, self._policy, trace.request_id, trace.tenant)
        return told(trace, traces.now_s(), traces.arrived_unix_s(trace), decisions)

    def requests(self, request: admin.ListRequestsRequest, caller: Identity) -> admin.ListRequestsResponse:
        return listed(self.rules.traces, request, _tenant_of(caller))

    async def check(self) -> admin.CheckIndexResponse:
        return await self._check.run()

    def status(self) -> admin.GetIndexStatusResponse:
        health, index = self._health(), self._index
        return admin.GetIndexStatusResponse(
            entries=index.entries,
            capacity_entries=index.capacity,
            bytes=index.bytes,
            dropped=index.dropped,
            chunk_tokens=self._placer.chunk_tokens,
            connected=health.connected,
            staleness_s=health.staleness_s,
            stale=health.stale,
            workers=[
                admin.WorkerFeedStatus(
                    worker_id=worker.worker_id,
                    generation=worker.generation,
                    sequence=worker.sequence,
                    lag_batches=worker.lag_batches,
                    in_sync=worker.in_sync,
                    silent=worker.silent,
                )
                for worker in health.workers
            ],
            batches=health.counts.batches,
            keys=health.counts.keys,
            duplicates=health.counts.duplicates,
            gaps=health.counts.gaps,
            resyncs=health.counts.resyncs,
            damaged=health.counts.damaged,
            load_only_decisions=self._placer.counts.load_only,
            disaggregation={reason.value: count for reason, count in self._placer.counts.reasons.items()},
        )

    def _supposed(self, prompt: PackedPrompt, max_tokens: int, scope: PrefixScope, caller: Identity) -> Explanation:
        weight = self.rules.access.limits_of(caller.tenant).weight
        return self._placer.supposed(prompt, max_tokens, scope.adapter_digest, caller.tenant, weight)

    async def _checked(
        self, asked: admin.LookupPrefixRequest | admin.SupposedRequest, max_tokens: int, caller: Identity
    ) -> tuple[list[int], PrefixScope]:
        """The prompt's tokens and their scope, after the checks of `Generate`."""
        prompt = asked.prompt
        model = self._membership.served_model()
        sampling = generation.SamplingParams(max_tokens=max_tokens)
        validation.check_cache_salt(asked.cache_salt)
        adapter = validation.check_model(asked.model, model.name, self.rules.adapters)
        validation.check_prompt_form(prompt, model)
        validation.check_sampling(sampling, model)
        token_ids = await self._tokenizer.token_ids(prompt)
        validation.check_tokens(token_ids, sampling, model)
        return token_ids, PrefixScope(self.rules.access.salt(caller, asked.cache_salt), adapter)

    def _prefix(self, prefix: HotPrefix) -> admin.IndexedPrefix:
        return admin.IndexedPrefix(
            name=short_name(prefix.key),
            tokens=prefix.chunks * self._placer.chunk_tokens,
            requests_per_s=prefix.rate,
            device_workers=prefix.device,
            host_workers=prefix.host,
            parent=short_name(prefix.parent) if prefix.parent is not None else "",
        )

    def _rates(self, keys: Keys) -> tuple[float, float]:
        """Of the first chunk, and of the last."""
        if not len(keys):
            return 0.0, 0.0
        first, whole = self._index.hotness(keys[[0, -1]], self._now_s())
        return float(first), float(whole)

    def _holder(self, record: wire.WorkerRegistration, matches: Matches) -> admin.PrefixHolder:
        slot = self._index.slot(record.worker_id, record.generation)
        device, warm, held = (
            (int(matches.device[slot]), int(matches.warm[slot]), int(matches.held[slot])) if slot >= 0 else (0, 0, 0)
        )
        return admin.PrefixHolder(
            worker_id=record.worker_id,
            pool=record.pool,
            generation=record.generation,
            device_tokens=device * self._placer.chunk_tokens,
            predicted_tokens=(warm - device) * self._placer.chunk_tokens,
            host_tokens=(held - warm) * self._placer.chunk_tokens,
            in_index=slot >= 0,
        )


def _tenant_of(caller: Identity) -> str | None:
    """Whose requests the caller may be told of; None: everybody's."""
    return None if Role.OPERATE in caller.roles else caller.tenant
