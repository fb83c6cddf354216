"""The door of a real router: every method by every role and by nobody, and whose is what."""

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from rachis.client import KEY_VARIABLE
from rachis.v1 import admin_pb2 as admin
from rachis.v1 import generation_pb2 as generation
from rachis.v1 import router_pb2 as api

from cluster_core.clock import unix_s
from command_line.doctor.doctor_run import doctor
from control_plane.access.api_keys import rotated
from control_plane.access.key_file import edit
from control_plane.access.roles import RPC_NEEDS, Identity
from control_plane.model.lifecycle import State
from tests.fakes.cluster import named, running_cluster, until
from tests.process.control_plane.access.conftest import REFUSED, WHO, Code, Keyed, Metadata, status_of


@pytest.mark.parametrize("who", WHO)
async def test_every_method_lets_in_whom_the_table_says(keyed: Keyed, who: str) -> None:
    """`nothing` has a key without a role."""
    identity = Identity(who, "acme", frozenset(WHO[who]), 0)
    ours = {path: need for path, need in RPC_NEEDS.items() if path.startswith("/rachis.")}
    for path, need in ours.items():
        found = await status_of(keyed.cluster.channel, path, keyed.metadata(who))
        if path.endswith(("/Generate", "/Resume", "/StreamGenerate")) and found not in REFUSED:
            keyed.cluster.calls += 1
        if who == "nobody":
            assert found is Code.UNAUTHENTICATED, path
        else:
            assert (found is Code.PERMISSION_DENIED) == (not identity.may(need)), (path, found)
            assert found is not Code.UNAUTHENTICATED, path


async def test_probes_need_no_key_and_reflection_needs_any(keyed: Keyed) -> None:
    channel = keyed.cluster.channel
    assert await channel.unary_unary("/grpc.health.v1.Health/Check", None, None)(b"") == b"\x08\x01"
    reflect: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", None, None)

    call: Any = reflect(metadata=keyed.metadata("nothing"))
    # `list_services`, as a message.
    await call.write(b"\x3a\x01*")
    await call.done_writing()
    assert b"rachis.v1.RouterService" in b"".join([answer async for answer in call])
    # A message that is written to a call that was refused meanwhile hides the refusal behind INTERNAL.
    assert await reflect(metadata=()).code() is Code.UNAUTHENTICATED


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer "),),
        (("authorization", "Basic Zm9vOmJhcg=="),),
        (("authorization", "Bearer rk-aaaaaaaaaaaaaaaa-" + "b" * 43),),
        (("x-api-key", "GOOD"),),
        (("authorization", "GOOD"),),
        (("authorization", "Bearer GOOD"), ("authorization", "Bearer rk-other")),
        (("authorization", "Bearer  GOOD extra"),),
        (("authorization", "Bearer GOO"),),
    ],
)
async def test_a_wrong_key_is_told_one_sentence_whatever_is_wrong_with_it(keyed: Keyed, metadata: Metadata) -> None:
    good = keyed.key["generate"]
    asked = tuple((name, value.replace("GOOD", good).replace("GOO", good[:-1])) for name, value in metadata)
    call = keyed.cluster.api.GetIdentity(api.GetIdentityRequest(), metadata=asked)
    refused = await keyed.refused(call)
    assert refused.code() is Code.UNAUTHENTICATED
    assert refused.details() == "a valid API key is needed: `authorization: Bearer rk-…`"


async def test_tokens_of_an_issuer_are_taken_beside_keys(tmp_path: Path, made: tuple[Path, dict[str, str]]) -> None:
    folder, given = made
    signer = ec.generate_private_key(ec.SECP256R1())
    jwks = tmp_path / "jwks.json"
    public = jwt.get_algorithm_by_name("ES256").to_jwk(signer.public_key(), as_dict=True)
    jwks.write_text(json.dumps({"keys": [{**public, "kid": "1", "alg": "ES256"}]}))
    flags: dict[str, Any] = {
        "security__keys_file": str(folder / "keys.json"),
        "security__secret_file": str(folder / "secret"),
        "security__jwt_jwks_file": str(jwks),
        "security__jwt_issuer": "https://issuer",
        "security__jwt_audience": "rachis",
    }
    claims = {"iss": "https://issuer", "aud": "rachis", "sub": "anna", "exp": unix_s() + 300, "tenant": "zeta"}
    async with running_cluster(**flags) as cluster:
        keyed = Keyed(cluster, tmp_path)
        keyed.key["token"] = jwt.encode({**claims, "roles": ["observe"]}, signer, "ES256", {"kid": "1"})
        keyed.key["late"] = jwt.encode({**claims, "exp": unix_s() - 60}, signer, "ES256", {"kid": "1"})
        keyed.key["key"] = given["generate"]
        told = await keyed.identity("token")
        assert (told.name, told.tenant, list(told.roles)) == ("anna", "zeta", ["observe"])
        assert (await keyed.identity("key")).tenant == "acme"
        assert (await keyed.refused(keyed.identity("late"))).code() is Code.UNAUTHENTICATED
        drain = admin.DrainWorkerRequest(worker_id="decode-0")
        refused = await keyed.refused(keyed.cluster.admin.DrainWorker(drain, metadata=keyed.metadata("token")))
        assert refused.code() is Code.PERMISSION_DENIED


