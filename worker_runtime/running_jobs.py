"""The jobs of one engine from their start to their last output: how they begin, what is made of vLLM's outputs, how
they end, and which of them are leased. Everything here runs on the engine's thread.

Who holds a job:
    running             here by its own name, in vLLM's scheduler by `internal_id`
    finished, leased    here as a lease, in vLLM's scheduler until it was pulled, released or has expired; one that was
                        handed over likewise
    abandoned           nobody: vLLM aborts it; one that had just finished has its lease ended
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from cluster_core.clock import ClusterClock, monotonic_s
from cluster_core.engine_jobs import (
    Adapter,
    EngineJob,
    EngineOutput,
    FinishReason,
    HandoffOutcome,
    HandoffReport,
    KvLease,
    SessionMode,
    SessionProgress,
)
from cluster_core.errors import (
    AdapterNotLoadedError,
    InvalidInputError,
    JobFailedError,
    NotSupportedError,
    UnavailableError,
)
from kv_transfer import vllm_private
from kv_transfer.handoff.lease_params import REMOTE_DECODE, encode_params
from kv_transfer.handoff.rules import effective_deadline_s, stamp_deadline
from kv_transfer.model_features import Feature
from worker_runtime.engine_figures import EngineFigures
from worker_runtime.engine_sessions import SessionPrompt
from worker_runtime.engine_settings import EngineSettings
from worker_runtime.held_leases import HeldLeases
from worker_runtime.job_stream import JobStream, SessionReports, ended_badly

logger = logging.getLogger(__name__)

Made = list[tuple[JobStream, EngineOutput | Exception]]


class RunningJobs:
    """dead: why the engine takes no step any more; None while it lives. After its death every job fails."""

    def __init__(
        self,
        engine: Any,
        settings: EngineSettings,
        clock: ClusterClock,
        figures: EngineFigures,
        on_loop: Callable[..., object],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._counters = figures.counters
        self._costs = figures.costs
        self._block_size = figures.block_size
        self._missing_features = figures.missing_features
        self._on_loop = on_loop
        # By the job's own name.
        self._streams: dict[str, JobStream] = {}
        # By the lease's name, vLLM's own for the request.
        self._leases: dict[str, str] = {}
        self._held = HeldLeases(
            lambda name: vllm_private.connector_of(engine).content.taken(name),
            lambda name: vllm_private.connector_of(engine).content.forget(name),
            lambda: vllm_private.leased_request_ids(engine),
        )
        # vLLM's requests for the adapters that are loaded, by digest.
        self._adapters: dict[str, Any] = {}
        self._adapter_numbers = 0
        self.dead: str | None = None

    # How they begin.

    def add(self, stream: JobStream) -> None:
        def begin(params: Any) -> str:
            from kv_transfer.handoff.emitted_output import feed_front_end
            from worker_runtime.vllm_conversion import check_emitted, prompt_of, trace_headers

            job = stream.job
            if job.emitted is not None:
                model = self._engine.vllm_config.model_config
                room = vllm_private.block_counts(self._engine)[1] * self._block_size
                check_emitted(job, min(model.max_model_len, room), model.get_vocab_size())
            adapter = self._adapter_of(job)
            name: str = self._engine.add_request(
                job.request_id,
                prompt_of(job),
                params,
                lora_request=adapter,
                trace_headers=trace_headers(job),
                priority=job.priority,
            )
            if job.emitted is not None:
                feed_front_end(self._engine, name, job.emitted.token_ids)
            self._counters.prompt_tokens += len(job.token_ids)
            return name

        self._begin(stream, begin)

    def open(self, stream: JobStream, mode: SessionMode) -> None:
        """A session's job, whose prompt is still arriving."""
        reason = self._missing_features.get(Feature.SESSIONS)
        if self.dead is None and reason is not None:
            self._fail(stream, NotSupportedError(f"{reason}: it has no sessions"))
            return

        def begin(params: Any) -> str:
            stream.prompt = SessionPrompt(self._engine, stream.job, mode, params, self._adapter_of(stream.job))
            return stream.prompt.internal_id

        self._begin(stream, begin)

    def _adapter_of(self, job: EngineJob) -> Any:
        return self._adapters[job.adapter.digest] if job.adapter is not None else None

    # Their adapters.

    def load_adapter(self, adapter: Adapter) -> None:
        """Between two steps, which wait for it. Raises AdapterNotLoadedError for what vLLM does not take."""
        from vllm.lora.request import LoRARequest

        if self.dead is not None:
            raise UnavailableError(f"the engine died: {self.dead}")
        self._adapter_numbers += 1
        began_s = monotonic_s()
        # Named by what it is, so that vLLM's names of blocks are, too.
        request = LoRARequest(adapter.digest, self._adapter_numbers, adapter.path)
        try:
            self._engine.add_lora(request)
        except Exception as error:  # noqa: BLE001 - whatever a folder makes vLLM raise is the end of this adapter alone
            # It may have a place there already, and would cost another one its own.
            with suppress(Exception):
                self._engine.remove_lora(request.lora_int_id)
            raise AdapterNotLoadedError(f"adapter `{adapter.name}` cannot be loaded: {_first_line(error)}") from None
        self._adapters[adapter.digest] = request
        self._costs.adapter_loaded(monotonic_s() - began_s)

    def unload_adapter(self, digest: str) -> None:
        request = self._adapters.pop(digest, None)
        if request is not None and self.dead is None:
            self._engine.remove_lora(request.lora_int_id)

    def _begin(self, stream: JobStream, begin: Callable[[Any], str]) -> None:
        """Starts a job by `begin`, which gets vLLM's parameters and returns its name there; what is refused fails."""
        if self.dead is not None:
            self._fail(stream, UnavailableError(f"the engine died: {self.dead}"))
            return
        from vllm.exceptions import VLLMClientError

        from worker_runtime.vllm_conversion import check_imitable, sampling_params

        try:
            if stream.job.request_id in self._streams or stream.job.request_id in self._leases:
                raise InvalidInputError("is running or leased already", field="request_id")
            if self._settings.engine.device == "imitated":
                check_imitable(stream.job.sampling)
            stream.internal_id = begin(sampling_params(stream.job, self._pull_until_s(stream.job)))
        except InvalidInputError as error:
            self._fail(stream, error)
            return
        except (ValueError, TypeError, VLLMClientError) as error:
            self._fail(stream, InvalidInputError(str(error).strip(), field="request"))
            return
        except Exception:
            # Whatever taking in one job raises is that job's end, and not the engine's.
            logger.exception("it cannot be begun", extra={"request_id": stream.job.request_id})
            self._fail(stream, JobFailedError("the engine could not take the request in"))
            return
        self._streams[stream.job.request_id] = stream
        self._counters.requests += 1

    def _pull_until_s(self, job: EngineJob) -> float | None:
        if job.pull is None:
            return None
        stamped, deadline_s = job.pull.deadline_unix_ms, self._settings.handoff.deadline_s
        return effective_deadline_s(stamped, self._clock.unix_ms(), monotonic_s(), deadline_s)

    def take_in(self, stream: JobStream, token_ids: Sequence[int], *, replaces: bool) -> None:
        if self._runs(stream) and stream.prompt is not None:
            stream.prompt.take_in(token_ids, replaces=replaces)

    def close_input(self, stream: JobStream, token_ids: Sequence[int]) -> None:
        if self._runs(stream) and stream.prompt is not None:
            stream.prompt.close(token_ids)
            self._counters.prompt_tokens += stream.prompt.length

    def _runs(self, stream: JobStream) -> bool:
        return self.dead is None and self._streams.get(stream.job.request_id) is stream

    # What comes of them.

    def step(self, *, counts_prefixes: bool) -> Made:
        """One engine step. counts_prefixes: the engine tells of the prefixes that its jobs leave in the cache."""
        made: Made = []
        for output in self._engine.step():
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            item = self._convert(stream, output, counts_prefixes=counts_prefixes)
            if isinstance(item, Exception) or not self._held.holds(stream, item, output.kv_transfer_params):
                made.append((stream, item))
        return [*made, *self._held.ready()]

    def _convert(self, stream: JobStream, output: Any, *, counts_prefixes: bool) -> EngineOutput | Exception:
        """One vLLM output as ours: without text that has been sent, with what belongs to first and last outputs."""
        from worker_runtime.vllm_conversion import finish_reason, position_logprobs, prompt_logprobs

        completion, job = output.outputs[0], stream.job
        tokens, text, rows = list(completion.token_ids), completion.text, list(completion.logprobs or ())
        try:
            reason = finish_reason(completion.finish_reason)
        except KeyError:
            self._end(stream)
            if stream.prompt is not None:
                # Nobody is told what happened to it, and nothing of it is left.
                stream.prompt.take_record()
            return ended_badly(stream, str(completion.finish_reason))
        first_output = not stream.started
        skipped = min(stream.skip_chars, len(text))
        stream.skip_chars -= skipped
        stream.started = True
        self._counters.generated_tokens += len(tokens)
        top = job.sampling.logprobs
        # Before the job ends, which forgets the pull.
        first = self._first_output(stream, output) if first_output else {}
        stream.found_tokens = first.get("cached_tokens", stream.found_tokens)
        if reason is not None:
            self._counters.cacheable_requests += counts_prefixes and self._has_filled_a_block(stream)
        return EngineOutput(
            token_ids=tuple(tokens),
            text=text[skipped:],
            logprobs=tuple(
                position_logprobs(row, token, top or 0) for row, token in zip(rows, tokens, strict=top is not None)
            ),
            prompt_logprobs=prompt_logprobs(output.prompt_logprobs, job.token_ids, job.sampling.prompt_logprobs),
            finish_reason=reason,
            lease=self._end(stream, output, reason) if reason is not None else None,
            session=stream.prompt.take_record() if reason is not None and stream.prompt is not None else None,
            **first,
        )

    def _first_output(self, stream: JobStream, output: Any) -> dict[str, Any]:
        stats = output.metrics
        if stream.prompt is not None:
            return {
                "cached_tokens": stream.prompt.cached_tokens(),
                "prefill_ms": (monotonic_s() - stream.prompt.closed_s) * 1000,
            }
        return {
            "cached_tokens": output.num_cached_tokens or 0,
            "queue_ms": max(0.0, stats.scheduled_ts - stats.queued_ts) * 1000 if stats else 0.0,
            "prefill_ms": max(0.0, stats.first_token_ts - stats.scheduled_ts) * 1000 if stats else 0.0,
            "handoff": self._handoff_report(stream),
        }

    def _handoff_report(self, stream: JobStream) -> HandoffReport | None:
        if stream.job.pull is None:
            return None
        report: HandoffReport = vllm_private.connector_of(self._engine).take_report(stream.internal_id)
        if report.outcome is HandoffOutcome.PULLED and report.pulled_tokens:
            stream.pulled_tokens = report.pulled_tokens
            self._costs.pulled(report.transfer_ms / 1000, report.pulled_tokens)
        return report

    def _has_filled_a_block(self, stream: JobStream) -> bool:
        """Whether a job's prompt has brought at least one full block that was not cached.

        What was generated does not count: the same request again generates the same, and brings nothing. Of an answer
        that goes on elsewhere nobody knows what was cached.
        """
        if stream.job.emitted is not None and len(stream.job.emitted.token_ids) > 1:
            return False
        prompt_tokens = stream.prompt.length if stream.prompt is not None else len(stream.job.token_ids)
        found_blocks = stream.found_tokens // self._block_size
        if stream.found_tokens + self._block_size == prompt_tokens:
            # Of a prompt that is cached whole, vLLM computes the last block again.
            found_blocks += 1
        return prompt_tokens // self._block_size > found_blocks or stream.pulled_tokens >= self._block_size

    def report_progress(self) -> None:
        """To the owners of sessions, as far as it has changed."""
        changed: list[tuple[SessionReports, SessionProgress]] = []
        for stream in self._streams.values():
            if stream.session is not None and stream.prompt is not None:
                progress = stream.prompt.progress()
                if progress is not None and progress is not stream.session.reported:
                    stream.session.reported = progress
                    changed.append((stream.session, progress))
        if changed:
            self._on_loop(_report, changed)

    # How they end.

    def _end(self, stream: JobStream, output: Any = None, reason: FinishReason | None = None) -> KvLease | None:
        """The job runs no more; returns its lease when it has one that is of use."""
        stream.ended = True
        self._streams.pop(stream.job.request_id, None)
        self._forget_pull(stream)
        params = getattr(output, "kv_transfer_params", None)
        if not stream.job.hand_off or not params:
            return None
        connector = vllm_private.connector_of(self._engine)
        if reason is not FinishReason.LENGTH:
            # The prompt was answered with its first token: nobody will pull.
            connector.end_lease(stream.internal_id)
            return None
        return self._leased(stream, params)

    def hand_over(self, request_id: str) -> bool:
        """See `Engine.hand_over`."""
        stream = self._streams.get(request_id)
        if self.dead is not None or stream is None or not stream.started or stream.prompt is not None:
            return False
        params = vllm_private.hand_over(self._engine, stream.internal_id, REMOTE_DECODE)
        if params is None:
            return False
        self._end(stream)
        output = EngineOutput((), "", lease=self._leased(stream, params))
        if not self._held.holds(stream, output, params):
            self._on_loop(stream.items.put_nowait, output)
        return True

    def _leased(self, stream: JobStream, params: dict[str, Any]) -> KvLease:
        self._leases[stream.job.request_id] = stream.internal_id
        self._counters.handoffs_leased += 1
        deadline = stamp_deadline(self._clock.unix_ms(), self._settings.handoff.deadline_s)
        return KvLease(stream.job.request_id, encode_params(params), deadline)

    def abandon(self, stream: JobStream) -> None:
        """The consumer left: the job is aborted, or its lease ended where it had just finished."""
        if stream.ended:
            self.release(stream.job.request_id)
        elif self._runs(stream):
            del self._streams[stream.job.request_id]
            if stream.prompt is not None:
                stream.prompt.abort()
            else:
                self._engine.abort_request([stream.internal_id], internal=True)
            self._forget_pull(stream)

    def release(self, lease_id: str) -> bool:
        """Ends a lease; a prefill that still runs under that name is aborted."""
        if self.dead is not None:
            return False
        stream = self._streams.get(lease_id)
        if stream is not None:
            self.abandon(stream)
            self._fail(stream, UnavailableError("the request was released"))
            return True
        internal_id = self._leases.pop(lease_id, None)
        if internal_id is None or internal_id not in vllm_private.leased_request_ids(self._engine):
            return False
        vllm_private.connector_of(self._engine).end_lease(internal_id)
        self._counters.handoffs_released += 1
        return True

    def keep_leases(self, leased: set[str]) -> None:
        """Forgets those whose requests vLLM does not lease any more; `leased` are its own names of them."""
        self._leases = {name: internal for name, internal in self._leases.items() if internal in leased}

    def die(self, why: str) -> None:
        self.dead = why
        for stream in (*self._streams.values(), *self._held.take_all()):
            self._fail(stream, UnavailableError(f"the engine died: {why}"))
        self._streams.clear()

    def _forget_pull(self, stream: JobStream) -> None:
        if stream.job.pull is not None:
            vllm_private.connector_of(self._engine).pulls.forget(stream.internal_id)

    def _fail(self, stream: JobStream, error: Exception) -> None:
        if stream.session is not None:
            self._on_loop(stream.session.fail, error)
        self._on_loop(stream.items.put_nowait, error)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _report(changed: Sequence[tuple[SessionReports, SessionProgress]]) -> None:
    for session, progress in changed:
        session.report(progress)
