"""How much memory a worker takes with its processes, and how much its node has, in a container or not."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from worker_runtime.memory_use import ResidentMemory, node_memory


def process(resident_bytes: int) -> Any:
    return SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=resident_bytes))


def ended() -> Any:
    def gone() -> None:
        raise psutil.NoSuchProcess(7)

    return SimpleNamespace(memory_info=gone)


def test_all_processes_count_but_those_that_have_ended_and_are_looked_at_again_later() -> None:
    now_s, looks, alive = [100.0], [], [process(3), process(40), ended()]

    def processes() -> list[Any]:
        looks.append(now_s[0])
        return alive

    memory = ResidentMemory(processes, lambda: now_s[0])
    assert (memory.bytes(), memory.bytes(), len(looks)) == (43, 43, 1)
    alive.append(process(500))
    now_s[0] += 5.0
    assert (memory.bytes(), len(looks)) == (43, 1)
    now_s[0] += 0.1
    assert (memory.bytes(), len(looks)) == (543, 2)


def limited(folder: Path, most: str, used: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    # Weights that a worker before it has read are files in use.
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive // 2}\nactive_file {inactive // 2}\n")


def test_a_node_has_what_its_tightest_cgroup_leaves(tmp_path: Path) -> None:
    own, cgroups = tmp_path / "own", tmp_path / "cgroup"
    own.write_text("4:memory:/other\n0::/pod/worker\n")
    limited(cgroups / "pod", "2000000", 1_950_000, 10_000)
    limited(cgroups / "pod" / "worker", "max", 5, 0)
    assert node_memory(cgroups, own) == (2_000_000, 60_000)
    limited(cgroups / "pod" / "worker", "1000000", 1_000_500, 0)
    assert node_memory(cgroups, own) == (1_000_000, 0)


def test_a_container_sees_its_own_limit_at_the_root(tmp_path: Path) -> None:
    own, cgroups = tmp_path / "own", tmp_path / "cgroup"
    limited(cgroups, "1000000", 400_000, 0)
    for path in ("/", "/../elsewhere", "/docker/1234"):
        own.write_text(f"0::{path}\n")
        assert node_memory(cgroups, own) == (1_000_000, 600_000)


def test_without_a_limit_a_node_has_what_its_host_has(tmp_path: Path) -> None:
    total, available = node_memory(tmp_path / "none", tmp_path / "neither")
    assert total == psutil.virtual_memory().total > available > 0