async def test_who_one_is_can_be_asked(keyed: Keyed) -> None:
    assert await keyed.identity("generate") == api.GetIdentityResponse(
        name="generate", tenant="acme", roles=["generate"]
    )
    assert await keyed.identity("ops") == api.GetIdentityResponse(
        name="ops", tenant="zeta", roles=["observe", "operate"], lowest_priority=-7
    )


async def test_a_key_that_is_revoked_ends_at_the_door_and_what_runs_goes_on(keyed: Keyed) -> None:
    decoder = named(keyed.cluster, "decode-0").engine
    decoder.hold_before(0)
    running = asyncio.create_task(keyed.generate("generate"))
    await decoder.held.wait()
    edit(keyed.keys_file, lambda keys: keys.clear())
    await until(lambda: not keyed.knows("generate"))
    refused = await keyed.refused(
        keyed.cluster.api.GetIdentity(api.GetIdentityRequest(), metadata=keyed.metadata("generate"))
    )
    assert refused.code() is Code.UNAUTHENTICATED
    decoder.resume()
    assert (await running).usage.completion_tokens == 4


async def test_the_secret_before_a_rotation_goes_on_and_the_next_one_is_good(keyed: Keyed) -> None:
    await keyed.generate("generate")
    given: list[str] = []

    def change(keys: dict[str, Any]) -> None:
        key = next(each for each in keys.values() if each.name == "generate")
        keys[key.key_id], new = rotated(key, now_s=0.0, grace_s=1e12)
        given.append(new)

    edit(keyed.keys_file, change)
    keyed.key["next"] = given[0]
    async with asyncio.timeout(60):
        while True:
            assert (await keyed.identity("generate")).name == "generate"
            try:
                assert (await keyed.identity("next")).name == "generate"
                break
            except grpc.aio.AioRpcError:
                # The file is looked at each second, and so often a key may be wrong.
                await asyncio.sleep(1.0)


async def test_tenants_have_salts_of_their_own_and_clients_refine_them(keyed: Keyed) -> None:
    await keyed.generate("generate")
    await keyed.generate("all")
    await keyed.generate("all", cache_salt="mine")
    salts = [job.cache_salt for job in named(keyed.cluster, "prefill-0").engine.jobs]
    assert salts[0] == salts[1] != salts[2]
    assert all(len(salt) == 64 for salt in salts), "neither a tenant's name nor a client's salt goes on"
    assert [job.cache_salt for job in named(keyed.cluster, "decode-0").engine.jobs] == salts


async def test_sessions_have_the_salts_of_their_tenants(keyed: Keyed) -> None:
    await keyed.generate("generate")
    keyed.cluster.calls += 1
    session: Any = keyed.cluster.api.StreamGenerate(metadata=keyed.metadata("generate"))  # type: ignore[call-arg]
    sampling = generation.SamplingParams(temperature=0.0, max_tokens=2)
    opened = api.SessionOpen(mode=generation.SESSION_MODE_APPEND, sampling=sampling)
    await session.write(api.StreamGenerateRequest(open=opened))
    await session.write(api.StreamGenerateRequest(append=api.SessionAppend(piece=api.SessionPiece(text="hello"))))
    await session.write(api.StreamGenerateRequest(finish=api.SessionFinish()))
    async for _ in session:
        pass
    jobs = named(keyed.cluster, "decode-0").engine.jobs
    assert len({job.cache_salt for job in jobs}) == 1 and len(jobs) == 2


async def test_a_priority_below_the_keys_is_refused_by_name(keyed: Keyed) -> None:
    assert (await keyed.generate("generate", priority=0)).usage.completion_tokens == 4
    refused = await keyed.refused(keyed.generate("generate", priority=-1))
    assert refused.code() is Code.PERMISSION_DENIED
    assert refused.details() == "priority: must be at least 0 with the key `generate`, got -1"
    await keyed.cluster.ends_with({State.FINISHED: 1, State.REFUSED: 1})


