"""Rates of tenants at a whole router: what is counted, what is refused, and that Redis may be away."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from rachis.conventions import next_message
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_configs.loading import load
from cluster_core.errors import ConfigError
from cluster_wire.registry import rate_key
from control_plane.intake.prompt_memory import TOKEN_BYTES
from control_plane.intake.tenant_rates import TenantRates
from control_plane.model.lifecycle import State
from tests.fakes.answers import retry_after_ms
from tests.fakes.cluster import SERVICE, until
from tests.process.control_plane.access.conftest import Code, Keyed, keyed_cluster

Made = tuple[Path, dict[str, str]]
# Slower than any test.
NOTHING_COMES_BACK = "burst_s: 1000"


def written(folder: Path, text: str) -> str:
    """The file of tenants, replaced as a whole."""
    new = folder / "tenants.new"
    new.write_text(text)
    return str(new.replace(folder / "tenants.yaml"))


@asynccontextmanager
async def limited(folder: Path, made: Made, text: str, **more: Any) -> AsyncIterator[Keyed]:
    async with keyed_cluster(folder, made, security__tenants_file=written(folder, text), **more) as keyed:
        yield keyed


def rates(keyed: Keyed) -> TenantRates:
    return keyed.cluster.parts.rates.rates


async def sample(keyed: Keyed, name: str, **labels: str) -> float:
    """Read as Prometheus does, on another thread."""
    registry = keyed.cluster.parts.metrics.registry
    found = await asyncio.to_thread(registry.get_sample_value, name, labels)
    assert found is not None, name
    return found


async def refusal(keyed: Keyed, who: str, **fields: Any) -> grpc.aio.AioRpcError:
    return await keyed.refused(keyed.generate(who, **fields))


def request_of(text: str, max_tokens: int = 4) -> api.GenerateRequest:
    sampling = generation.SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return api.GenerateRequest(prompt=generation.PromptInput(text=text), sampling=sampling)


async def open_session(keyed: Keyed, prefix: str) -> Any:
    call: Any = keyed.cluster.api.StreamGenerate(metadata=keyed.metadata("generate"))  # type: ignore[call-arg]
    keyed.cluster.calls += 1
    sampling = generation.SamplingParams(temperature=0.0, max_tokens=4)
    opened = api.SessionOpen(
        mode=generation.SESSION_MODE_APPEND, prefix=generation.PromptInput(text=prefix), sampling=sampling
    )
    await call.write(api.StreamGenerateRequest(open=opened))
    return call


async def test_a_tenant_that_has_had_its_requests_is_told_when_to_come_back(tmp_path: Path, made: Made) -> None:
    async with limited(tmp_path, made, f"acme: {{requests_per_s: 0.003, {NOTHING_COMES_BACK}}}") as keyed:
        # A burst of three, and the one that begins to owe.
        for _ in range(4):
            await keyed.generate("generate")
        refused = await refusal(keyed, "all")
        assert refused.code() is Code.RESOURCE_EXHAUSTED
        assert "the tenant `acme` has had its requests: requests_per_s is 0.003 over all routers" in (
            refused.details() or ""
        )
        told_ms = retry_after_ms(refused)
        assert told_ms is not None and 0 < told_ms <= 1000 / 0.003
        await keyed.generate("peer")
        assert await sample(keyed, "rachis_rate_refusals_total", limit="requests_per_s") == 1
        assert await sample(keyed, "rachis_rate_refusals_total", limit="tokens_per_s") == 0
        assert keyed.cluster.outcomes[State.REFUSED] == 1
        # Redis has nothing but the registry here.
        assert await sample(keyed, "rachis_rate_requests_apart_total") > 0


async def test_prompt_and_answer_are_charged_and_max_tokens_is_not(tmp_path: Path, made: Made) -> None:
    async with limited(tmp_path, made, f"acme: {{tokens_per_s: 1, {NOTHING_COMES_BACK}}}") as keyed:
        keyed.cluster.registry.is_whole = True
        completion = await keyed.generate("generate", "0123456789" * 5)
        used = completion.usage.prompt_tokens + completion.usage.completion_tokens
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (50, 4)
        assert await level(keyed) == pytest.approx(1000 - used, abs=5)
        refused = await keyed.refused(keyed.generate("generate", "x" * 600))
        assert refused.code() is Code.OUT_OF_RANGE
        assert await level(keyed) == pytest.approx(1000 - used, abs=5), "what is not taken is not charged"


async def level(keyed: Keyed) -> float:
    """What the tenant's bucket of tokens has, as Redis knows once all has been told."""
    await keyed.cluster.parts.rates.share()
    kept = keyed.cluster.registry.store.get(rate_key(SERVICE, "tokens_per_s", "acme"))
    assert kept is not None
    return float(kept.split()[0])


