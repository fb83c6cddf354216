"""Last outputs that wait for the checksums of their leased blocks, which come with a later step of the engine."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster_core.engine_jobs import EngineOutput
from kv_transfer.handoff.content_check import CHECKSUMS_PARAM, Checksums
from kv_transfer.handoff.lease_params import encode_params
from worker_runtime.job_stream import JobStream

# A lease goes out unchecked where they have not come by then.
_MOST_STEPS = 8


@dataclass(slots=True)
class _Held:
    stream: JobStream
    output: EngineOutput
    params: Mapping[str, Any]
    steps: int = 0


class HeldLeases:
    """On the engine's thread. taken, forget: of a leased request by vLLM's name; see `ContentSampling`. leased: those
    names of which there is a lease still."""

    def __init__(
        self,
        taken: Callable[[str], Checksums | None],
        forget: Callable[[str], None],
        leased: Callable[[], Collection[str]],
    ) -> None:
        self._taken = taken
        self._forget = forget
        self._leased = leased
        self._held: list[_Held] = []

    def holds(self, stream: JobStream, output: EngineOutput, params: Mapping[str, Any] | None) -> bool:
        """Whether the output is kept here for now. params: of its lease, where it has one."""
        if output.lease is None or not params or not params.get(CHECKSUMS_PARAM):
            return False
        self._held.append(_Held(stream, output, params))
        return True

    def ready(self) -> list[tuple[JobStream, EngineOutput]]:
        """After a step: those that wait no more. Whose lease has ended does not: there may be no step any more."""
        waiting, ready = [], []
        leased = self._leased() if self._held else ()
        for each in self._held:
            name = each.stream.internal_id
            checksums = self._taken(name)
            each.steps += 1
            if checksums is None and each.steps < _MOST_STEPS and name in leased:
                waiting.append(each)
                continue
            self._forget(name)
            assert each.output.lease is not None
            params = encode_params({**each.params, CHECKSUMS_PARAM: checksums})
            ready.append((each.stream, replace(each.output, lease=replace(each.output.lease, connector_params=params))))
        self._held = waiting
        return ready

    def take_all(self) -> list[JobStream]:
        """Those that wait for what will not come any more."""
        held, self._held = self._held, []
        return [each.stream for each in held]