async def test_a_tenant_is_told_of_its_own_requests_and_an_operator_of_all(keyed: Keyed) -> None:
    await keyed.generate("looker", "x" * 100, request_id="r1")

    async def explained(who: str) -> str:
        request = admin.ExplainPlacementRequest(request_id="r1")
        try:
            return (await keyed.cluster.admin.ExplainPlacement(request, metadata=keyed.metadata(who))).request_id
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"

    assert await explained("looker") == await explained("ops") == "r1"
    told = await explained("peer")
    assert told.startswith("NOT_FOUND") and "r1" not in told.replace("`r1`", "")

    async def traced(who: str, name: str) -> str:
        request = admin.GetTraceRequest(request_id=name)
        try:
            return (await keyed.cluster.admin.GetTrace(request, metadata=keyed.metadata(who))).request_id
        except grpc.aio.AioRpcError as error:
            return error.code().name

    assert [await traced(who, "r1") for who in ("looker", "ops", "peer")] == ["r1", "r1", "NOT_FOUND"]
    assert await traced("peer", "") == "NOT_FOUND", "nor of the latest"

    async def listed(who: str) -> list[str]:
        told = await keyed.cluster.admin.ListRequests(
            admin.ListRequestsRequest(running=10, ended=10), metadata=keyed.metadata(who)
        )
        return [view.request_id for view in (*told.running, *told.ended)]

    assert [await listed(who) for who in ("looker", "ops", "peer")] == [["r1"], ["r1"], []]

    async def asked_before(who: str) -> float:
        request = admin.LookupPrefixRequest(prompt=generation.PromptInput(text="x" * 100))
        found = await keyed.cluster.admin.LookupPrefix(request, metadata=keyed.metadata(who))
        return found.first_requests_per_s + sum(each.predicted_tokens for each in found.workers)

    assert await asked_before("looker") > 0
    assert await asked_before("peer") == 0, "nobody hears what another tenant has asked"


async def test_one_tenant_takes_no_explanation_from_another(keyed: Keyed) -> None:
    await keyed.generate("looker", "x" * 100, request_id="r1")
    await keyed.generate("peer", "y" * 40, request_id="r1")

    async def tokens(who: str) -> int:
        request = admin.ExplainPlacementRequest(request_id="r1")
        found = await keyed.cluster.admin.ExplainPlacement(request, metadata=keyed.metadata(who))
        return found.decisions[0].prompt_tokens

    assert (await tokens("looker"), await tokens("peer"), await tokens("ops")) == (100, 40, 40)


async def test_refusals_are_counted_by_why(keyed: Keyed) -> None:
    await keyed.refused(keyed.identity("nobody"))
    await keyed.refused(keyed.cluster.admin.GetPools(admin.GetPoolsRequest(), metadata=keyed.metadata("generate")))
    assert keyed.cluster.parts.door.access.refused == {"wrong_key": 1, "forbidden": 1}


async def test_a_message_of_a_stranger_is_not_parsed(keyed: Keyed) -> None:
    """What is no message at all would be INVALID_ARGUMENT if somebody had looked at it."""
    call = keyed.cluster.channel.unary_unary("/rachis.v1.AdminService/DrainWorker", None, None)
    refused = await keyed.refused(call(b"\xff" * 1000))
    assert refused.code() is Code.UNAUTHENTICATED
    refused = await keyed.refused(call(b"\xff" * 1000, metadata=keyed.metadata("operate")))
    assert refused.code() is Code.INVALID_ARGUMENT


async def test_a_handler_that_nobody_guards_refuses(keyed: Keyed) -> None:
    """As if the interceptor had been left out."""

    class Context:
        def invocation_metadata(self) -> Metadata:
            return ()

        async def abort(self, code: grpc.StatusCode, sentence: str, trailing: object) -> None:
            raise grpc.aio.AbortError(f"{code.name}: {sentence}")

    with pytest.raises(grpc.aio.AbortError, match="UNAUTHENTICATED: a valid API key is needed"):
        await keyed.cluster.parts.router.GetIdentity(api.GetIdentityRequest(), Context())  # type: ignore[arg-type]


async def test_the_doctor_says_what_a_key_does_not_let_it_see(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def told(who: str) -> tuple[int, dict[str, str]]:
        """Its exit code, and what it could not check and why."""
        monkeypatch.setenv(KEY_VARIABLE, keyed.key[who])
        code = await doctor(keyed.cluster.router.address, as_json=True)
        keyed.cluster.calls = sum(keyed.cluster.outcomes.values())
        lines = capsys.readouterr().out.splitlines()
        return code, {each["check"]: each["why"] for each in json.loads(lines[-1])["not_checked"]} if lines else {}

    _, blind = await told("observe")
    assert {blind[check] for check in ("answers", "handoff", "prefix_cache", "token_identity")} == {
        "the key `observe` has no role `generate`"
    }
    _, seeing = await told("looker")
    assert not seeing.keys() & {"answers", "handoff", "prefix_cache", "token_identity"}
    assert await told("generate") == (2, {}) == await told("nobody")