async def test_choices_share_a_prompt_and_a_resumed_answer_is_charged_for_what_is_computed_again(
    tmp_path: Path, made: Made
) -> None:
    async with limited(tmp_path, made, f"acme: {{tokens_per_s: 1, {NOTHING_COMES_BACK}}}") as keyed:
        keyed.cluster.registry.is_whole = True
        await keyed.generate("generate", "0123456789", n=3)
        assert await level(keyed) == pytest.approx(1000 - 10 - 3 * 4, abs=5)
        request = request_of("0123456789")
        received = api.ReceivedAnswer(token_ids=[1, 2, 3])
        keyed.cluster.calls += 1
        call = keyed.cluster.api.Resume(
            api.ResumeRequest(request=request, received=[received]), metadata=keyed.metadata("generate")
        )
        _ = [response async for response in call]
        assert await level(keyed) == pytest.approx(1000 - 10 - 12 - 10 - 3 - 1, abs=5)


async def test_a_session_is_charged_for_what_comes_and_for_its_answer(tmp_path: Path, made: Made) -> None:
    async with limited(
        tmp_path, made, f"acme: {{requests_per_s: 0.001, tokens_per_s: 1, {NOTHING_COMES_BACK}}}"
    ) as keyed:
        keyed.cluster.registry.is_whole = True
        call = await open_session(keyed, "0123456789")
        piece = api.SessionPiece(text="0123456789" * 2)
        await call.write(api.StreamGenerateRequest(append=api.SessionAppend(piece=piece)))
        await call.write(api.StreamGenerateRequest(finish=api.SessionFinish()))
        _ = [event async for event in call]
        assert await level(keyed) == pytest.approx(1000 - 30 - 4, abs=5)
        await keyed.generate("generate")
        assert (await refusal(keyed, "generate")).code() is Code.RESOURCE_EXHAUSTED


async def test_an_answer_whose_client_leaves_is_charged_for_what_there_was(tmp_path: Path, made: Made) -> None:
    async with limited(tmp_path, made, f"acme: {{tokens_per_s: 1, {NOTHING_COMES_BACK}}}") as keyed:
        keyed.cluster.registry.is_whole = True
        decode = keyed.cluster.workers[-1].engine
        decode.hold_before(3)
        keyed.cluster.calls += 1
        request = request_of("0123456789", max_tokens=400)
        call: Any = keyed.cluster.api.Generate(request, metadata=keyed.metadata("generate"))
        await decode.held.wait()
        call.cancel()
        await until(lambda: keyed.cluster.outcomes.get(State.CANCELLED, 0) == 1)
        decode.resume()
        assert 1000 - 10 - 4 - 5 <= await level(keyed) <= 1000 - 10 - 1 + 5


async def test_what_gets_no_slot_costs_no_tokens(tmp_path: Path, made: Made) -> None:
    few = {"router__max_in_flight_requests": 1, "router__max_queued_requests": 0, "router__queue_timeout_s": 0.5}
    async with limited(tmp_path, made, f"acme: {{tokens_per_s: 1, {NOTHING_COMES_BACK}}}", **few) as keyed:
        keyed.cluster.registry.is_whole = True
        decode, admission = keyed.cluster.workers[-1].engine, keyed.cluster.parts.admission
        # A session whose prompt is computed has no slot.
        computed = await open_session(keyed, "01234")
        await computed.read()
        await until(lambda: not admission.in_flight)
        decode.hold_before(3)
        running = asyncio.create_task(keyed.generate("generate", "0123456789"))
        await decode.held.wait()
        refused = await keyed.refused(keyed.generate("generate", "x" * 300))
        assert "more are not taken" in (refused.details() or "")
        await computed.write(
            api.StreamGenerateRequest(append=api.SessionAppend(piece=api.SessionPiece(text="x" * 300)))
        )
        # It goes on, and waits for one beside the queue.
        refusals = {computed: "waited 0.5 s for a place", await open_session(keyed, "x" * 300): "more are not taken"}
        for session, why in refusals.items():
            with pytest.raises(grpc.aio.AioRpcError, match=why):
                while await next_message(session) is not None:
                    pass
        assert await level(keyed) == pytest.approx(1000 - 5 - 10, abs=5)
        decode.resume()
        await running
        assert await level(keyed) == pytest.approx(1000 - 5 - 10 - 4, abs=5)


