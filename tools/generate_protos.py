"""Generates the Python stubs beside the .proto files, or checks that they are fresh.

`python tools/generate_protos.py` writes them, `--check` compares without writing and exits 1 on a difference.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
# Whoever installs the client from `protos` leaves copies in `build` beside it.
PACKAGE = "rachis"


def generate(output: Path) -> list[Path]:
    """Writes the stubs of every .proto under `output`; returns their paths relative to it."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / PACKAGE).rglob("*.proto"))
    # protoc looks for its plug-ins on the path; they are installed beside this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    arguments = ["protoc", f"-I{PROTOS}", f"-I{well_known}"]
    arguments += [f"--{kind}_out={output}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    if protoc.main([*arguments, *sources]) != 0:
        raise SystemExit("protoc failed")
    return sorted(_stubs(output))


def stale(fresh: Path, names: list[Path]) -> list[str]:
    """Names of committed stubs that differ from the fresh ones, are missing, or have no source any more."""
    committed = set(_stubs(PROTOS))
    different = [
        name for name in names if name in committed and (fresh / name).read_text() != (PROTOS / name).read_text()
    ]
    return sorted(str(name) for name in {*different, *(committed ^ set(names))})


def _stubs(folder: Path) -> Iterator[Path]:
    for path in (folder / PACKAGE).rglob("*_pb2*.py*"):
        if path.suffix in {".py", ".pyi"}:
            yield path.relative_to(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        print(f"wrote {len(generate(PROTOS))} files")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        different = stale(Path(folder), generate(Path(folder)))
    for name in different:
        print(f"protos/{name} is not what its .proto generates: run `make protos`")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
