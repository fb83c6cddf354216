"""The digest of an adapter is that of its files, whatever their folder is called."""

from pathlib import Path

import pytest

from cluster_core.errors import AdapterNotLoadedError
from worker_runtime.adapter_files import digest_apart


def folder(
    place: Path, config: str = "{}", weights: bytes = b"weights", name: str = "adapter_model.safetensors"
) -> str:
    place.mkdir()
    (place / "adapter_config.json").write_text(config)
    (place / name).write_bytes(weights)
    return str(place)


async def test_equal_files_have_one_digest_and_any_other_byte_another(tmp_path: Path) -> None:
    first = await digest_apart(folder(tmp_path / "a"))
    assert await digest_apart(folder(tmp_path / "b")) == first
    others = [
        folder(tmp_path / "c", config='{"r": 1}'),
        folder(tmp_path / "d", weights=b"weightS"),
        folder(tmp_path / "e", name="adapter_model.bin"),
        folder(tmp_path / "f", config="{}weights", weights=b""),
    ]
    digests = {await digest_apart(path) for path in others}
    assert len(digests) == 4
    assert first not in digests
    assert len(first) == 64


async def test_a_folder_without_configuration_or_weights_has_no_adapter(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    for path in (str(tmp_path), str(tmp_path / "none"), "\0", f"/{'x' * 300}/a", "~nobodythere/a"):
        with pytest.raises(AdapterNotLoadedError):
            await digest_apart(path)
