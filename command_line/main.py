"""The `rachis` command: its commands and options, and errors as sentences instead of tracebacks."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import grpc
import typer
from rachis.v1 import admin_pb2 as admin
from rich.markup import escape

from cluster_configs import loading
from cluster_core.engine_jobs import SessionMode
from cluster_core.errors import ClientFault, ConfigError, RachisError
from cluster_core.ids import new_request_id
from command_line import options
from command_line.output import err, out, print_json, print_table
from control_plane.client import chat_prompt, text_prompt, token_prompt
from control_plane.intake.validation import MAX_PRIORITY
from control_plane.model.limits import DEFAULT_MAX_TOKENS
from prefill_worker.policies import POLICIES

app = typer.Typer(
    name="rachis",
    help="Disaggregated prefill and decode for large language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="The configuration.", no_args_is_help=True)
bench_app = typer.Typer(help="Measured comparisons.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
index_app = typer.Typer(help="Which prefixes are hot, and who holds them.", no_args_is_help=True)
placement_app = typer.Typer(help="Why requests go where they go.", no_args_is_help=True)
app.add_typer(index_app, name="index")
app.add_typer(placement_app, name="placement")
cluster_app = typer.Typer(help="Clusters of many hosts, brought up by `ray up`.", no_args_is_help=True)
app.add_typer(cluster_app, name="cluster")

UINT32 = 2**32 - 1
UINT64 = 2**64 - 1
USAGE_EXIT_CODE = 2


INTERRUPTED_EXIT_CODE = 130
_CLIENT_CODES = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.NOT_FOUND)


def run() -> None:
    """Console script. User errors exit 2, operating faults 1, both with one sentence on standard error."""
    try:
        app()
    except (RachisError, grpc.aio.AioRpcError) as error:
        sys.exit(_told(error))
    except BaseExceptionGroup as group:
        # Of calls that ran side by side, the first that failed speaks for all.
        first = _first_leaf(group)
        if not isinstance(first, RachisError | grpc.aio.AioRpcError):
            raise
        sys.exit(_told(first))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_EXIT_CODE)


def _told(error: RachisError | grpc.aio.AioRpcError) -> int:
    """Says it, and returns the exit code."""
    if isinstance(error, RachisError):
        status, message, users = error.status, str(error), isinstance(error, ClientFault)
    else:
        status, message, users = error.code().name, error.details() or "", error.code() in _CLIENT_CODES
    err.print(
        "[bold red]error[/bold red]", escape(message if isinstance(error, RachisError) else f"{status}: {message}")
    )
    if "--json" in sys.argv:
        print_json({"error": message, "status": status})
    return USAGE_EXIT_CODE if users else 1


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, BaseExceptionGroup) else first


@app.command()
def serve(
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    address: Annotated[
        str | None, typer.Option("--address", help="Ray cluster to join; auto: the one of this host. Default: its own.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Bring a service up and serve until Ctrl-C or SIGTERM."""
    from command_line.serve import serve as serve_now

    joined = {"ray.address": address} if address is not None else None
    loaded = options.load_config(profile, config, assignments, model, joined)
    asyncio.run(serve_now(loaded, options.state_file(), as_json=as_json))


