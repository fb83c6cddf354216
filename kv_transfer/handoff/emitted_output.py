"""A request that arrives with output: tokens which other engines have sampled, and which its client has.

To vLLM it is then as a request that it had preempted itself: prompt and output are computed in one prefill, and the
next token is sampled as if the engine had sampled all before it. What vLLM remembers of a request that it preempts is
made here for one that it has never seen:
    scheduler        `EmittedOutput`: its output tokens, and with them its length and the hashes of its blocks, and how
                     far its grammar is
    model runner     `EmittedRows`: the output of its row, which penalties and minimum lengths count, and its generator,
                     advanced by one draw for each token. V2 gets the output with the prompt, and draws by position
    front end        `feed_front_end`: its text, and the search for stop strings
The first token of a hand-off arrives so, and the whole answer so far of a request that goes on elsewhere.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from cluster_core.errors import InvalidInputError

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler as _Scheduler
    from vllm.v1.worker.gpu_input_batch import InputBatch as _InputBatch
else:
    _Scheduler = _InputBatch = object

# Key in `SamplingParams.extra_args`: the tokens, in order.
EMITTED_ARG = "rachis_emitted"


def emitted_of(sampling_params: Any) -> list[int]:
    """The request's own list; empty where nothing has been emitted."""
    extra = sampling_params.extra_args if sampling_params is not None else None
    emitted: list[int] = (extra or {}).get(EMITTED_ARG, [])
    return emitted


class EmittedOutput(_Scheduler):
    """A mixin over `Scheduler` and `AsyncScheduler`, the last one before them in the bases."""

    def add_request(self, request: Request) -> None:
        emitted = emitted_of(request.sampling_params)
        if emitted and not request.num_output_tokens:
            request.append_output_token_ids(emitted)
            if len(emitted) > 1:
                # vLLM counts what it finds in caches for first prefills alone, where it cannot be more than the prompt.
                request.prefill_stats = None
        super().add_request(request)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        compiles = request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        is_ready: bool = super()._handle_blocked_waiting_request(request)
        if not (compiles and is_ready) or self._follows(request):
            return is_ready
        # As vLLM ends a request whose grammar does not compile.
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.grammar_compile_error_reqs.add(request.request_id)
        return False

    def _follows(self, request: Request) -> bool:
        """Takes its grammar, compiled just now, past what has been emitted. False: the grammar does not take that."""
        emitted = emitted_of(request.sampling_params)
        accepted: bool = self.structured_output_manager.accept_tokens(request, emitted)
        return accepted


class EmittedRows(_InputBatch):
    """A mixin over the `InputBatch` of vLLM's V1 model runner."""

    vocab_size: int

    def add_request(self, request: Any) -> int:
        """A row that is there for the first time: whatever leaves the batch and comes back has its output already."""
        emitted = emitted_of(request.sampling_params)
        if emitted and not request.output_token_ids:
            request.output_token_ids.extend(emitted)
            _advance(request.generator, len(emitted), self.vocab_size)
        row: int = super().add_request(request)
        return row


def _advance(generator: Any, draws: int, vocabulary: int) -> None:
    """As vLLM's `TopKTopPSampler` draws for each token: on a CPU one seed (`forward_cpu`), on a GPU noise for the whole
    vocabulary (`random_sample`)."""
    if generator is None:
        return
    import torch

    if generator.device.type == "cpu":
        for _ in range(draws):
            torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long)
        return
    noise = torch.empty(vocabulary, dtype=torch.float32, device=generator.device)
    for _ in range(draws):
        noise.exponential_(generator=generator)


def accept_emitted_rows(worker: Any) -> None:
    """Mixes `EmittedRows` into the batch of a worker that is ready; `collective_rpc` brings it to all of an engine.

    V2 of vLLM's model runners needs none of it: see the module.
    """
    if worker.use_v2_model_runner:
        return
    batch = worker.model_runner.input_batch
    kind = type(batch)
    batch.__class__ = type(f"Emitted{kind.__name__}", (EmittedRows, kind), {})


def feed_front_end(engine: Any, name: str, emitted: Sequence[int]) -> None:
    """The detokenizer of a request that has just been added goes on from these tokens of its answer.

    Raises InvalidInputError where the answer has ended with them, by a stop string; whatever it raises, the request is
    gone then.
    """
    detokenizer = engine.output_processor.request_states[name].detokenizer
    try:
        if detokenizer.update(list(emitted), False) is not None:
            raise InvalidInputError("ends with a stop string", field="emitted")
    except BaseException:
        engine.abort_request([name], internal=True)
        raise
