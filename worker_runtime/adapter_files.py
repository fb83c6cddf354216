"""What a folder with a LoRA adapter holds, as a digest: the same on every host that has the same adapter."""

import asyncio
import hashlib
import threading
from contextlib import suppress
from pathlib import Path

from cluster_core.errors import AdapterNotLoadedError

CONFIG = "adapter_config.json"
# What PEFT writes weights to.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_CHUNK_BYTES = 1 << 20


async def digest_apart(path: str) -> str:
    """`digest_of`, on a thread that nobody has to wait for: files of a host that is gone may hold it for ever."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[str] = loop.create_future()

    def settle(digest: str, error: Exception | None) -> None:
        if found.done():
            return
        if error is None:
            found.set_result(digest)
        else:
            found.set_exception(error)

    def read() -> None:
        digest, failed = "", None
        try:
            digest = digest_of(path)
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who waits has to hear of it
            failed = error
        with suppress(RuntimeError):
            # Raised where the loop has been closed meanwhile.
            loop.call_soon_threadsafe(settle, digest, failed)

    threading.Thread(target=read, name="adapter-files", daemon=True).start()
    return await found


def digest_of(path: str) -> str:
    """SHA-256 of configuration and weights, hexadecimal. Raises AdapterNotLoadedError where there is no adapter."""
    try:
        folder = Path(path).expanduser()
        found = [folder / name for name in (CONFIG, *_WEIGHTS) if (folder / name).is_file()]
        if len(found) < 2 or found[0].name != CONFIG:
            raise AdapterNotLoadedError(f"there is no adapter at {path}: it has {CONFIG} and {_WEIGHTS[0]}")
        digest = hashlib.sha256()
        for file in found:
            digest.update(f"{file.name} {file.stat().st_size}\n".encode())
            with file.open("rb") as content:
                while part := content.read(_CHUNK_BYTES):
                    digest.update(part)
    except (OSError, RuntimeError, ValueError) as error:
        # A user that is not there is a RuntimeError, a NUL in the path a ValueError.
        why = getattr(error, "strerror", None) or str(error)
        raise AdapterNotLoadedError(f"the adapter at {path} cannot be read: {why}") from None
    return digest.hexdigest()