async def test_what_expires_in_the_queue_costs_no_tokens(tmp_path: Path, made: Made) -> None:
    few = {"router__max_in_flight_requests": 1, "router__request_timeout_s": 1}
    async with limited(tmp_path, made, f"acme: {{tokens_per_s: 1, {NOTHING_COMES_BACK}}}", **few) as keyed:
        keyed.cluster.registry.is_whole = True
        # A full bucket is not kept.
        keyed.cluster.parts.rates.spend("acme", 10)
        async with keyed.cluster.parts.admission.slot():
            refused = await keyed.refused(keyed.generate("generate", "x" * 300))
            assert refused.code() is Code.DEADLINE_EXCEEDED
            with pytest.raises(grpc.aio.AioRpcError, match="deadline passed"):
                await next_message(await open_session(keyed, "x" * 300))
        assert await level(keyed) == pytest.approx(1000 - 10, abs=5)


async def test_what_there_is_no_memory_for_costs_no_tokens(tmp_path: Path, made: Made) -> None:
    rate = f"acme: {{tokens_per_s: 1, {NOTHING_COMES_BACK}}}"
    async with limited(tmp_path, made, rate, router__max_prompt_mib=1) as keyed:
        keyed.cluster.registry.is_whole = True
        prompts, text = keyed.cluster.parts.admission.prompts, "x" * 300
        # Its text fits, its tokens do not.
        with prompts.holding(prompts.limit_bytes // TOKEN_BYTES - 100):
            refused = await keyed.refused(keyed.generate("generate", text))
            assert "router.max_prompt_mib" in (refused.details() or "")
            received = api.ReceivedAnswer(token_ids=[1, 2, 3])
            resumed = api.ResumeRequest(request=request_of(text), received=[received])
            keyed.cluster.calls += 1
            call = keyed.cluster.api.Resume(resumed, metadata=keyed.metadata("generate"))
            with pytest.raises(grpc.aio.AioRpcError, match="max_prompt_mib"):
                _ = [response async for response in call]
            session = await open_session(keyed, text)
            with pytest.raises(grpc.aio.AioRpcError, match="max_prompt_mib"):
                while await next_message(session) is not None:
                    pass
        await keyed.generate("generate", text)
        assert await level(keyed) == pytest.approx(1000 - 300 - 4, abs=5)


async def test_a_file_that_changes_holds_within_a_second_and_a_bad_one_changes_nothing(
    tmp_path: Path, made: Made
) -> None:
    async with limited(tmp_path, made, "{}") as keyed:
        access = keyed.cluster.parts.door.access
        await keyed.generate("generate")

        written(tmp_path, "acme: {requests_per_s: 0.003, burst_s: 1}")
        await until(lambda: access.limits_of("acme").requests_per_s == 0.003)
        await keyed.generate("generate")
        assert (await refusal(keyed, "generate")).code() is Code.RESOURCE_EXHAUSTED
        written(tmp_path, "acme: {requests_per_s: -1}")
        await asyncio.sleep(1.5)
        assert access.limits_of("acme").requests_per_s == 0.003
        written(tmp_path, "zeta: {weight: 2}")
        await until(lambda: access.limits_of("acme").requests_per_s is None)
        await keyed.generate("generate")


async def test_a_bad_file_at_the_start_is_a_sentence(tmp_path: Path, made: Made) -> None:
    with pytest.raises(ConfigError, match=r"security.tenants_file: .*acme.requests_per_s: must be a number from 0.001"):
        async with limited(tmp_path, made, "acme: {requests_per_s: 0}"):
            pass


def test_without_keys_nobody_has_a_tenant(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tenants_file needs keys_file or jwt_jwks_file"):
        load(flags={"security.tenants_file": str(tmp_path / "tenants.yaml")})
