"""Pictures that the benchmarks draw. They take a plotting library, and seconds."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ttft_plot
from benchmarks.cht.speed import Sizes
from benchmarks.cht.workload import ChtWorkload
from benchmarks.decode_locality import plot as decode_locality_plot
from benchmarks.decode_locality.batches import Grid
from benchmarks.decode_locality.fit import Measured
from benchmarks.decode_locality.measure import result
from benchmarks.feather import measure as feather
from benchmarks.feather import plot as feather_plot
from benchmarks.feather.measure import binned
from benchmarks.tiers import COPY_EVERYTHING, RACHIS, STOCK
from command_line.bench.cht_run import bench_cht
from tests.command import rachis
from tests.pure.benchmarks.test_decode_locality import BLOCK_TOKENS, GRID, by_locality


def drawn_by(command: str, *arguments: object) -> dict[str, Any]:
    """What `rachis bench ... --json` tells."""
    done = rachis("bench", command, *arguments, "--json")
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def trace(folder: Path, prompts: Iterable[list[int]]) -> Path:
    """A prompt each tenth of a second, of whole blocks."""
    file = folder / "trace.jsonl"
    rows = [
        {"timestamp": number * 100, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids}
        for number, ids in enumerate(prompts)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def is_png(file: Path) -> bool:
    return file.read_bytes().startswith(b"\x89PNG")


def test_batches_over_time_of_every_policy(tmp_path: Path) -> None:
    runs = {name: binned([(0.1, 4)], 1.0) for name in feather.VARIANTS}
    feather_plot.save_plot(runs, 100.0, "title", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize("grid", [GRID, Grid((1,), (1,), (64,), (32,))])
def test_decode_steps_by_what_their_batch_shares(grid: Grid, tmp_path: Path) -> None:
    measured = {shape: Measured(by_locality(shape), 16, 0.0) for shape in grid.shapes()}
    about = {"model": "m", "dtype": "float32", "engine": "vllm", "device": "d"}
    decode_locality_plot.save_plot(about | result(grid, measured, BLOCK_TOKENS), tmp_path / "plot.png")
    assert is_png(tmp_path / "plot.png")


def test_ttft_of_each_way_of_tiers(tmp_path: Path) -> None:
    waits = {STOCK: [1.0, 2.0], COPY_EVERYTHING: [2.0], RACHIS: [0.5, 3.0]}
    ttft_plot.save_plot(waits, "small", tmp_path / "ttft.png")
    assert (tmp_path / "ttft.png").stat().st_size > 1000


def test_costs_of_the_hash_tree(tmp_path: Path) -> None:
    sizes = Sizes(waiting=(20, 40), repeats=1, waiting_repeats=1, least_turns=1)
    bench_cht(ChtWorkload(requests=40, tokens=640, groups=4), tmp_path / "costs.png", as_json=True, sizes=sizes)
    assert is_png(tmp_path / "costs.png")


def test_ttft_of_each_placement(tmp_path: Path) -> None:
    file = trace(tmp_path, ([number % 3 * 2, number % 3 * 2 + 1] for number in range(20)))
    picture = tmp_path / "ttft.svg"
    drawn_by("placement", "--trace", file, "--speed", 3, "--policy", "random,hotness", "--plot", picture)
    assert picture.stat().st_size


def test_hits_by_the_size_of_the_cache(tmp_path: Path) -> None:
    file = trace(tmp_path, [[1, 2], [3], [1, 2], [4], [1, 2]])
    picture = tmp_path / "curve.png"
    told = drawn_by(
        "prefix-cache", "--trace", file, "--capacities", "2048,512", "--policy", "rachis,belady", "--plot", picture
    )
    assert is_png(picture)
    assert told["plot"] == str(picture)