@app.command()
def route(
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """One more router for a running service: the same service.name, redis.url and model, its own router.port."""
    from command_line.route import route as route_now

    loaded = options.load_config(profile, config, assignments, model)
    asyncio.run(route_now(loaded, as_json=as_json))


@app.command()
def generate(
    prompt: options.Prompt = None,
    chat: options.Chat = False,
    tokens: options.Tokens = None,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends generation; may be given several times.")] = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logprobs: int | None = None,
    cache_salt: options.CacheSalt = "",
    priority: Annotated[
        int, typer.Option(min=-MAX_PRIORITY, max=MAX_PRIORITY, help="Decode workers admit the lowest first.")
    ] = 0,
    timeout_s: float = 600.0,
    request_id: Annotated[
        str, typer.Option(help="Your name for it, for `rachis placement explain`; one is made by default.")
    ] = "",
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Send one prompt to a running service and stream the answer."""
    from command_line.generate import generate as generate_now

    sampling: dict[str, Any] = {
        "max_tokens": _whole(max_tokens, "--max-tokens"),
        "temperature": temperature,
        "top_p": top_p,
        "top_k": _whole(top_k, "--top-k"),
        "min_p": min_p,
        "stop": stop or [],
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "cache_salt": cache_salt,
        "priority": priority,
    }
    if seed is not None:
        sampling["seed"] = _whole(seed, "--seed", UINT64)
    if logprobs is not None:
        sampling["logprobs"] = _whole(logprobs, "--logprobs")
    given = _prompt(prompt, chat, tokens)
    name = request_id or new_request_id()
    where = _running_address(address)
    asyncio.run(generate_now(where, given, sampling, request_id=name, timeout_s=timeout_s, as_json=as_json))


@app.command()
def status(
    tiers: Annotated[
        bool, typer.Option("--tiers", help="What device and host memory saved, and the hottest prefixes.")
    ] = False,
    decode: Annotated[
        bool, typer.Option("--decode", help="How decode workers form their batches, and what waits and why.")
    ] = False,
    worker: Annotated[str | None, typer.Option(help="Show this worker only, for example decode-0.")] = None,
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Show what runs here."""
    from command_line.status import status as status_now

    shown = status_now(address, options.state_file(), tiers=tiers, decode=decode, worker=worker, as_json=as_json)
    raise typer.Exit(asyncio.run(shown))


@app.command()
def scale(
    sizes: Annotated[list[str], typer.Argument(help="prefill=N, decode=N, or both.")],
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Change how many workers a pool has; those that are too many are drained first."""
    from command_line.pools import parse_sizes
    from command_line.pools import scale as scale_now

    asyncio.run(scale_now(_running_address(address), parse_sizes(sizes), as_json=as_json))


@app.command()
def drain(
    worker_id: Annotated[str | None, typer.Argument(help="For example decode-0.")] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="All workers of this host instead, as status has it.")
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="It stays in its pool and takes nothing new, until --resume.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Take it back into rotation.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also the last decode worker.")] = False,
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Have a worker leave: nothing new comes to it, what runs there ends, sessions that wait for input move."""
    from command_line import pools

    where = _running_address(address)
    if stay and resume:
        raise ConfigError("cannot go with --resume", field="--stay")
    if (worker_id is None) == (node is None):
        raise ConfigError("name a worker, or a host with --node", field="drain")
    if stay or resume:
        asyncio.run(pools.set_draining(where, worker_id, node, draining=stay, as_json=as_json))
    else:
        asyncio.run(pools.remove(where, worker_id, node, force=force, as_json=as_json))


@app.command()
def restart(
    workers: Annotated[list[str] | None, typer.Argument(help="For example decode-0; all where none is named.")] = None,
    rolling: Annotated[bool, typer.Option("--rolling", help="One after the other, each drained first.")] = False,
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Start workers again without losing a request."""
    from command_line.pools import restart as restart_now

    if not rolling:
        raise ConfigError("is the only way: workers are started again one after the other", field="--rolling")
    asyncio.run(restart_now(_running_address(address), workers or [], as_json=as_json))


@app.command()
def demo(
    profile: options.Profile = None,
    assignments: options.Assignments = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="A question whose pages are still being retrieved, with and without.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Start a service, answer three recall questions through both pools, stop."""
    from command_line.demo import demo as demo_now
    from command_line.demo_streaming import demo_streaming

    loaded = options.load_config(profile, None, assignments, None, options.BOTH_POOLS)
    show = demo_streaming if streaming else demo_now
    raise typer.Exit(asyncio.run(show(loaded, options.state_file(), as_json=as_json)))


@app.command()
def verify(
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, max=256)] = 4,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare the cluster's tokens with those of one plain vLLM."""
    from command_line.verify import verify as verify_now

    loaded = options.load_config(profile, config, assignments, model, options.BOTH_POOLS)
    code = asyncio.run(
        verify_now(loaded, options.state_file(), address, prompts, seed=seed, concurrency=concurrency, as_json=as_json)
    )
    raise typer.Exit(code)


@app.command()
def profile(
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("rachis-cost-profile.json"),
    plot: Annotated[Path | None, typer.Option(help="Where the picture goes; default is beside the figures.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, max=1000, help="Measurements of each size.")] = 5,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure what recomputing and what swapping costs here, for cost-based preemption; under five minutes."""
    from command_line.profile import profile as profile_now

    loaded = options.load_config(profile, config, assignments, model)
    asyncio.run(profile_now(loaded, output, plot, repetitions, as_json=as_json))


@app.command()
def simulate(
    scenario: Annotated[Path, typer.Argument(help="A YAML file; see docs/simulator.md and benchmarks/scenarios/.")],
    change: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE for all variants, such as pools.decode.workers=8.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the scenario's.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF: CCDF of TTFT, throughput, batches, hits.")] = None,
    html: Annotated[Path | None, typer.Option(help="One page with the table, the plots and the scenario.")] = None,
    curves: Annotated[bool, typer.Option("--curves", help="CCDF and series in the JSON as well.")] = False,
    timing: Annotated[bool, typer.Option("--timing", help="What the simulation took, in the JSON as well.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """A cluster that does not exist, on requests that nobody sends: the production code over cost models of engines."""
    from command_line.simulate import Options
    from command_line.simulate import simulate as simulate_now

    given = Options(scenario, change or (), seed, plot, html, curves, timing)
    simulate_now(given, as_json_text=as_json)


@app.command()
def plan(
    trace: Annotated[Path, typer.Option(help="A file of requests: Mooncake's, sessions, or with --azure a table.")],
    slo_ttft_ms: Annotated[float, typer.Option(help="Time to first token that a request has to keep; 0: none.")],
    slo_tpot_ms: Annotated[float, typer.Option(help="Mean time between its tokens, likewise; 0: none.")],
    attainment: Annotated[float, typer.Option(help="Share of all requests that has to keep both.")] = 0.9,
    cost_model: Annotated[str, typer.Option(help="A name of cluster_sim/cost_models, or a JSON file.")] = (
        "h100-llama-3.1-8b"
    ),
    most_gpus: Annotated[int, typer.Option(help="More are not looked at.")] = 64,
    speed: Annotated[float, typer.Option(help="How many times faster than recorded the trace is played.")] = 1.0,
    requests: Annotated[int, typer.Option(help="The first so many; 0: all.")] = 0,
    most_runs: Annotated[int, typer.Option(help="Simulations at most.")] = 60,
    azure: Annotated[bool, typer.Option("--azure", help="The trace is a table of arrivals and lengths.")] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals within a tick, and of ties.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """The smallest pools that keep the objectives on a trace, and what one worker less would cost; by simulation."""
    from command_line.plan import Options, plan_command

    given = Options(
        trace, slo_ttft_ms, slo_tpot_ms, attainment, cost_model, most_gpus, speed, requests, most_runs, azure, seed
    )
    plan_command(given, as_json_text=as_json)


@cluster_app.command("check")
def cluster_check(
    file: Annotated[Path, typer.Argument(help="For `ray up`, such as cluster_configs/ray/aws.yaml.")],
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Check a file for `ray up`, and with --profile or --config the service on it; say what each node would do."""
    from command_line.cluster import check

    service = profile or config or assignments or model or options.names_service(os.environ)
    loaded = options.load_config(profile, config, assignments, model) if service else None
    if not check(file, loaded.config if loaded else None, as_json=as_json):
        raise typer.Exit(USAGE_EXIT_CODE)


@index_app.command("top")
def index_top(
    number: Annotated[int, typer.Option("-n", min=1, max=1000, help="So many prefixes.")] = 20,
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """The prefixes that requests share most, and who holds them."""
    from command_line.index import top

    asyncio.run(top(_running_address(address), number, as_json=as_json))


@index_app.command("lookup")
def index_lookup(
    prompt: options.Prompt = None,
    chat: options.Chat = False,
    tokens: options.Tokens = None,
    cache_salt: options.CacheSalt = "",
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """What of a prompt lies where, how hot it is, and who would get it now."""
    from command_line.index import lookup

    given = _prompt(prompt, chat, tokens)
    asyncio.run(lookup(_running_address(address), given, cache_salt, as_json=as_json))


@index_app.command("check")
def index_check(address: options.Address = None, as_json: options.AsJson = False) -> None:
    """Compare the index with the workers' own block pools; exit code 1 when it claims what is not there."""
    from command_line.index import check

    raise typer.Exit(asyncio.run(check(_running_address(address), as_json=as_json)))


@index_app.command("status")
def index_status(address: options.Address = None, as_json: options.AsJson = False) -> None:
    """How large the index is, and how far it follows each worker."""
    from command_line.index import index_status as status_now

    asyncio.run(status_now(_running_address(address), as_json=as_json))


@placement_app.command("explain")
def placement_explain(
    request_id: Annotated[str | None, typer.Argument(help="Of a request of late; see `rachis generate`.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Instead: a prompt that is not sent; - reads it.")] = None,
    chat: options.Chat = False,
    tokens: options.Tokens = None,
    max_tokens: Annotated[int, typer.Option(help="Of the completion that is not asked for.")] = DEFAULT_MAX_TOKENS,
    cache_salt: options.CacheSalt = "",
    address: options.Address = None,
    as_json: options.AsJson = False,
) -> None:
    """Why a request went where it went: every candidate, every term. Or where one would go now."""
    from command_line.placement import explain, supposed

    is_supposed = prompt is not None or tokens is not None
    if (request_id is not None) == is_supposed:
        raise ConfigError("give either the id of a request, or --prompt or --tokens", field="REQUEST_ID")
    if request_id is not None:
        asked = admin.ExplainPlacementRequest(request_id=request_id)
    else:
        asked = supposed(_prompt(prompt, chat, tokens), cache_salt, _whole(max_tokens, "--max-tokens"))
    asyncio.run(explain(_running_address(address), asked, as_json=as_json))


@config_app.command("show")
def config_show(
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the configuration in force, and where each value comes from."""
    loaded = options.load_config(profile, config, assignments, model)
    if as_json:
        print_json(
            {entry.key: {"value": loading.masked(entry.value), "source": entry.source} for entry in loaded.entries}
        )
        return
    rows = [(entry.key, json.dumps(loading.masked(entry.value)), entry.source) for entry in loaded.entries]
    print_table("", ("key", "value", "from"), rows)


@config_app.command("profiles")
def config_profiles(as_json: options.AsJson = False) -> None:
    """List the profiles."""
    names = loading.profile_names()
    if as_json:
        print_json({"profiles": names})
    else:
        out.print("\n".join(names))


@bench_app.command("overhead")
def bench_overhead(
    requests: Annotated[int, typer.Option(min=20, help="Requests of each kind at each concurrency.")] = 200,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Latency and CPU that router and hand-off add over the same engines called directly."""
    from command_line.bench import bench_overhead as bench_now

    loaded = options.load_config(profile, config, assignments, model, options.BOTH_POOLS)
    asyncio.run(bench_now(loaded, options.state_file(), requests, as_json=as_json))


@bench_app.command("simulator")
def bench_simulator(
    rounds: Annotated[int, typer.Option(min=1, max=20, help="Of each workload; the median counts.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and arrivals.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """What the simulator predicts of a real cluster on this machine, beside what that does. Wants a quiet machine."""
    from command_line.bench_simulator import bench_simulator as bench_now

    loaded = options.load_config(profile, config, assignments, model, options.BOTH_POOLS)
    asyncio.run(bench_now(loaded, options.state_file(), rounds, seed, as_json=as_json))


@bench_app.command("ordering")
def bench_ordering(as_json: options.AsJson = False) -> None:
    """Time that each policy takes to order 10, 50 and 500 sessions."""
    from command_line.bench import bench_ordering as bench_now

    bench_now(as_json=as_json)


@bench_app.command("streaming")
def bench_streaming(
    mode: Annotated[SessionMode, typer.Option(help="Context that grows, or is replaced as well.")] = SessionMode.APPEND,
    policy: Annotated[
        list[str] | None, typer.Option(help="Policies beside the baselines, with commas or several times; default all.")
    ] = None,
    preemption: Annotated[str | None, typer.Option(help="recompute, swap or cost.")] = None,
    sessions: Annotated[int, typer.Option(min=1, max=100_000)] = 60,
    rate: Annotated[float, typer.Option(min=0.001, max=10_000, help="Sessions that arrive in a second.")] = 2.0,
    token_scale: Annotated[float, typer.Option(min=0.0001, max=100, help="On the published context lengths.")] = 0.25,
    time_scale: Annotated[float, typer.Option(min=0.0, max=100, help="On the published delays of retrieval.")] = 0.25,
    kv_blocks: Annotated[int | None, typer.Option(min=8, help="Blocks of the engine; few make memory scarce.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives another trace.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """TTFT of streamed prompts by policy, against waiting for the whole context."""
    from command_line.bench import bench_streaming as bench_now

    flags = {"streaming.preemption": preemption, "engine.kv_blocks": kv_blocks}
    given = {key: value for key, value in flags.items() if value is not None}
    loaded = options.load_config(profile, config, assignments, model, given)
    workload = {
        "mode": mode.value,
        "sessions": sessions,
        "rate_per_s": rate,
        "token_scale": token_scale,
        "time_scale": time_scale,
        "seed": seed,
    }
    asyncio.run(bench_now(loaded, workload, _policies(policy), as_json=as_json))


@bench_app.command("prefix-cache")
def bench_prefix_cache(
    trace: Annotated[
        Path | None, typer.Option(help="File in Mooncake's or the session format; see docs/tiers.md.")
    ] = None,
    generated: Annotated[str | None, typer.Option(help="Instead of a file: mmlu, hellaswag, bbh or ceval.")] = None,
    noise_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of the generated requests, have a prompt that nobody else has.")
    ] = 0.0,
    requests: Annotated[int | None, typer.Option(min=1, help="The first so many only.")] = None,
    device_tokens: Annotated[
        str, typer.Option(help="Room of the first tier, such as 500000, 512k or 2M (powers of ten).")
    ] = "2M",
    host_tokens: Annotated[str, typer.Option(help="Room of the second tier; 0: there is none.")] = "0",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="lru, lfu, fifo, 2q, E, A+P, hotprefix (= E+A+P), rachis, belady; with commas or several "
            "times; default all. lru always runs, to compare with."
        ),
    ] = None,
    capacities: Annotated[str | None, typer.Option(help="Device tokens of a curve too, such as 1M,2M,4M.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF of the curve.")] = None,
    full_blocks_only: Annotated[
        bool, typer.Option("--full-blocks-only", help="No policy caches the partial block at the end of a prompt.")
    ] = False,
    kv_bytes_per_token: Annotated[
        int, typer.Option(min=1, max=2**30, help="For the bytes copied; default is that of Llama-3.1-8B in bf16.")
    ] = 131_072,
    seed: Annotated[int, typer.Option(min=0, help="Of what is generated, and of when sessions start.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Hit ratio and bytes copied by policy of the prefix cache, over a trace.

    Replays it through the classes that run in a worker, once for each policy and capacity. That takes minutes for ten
    thousand requests, and hours for the session trace with its 61 million block references: see --requests. Files are
    read as they are replayed; only belady holds all of it in memory, 8 bytes for each block reference.
    """
    from command_line.bench_prefix_cache import Options
    from command_line.bench_prefix_cache import bench_prefix_cache as bench_now

    given = Options(
        trace, generated, noise_share, requests, device_tokens, host_tokens, capacities, policy or [],
        full_blocks_only, kv_bytes_per_token, plot, seed,
    )  # fmt: skip
    bench_now(given, as_json=as_json)


@bench_app.command("feather")
def bench_feather(
    groups: Annotated[int, typer.Option(min=0, max=1000, help="Prefixes; 0: nobody shares anything.")] = 5,
    shared_tokens: Annotated[int, typer.Option(min=1, max=131_072, help="Of each prefix.")] = 3500,
    levels: Annotated[int, typer.Option(min=1, max=3, help="Of the tree of prefixes.")] = 1,
    suffix_tokens: Annotated[int, typer.Option(min=1, max=8192, help="Of each prompt alone.")] = 24,
    decode_tokens: Annotated[int, typer.Option(min=2, max=8192, help="Generated for each request.")] = 64,
    rate: Annotated[float, typer.Option(min=0.01, max=10_000, help="Arrivals a second, Poisson.")] = 40.0,
    seconds: Annotated[float, typer.Option(min=0.5, max=3600, help="Of each run.")] = 10.0,
    places: Annotated[int, typer.Option(min=1, max=1024, help="Requests that run at once at most.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Of all policies, in turns; figures are medians.")] = 3,
    policy: Annotated[
        list[str] | None, typer.Option(help="greedy, heuristic, bandit or q_learning; several may be given.")
    ] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(help="groups, shared, decode, rate or levels besides; several may be given.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF of batch size and throughput over time.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts and arrivals.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Throughput, time between tokens and waits with each policy of the decode scheduler, against order of arrival."""
    from benchmarks.feather_workload import FeatherWorkload
    from command_line.bench_feather import POLICIES, Options
    from command_line.bench_feather import bench_feather as bench_now

    loaded = options.load_config(profile, config, assignments, model)
    workload = FeatherWorkload(groups, shared_tokens, levels, suffix_tokens, decode_tokens, rate, seconds, seed)
    given = Options(workload, places, rounds, policy or POLICIES, sweep or (), plot)
    asyncio.run(bench_now(loaded, given, as_json=as_json))


@bench_app.command("tiers")
def bench_tiers(
    shape: Annotated[str, typer.Option(help="Prompts like those of mmlu, hellaswag, bbh or ceval.")] = "mmlu",
    requests: Annotated[int, typer.Option(min=2, max=10_000, help="Of each variant, in each round.")] = 400,
    noise_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Of the requests, have a prompt that nobody else has.")
    ] = 0.2,
    concurrency: Annotated[int, typer.Option(min=1, max=64, help="Requests in the engine at any time.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Of all variants, in turns; times are medians.")] = 3,
    device_blocks: Annotated[
        int | None, typer.Option(min=8, max=16_384, help="Default is 1/2.5 of the blocks that prompts share.")
    ] = None,
    host_ratio: Annotated[
        float, typer.Option(min=0.0, max=64.0, help="Host memory as a multiple of the device's blocks.")
    ] = 1.0,
    host_gib: Annotated[float | None, typer.Option(min=0.0, max=64.0, help="Instead of the multiple.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF of the share of requests over TTFT.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """TTFT and tokens computed with tiers of cached prefixes, against plain vLLM and against copying every block."""
    from command_line.bench_tiers import Options
    from command_line.bench_tiers import bench_tiers as bench_now

    host = {"tiers.host_ratio": host_ratio if host_gib is None else None}
    if host_gib is not None:
        host["tiers.host_gib"] = host_gib
    loaded = options.load_config(profile, config, assignments, model, host)
    given = Options(shape, requests, noise_share, concurrency, rounds, device_blocks, plot, seed)
    asyncio.run(bench_now(loaded, given, as_json=as_json))


@bench_app.command("cht")
def bench_cht(
    requests: Annotated[int, typer.Option(min=1, max=1_000_000, help="Each inserted, found, added, finished.")] = 5000,
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Of each prompt.")] = 5000,
    groups: Annotated[int, typer.Option(min=1, max=1_000_000, help="Of requests that share a prefix.")] = 5,
    chunk_tokens: Annotated[int, typer.Option(min=1, max=65_536, help="The step in which prefixes are compared.")] = 64,
    finds: Annotated[float, typer.Option(min=1, max=100, help="How often each request is looked for.")] = 5.3,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF of the costs over waiting requests.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Time of each operation of the chunked hash tree, which finds the waiting request that fits the batch best."""
    from benchmarks.cht_workload import ChtWorkload
    from command_line.bench_cht import bench_cht as bench_now

    bench_now(ChtWorkload(requests, tokens, groups, chunk_tokens, finds, seed), plot, as_json=as_json)


@bench_app.command("index")
def bench_index(
    blocks: Annotated[int, typer.Option(min=200_000, max=100_000_000, help="Entries of the index.")] = 1_000_000,
    workers: Annotated[int, typer.Option(min=1, max=10_000, help="That hold them.")] = 64,
    sweep: Annotated[bool, typer.Option("--sweep", help="Also with fewer entries and with more workers.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Time of a placement decision for 32k tokens, block events a second, and memory, of a router with a full index."""
    from command_line.bench_index import bench_index as bench_now

    bench_now(blocks, workers, seed, sweep=sweep, as_json=as_json)


@bench_app.command("placement")
def bench_placement(
    trace: Annotated[Path, typer.Option(help="A file of requests: Mooncake's, or sessions; see docs/placement.md.")],
    workers: Annotated[int, typer.Option(min=1, max=1024, help="Simulated prefill workers.")] = 16,
    load: Annotated[
        float, typer.Option(min=0.01, max=1.5, help="Share of the workers' time that `cost_formula` needs.")
    ] = 0.95,
    speed: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="So many times the trace's own, instead of a load.")
    ] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Only these; may be given more than once.")] = None,
    device_tokens: Annotated[str, typer.Option(help="What fits one worker's device, such as 400k.")] = "400k",
    host_tokens: Annotated[str, typer.Option(help="And its host memory, such as 1M; 0: none.")] = "1M",
    costs: Annotated[Path | None, typer.Option(help="Of prefill: a file by `rachis profile`, or JSON.")] = None,
    event_delay_ms: Annotated[float, typer.Option(min=0, max=1e6, help="Until the index hears of blocks.")] = 100,
    prediction_s: Annotated[
        float, typer.Option(min=0, max=1e6, help="How long placements are predictions, of every policy; 0: never.")
    ] = 5,
    requests: Annotated[int | None, typer.Option(min=1, help="The first so many of the trace.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF of the share of requests over TTFT.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals within a tick, and of ties.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """TTFT, hit ratio and balance of every placement policy on a trace, over simulated prefill workers."""
    from command_line.bench_placement import Options
    from command_line.bench_placement import bench_placement as bench_now

    given = Options(
        trace, workers, load, speed, policy or (), device_tokens, host_tokens, costs, event_delay_ms, prediction_s,
        requests, plot, seed,
    )  # fmt: skip
    bench_now(given, as_json=as_json)


@bench_app.command("system")
def bench_system(
    trace: Annotated[Path | None, typer.Option(help="A file of requests: Mooncake's, or sessions.")] = None,
    kind: Annotated[str, typer.Option(help="Without a trace: a kind that is drawn; see docs/simulator.md.")] = (
        "conversation"
    ),
    cost_model: Annotated[str, typer.Option(help="A name of cluster_sim/cost_models, or a JSON file.")] = (
        "h100-llama-3.1-8b"
    ),
    sizes: Annotated[str, typer.Option(help="Workers in all, with commas.")] = "4,16,64",
    rates: Annotated[str, typer.Option(help="Requests a second for each worker, with commas.")] = "0.75,1,1.25",
    slo_ttft_ms: Annotated[float, typer.Option(min=0, help="0: no objective.")] = 5000,
    slo_tpot_ms: Annotated[float, typer.Option(min=0, help="Mean time between tokens; 0: no objective.")] = 50,
    seconds: Annotated[float, typer.Option(min=10, max=1e6, help="Of arrivals; a quarter of them warms up.")] = 240,
    system: Annotated[list[str] | None, typer.Option(help="Only these; may be given more than once.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals, and of ties.")] = 0,
    as_json: options.AsJson = False,
) -> None:
    """Goodput, cost and router cores of the whole system and of what one would run without it, simulated."""
    from command_line.bench_system import Options
    from command_line.bench_system import bench_system as bench_now

    given = Options(trace, kind, cost_model, sizes, rates, slo_ttft_ms, slo_tpot_ms, seconds, system or (), seed)
    bench_now(given, as_json=as_json)


@bench_app.command("decode-locality")
def bench_decode_locality(
    output: Annotated[Path, typer.Option(help="Where the figures go.")] = Path("rachis-decode-locality.json"),
    plot: Annotated[Path | None, typer.Option(help="PNG, SVG or PDF; default is beside the figures.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small grid, in less than a minute.")] = False,
    batches: Annotated[str | None, typer.Option(help="Requests of a batch, such as 1,4,16.")] = None,
    groups: Annotated[
        str | None, typer.Option(help="Groups that share a prefix; as many as requests are always measured.")
    ] = None,
    shared: Annotated[str | None, typer.Option(help="Tokens that a group shares, such as 512,3500.")] = None,
    suffix: Annotated[str | None, typer.Option(help="Tokens of a request's own, 16 at least.")] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Visits of each batch at most.")] = 5,
    limit_s: Annotated[
        float, typer.Option(min=1, max=86_400, help="No other round begins that would end later.")
    ] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Another seed gives other prompts.")] = 0,
    profile: options.Profile = None,
    config: options.ConfigFile = None,
    assignments: options.Assignments = None,
    model: options.Model = None,
    as_json: options.AsJson = False,
) -> None:
    """Decode step time by what a batch shares, for the simulator: grid, series and fitted models in a JSON file."""
    from command_line.bench_decode_locality import Options
    from command_line.bench_decode_locality import bench_decode_locality as bench_now

    loaded = options.load_config(profile, config, assignments, model)
    given = Options(output, plot, quick, batches, groups, shared, suffix, rounds, limit_s, seed)
    asyncio.run(bench_now(loaded, given, as_json=as_json))


def _policies(given: list[str] | None) -> list[str]:
    names = [name.strip() for each in given or POLICIES for name in each.split(",") if name.strip()]
    unknown = next((name for name in names if name not in POLICIES), None)
    if unknown is not None:
        raise ConfigError(f"must be of {', '.join(POLICIES)}, got {unknown}", field="--policy")
    return names


def _prompt(prompt: str | None, chat: bool, tokens: str | None) -> Any:
    if tokens is not None:
        try:
            return token_prompt([int(part) for part in tokens.split(",") if part.strip()])
        except ValueError:
            raise ConfigError(f"must be whole numbers from 0 to {UINT32}, with commas", field="--tokens") from None
    if prompt is None:
        raise ConfigError("give a prompt, - for standard input, or --tokens", field="prompt")
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()
    except UnicodeError:
        raise ConfigError("is not valid UTF-8", field="prompt") from None
    return chat_prompt([{"role": "user", "content": text}]) if chat else text_prompt(text)


def _whole(value: int, option: str, highest: int = UINT32) -> int:
    if not 0 <= value <= highest:
        raise ConfigError(f"must be from 0 to {highest}, got {value}", field=option)
    return value


def _running_address(address: str | None) -> str:
    if address is not None:
        return address
    running = options.state_file().read()
    if running is None or not running.address:
        raise ConfigError("no service runs here; start one with `rachis serve`, or give --address", field="--address")
    return running.address


if __name__ == "__main__":
    run()
