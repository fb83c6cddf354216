"""Every package of the tree is in the wheel."""

import tomllib

from tests import ROOT


def test_every_package_is_in_the_wheel() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    listed, folders = set(setup["packages"]), setup["package-dir"]
    found = set()
    for root in {name.partition(".")[0] for name in listed}:
        base = ROOT / folders.get(root, root)
        inner = (each.parent.relative_to(base).parts for each in base.rglob("__init__.py"))
        found |= {".".join((root, *parts)) for parts in inner}
    assert found == listed
