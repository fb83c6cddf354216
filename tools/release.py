"""Makes a release of what is committed: `make release`, into `dist/`.

    rachis-V-py3-none-any.whl          the service; its dependencies are the lock files beside it
    rachis_client-V-py3-none-any.whl   the client alone
    cpu.lock, gpu.lock, torch-cpu.lock what the service runs with, with hashes
    rachis-V-PROFILE.cdx.json          the bill of materials of a lock file, in CycloneDX
    CHANGES.md                         of this version
    SHA256SUMS                         of all of them; `sha256sum --check` reads it

The same commit gives the same bytes: wheels are built from an export of the commit, dated as it is, by what
requirements/release.lock pins. Needs its environment, and git.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ("cpu", "gpu")
_LOCKS = ("cpu.lock", "gpu.lock", "torch-cpu.lock")
_CONTAINER_FILE = Path("cluster_configs/containers/Dockerfile")
# Whoever updates reads first what that asks of them.
_ASKED = "### What you have to do"
_LAYERS = ("RUN ", "COPY ", "ADD ")

# Of the files that are not committed.
_MOST_NAMED = 5


class ReleaseError(Exception):
    """What keeps the release from being made, in a sentence."""


def main() -> int:
    folder = ROOT / "dist"
    try:
        check_committed(_git("status", "--porcelain"))
        with tempfile.TemporaryDirectory(prefix="rachis-release-") as name:
            source = Path(name)
            with tarfile.open(fileobj=BytesIO(_git_bytes("archive", "HEAD"))) as archive:
                archive.extractall(source, filter="data")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            version = make(source, folder, int(_git("log", "-1", "--format=%ct")))
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"no release: {error}", file=sys.stderr)
        return 1
    print(f"Rachis {version}, of commit {_git('rev-parse', '--short', 'HEAD')}:")
    print((folder / "SHA256SUMS").read_text(), end="")
    for profile in PROFILES:
        print(f"layers of the image `{profile}`, over python:3.11-slim-bookworm:")
        for layer in layers((ROOT / _CONTAINER_FILE).read_text(), profile):
            print(f"  {layer}")
    return 0


def check_committed(status: str) -> None:
    """status: as `git status --porcelain` says it. Raises ReleaseError naming what is not in the commit."""
    if changed := status.splitlines():
        named = ", ".join(line.split(maxsplit=1)[-1] for line in changed[:_MOST_NAMED])
        more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
        raise ReleaseError(f"a release is made of a commit, and these are not in it: {named}{more}")


def make(source: Path, folder: Path, committed_unix_s: int) -> str:
    """The version. source: a tree as it was committed. Raises ReleaseError."""
    version = version_of((source / "protos/rachis/__init__.py").read_text())
    changes = changes_of((source / "CHANGELOG.md").read_text(), version)
    _run("hadolint", str(source / _CONTAINER_FILE))
    for project in (source / "protos", source):
        build_wheel(project, folder, committed_unix_s)
    for lock in _LOCKS:
        shutil.copy(source / "requirements" / lock, folder / lock)
    for profile in PROFILES:
        bill = folder / f"rachis-{version}-{profile}.cdx.json"
        _run("cyclonedx-py", "requirements", "--output-reproducible", "--pyproject", str(_named(source, version)),
             "-o", str(bill), str(folder / f"{profile}.lock"))  # fmt: skip
    (folder / "CHANGES.md").write_text(changes)
    (folder / "SHA256SUMS").write_text("".join(f"{line}\n" for line in sums(folder)))
    return version


def version_of(module: str) -> str:
    """What `rachis.__version__` is, which both wheels have. Raises ReleaseError."""
    found = re.search(r'^__version__ = "(\d+\.\d+\.\d+(?:rc\d+)?)"$', module, re.MULTILINE)
    if found is None:
        raise ReleaseError("protos/rachis/__init__.py has no __version__ such as 1.2.3")
    return found[1]


def changes_of(changelog: str, version: str) -> str:
    """The changelog's section of the version. Raises ReleaseError where there is none, or it does not say what it asks
    of those who update."""
    sections = re.split(r"^(?=## \[)", changelog, flags=re.MULTILINE)
    section = next((each for each in sections if each.startswith(f"## [{version}]")), None)
    if section is None:
        raise ReleaseError(f"CHANGELOG.md has no section `## [{version}]`")
    if _ASKED not in section:
        raise ReleaseError(f"CHANGELOG.md: [{version}] has no `{_ASKED}`; where it is nothing, let it say so")
    return section.rstrip() + "\n"


def build_wheel(project: Path, folder: Path, committed_unix_s: int) -> None:
    """By this interpreter's setuptools. Files in the wheel are dated as the commit."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(committed_unix_s)}
    subprocess.run([*command, "-w", str(folder), str(project)], check=True, env=environment)


def layers(container_file: str, target: str) -> list[str]:
    """What makes a layer of its own in the image of that target, in order, a line each. Raises ReleaseError."""
    joined = re.sub(r"\\\n\s*", "", container_file)
    stages = re.split(r"^FROM ", joined, flags=re.MULTILINE)[1:]
    by_name = {re.split(r"\s+", stage)[2]: stage for stage in stages}
    if target not in by_name:
        raise ReleaseError(f"the container file has no target `{target}`")
    base = re.split(r"\s+", by_name[target])[0]
    own = [line for line in by_name[target].splitlines() if line.startswith(_LAYERS)]
    return [*(layers(container_file, base) if base in by_name else ()), *own]


def sums(folder: Path) -> Iterator[str]:
    """As `sha256sum` writes them, by name."""
    for file in sorted(folder.iterdir()):
        yield f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}"


def _named(source: Path, version: str) -> Path:
    """The project's own file, with the version in it: the bill's maker takes no version that is read from a module."""
    project = source / "pyproject.toml"
    named = source / "named.toml"
    named.write_text(project.read_text().replace('dynamic = ["version"]', f'version = "{version}"'))
    return named


def _run(*command: str) -> None:
    tool = shutil.which(command[0], path=str(Path(sys.executable).parent))
    if tool is None:
        raise ReleaseError(f"{command[0]} is not installed; `make release` installs it")
    subprocess.run([tool, *command[1:]], check=True)


def _git(*arguments: str) -> str:
    return _git_bytes(*arguments).decode().strip()


def _git_bytes(*arguments: str) -> bytes:
    command: Sequence[str] = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(command, check=True, capture_output=True).stdout


if __name__ == "__main__":
    sys.exit(main())
