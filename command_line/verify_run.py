"""`rachis verify`: is the cluster's output that of one plain vLLM?"""

from dataclasses import asdict
from typing import Any

from rachis import AsyncClient
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import identity
from benchmarks.direct_call import DirectWorker
from benchmarks.plain_engine import GENERATION, plain_engine
from cluster_configs.loading import LoadedConfig
from cluster_configs.schema import BUILTIN_MODEL
from command_line.output import err, out, print_json
from command_line.own_service import target_service
from control_plane.intake.tokenization import Tokenizer
from control_plane.service.state import StateFile

_SHOWN_DIVERGENCES = 10


async def verify(
    loaded: LoadedConfig,
    state_file: StateFile,
    address: str | None,
    prompts: int,
    *,
    seed: int,
    concurrency: int,
    as_json: bool,
) -> int:
    """Returns 0 when every prompt agrees, or when the precision is lower than fp32 and differences are reported."""
    config = loaded.config
    async with target_service(address, state_file, loaded) as target:
        err.print("starting one plain vLLM to compare with")
        async with plain_engine(config) as (plain_address, model), AsyncClient(target.address) as cluster:
            exact = model.dtype == "float32"
            encode = await _recall_encoder(loaded)
            cases = identity.make_cases(prompts, seed, model.vocabulary_size, model.max_model_len, encode)
            plain = DirectWorker(plain_address, GENERATION)
            with _progress() as progress:
                task = progress.add_task("prompts", total=len(cases))
                report = await identity.compare(
                    cases, cluster, plain, concurrency, lambda: progress.advance(task), exact=exact
                )
            await plain.close()
    result = {
        "identical": report.identical,
        "total": report.total,
        "share": report.identical / report.total,
        "dtype": model.dtype,
        "exact_expected": exact,
        "handed_off": report.pulled,
        "kv_bytes": report.kv_bytes,
        "divergences": [asdict(divergence) for divergence in report.divergences],
    }
    if as_json:
        print_json(result)
    else:
        _print(report, result)
    return 0 if report.identical == report.total or not exact else 1


async def _recall_encoder(loaded: LoadedConfig) -> Any:
    """The tokenizer's encoder for the built-in model's own questions; other models get other prompts."""
    if loaded.config.model.path != BUILTIN_MODEL:
        return None
    tokenizer = Tokenizer(loaded.config.model.resolved_path)
    await tokenizer.load()
    return tokenizer.encode


def _print(report: identity.Report, result: dict[str, Any]) -> None:
    out.print(f"identical: {report.identical}/{report.total}")
    out.print(f"{report.pulled} prompts were handed off, {report.kv_bytes:,} KV bytes crossed NIXL, {result['dtype']}")
    for divergence in report.divergences[:_SHOWN_DIVERGENCES]:
        gap = "unknown" if divergence.gap is None else f"{divergence.gap:.4f}"
        out.print(
            f"  prompt {divergence.index} ({divergence.prompt_tokens} tokens): {divergence.what} differ at "
            f"{divergence.position}, {divergence.cluster_token} for {divergence.plain_token}, log-probability gap {gap}"
        )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=err
    )
