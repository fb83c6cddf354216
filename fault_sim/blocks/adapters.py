"""The adapters of a `BlockEngine`: it has nothing of them but their names, and keeps them as every engine does."""

from cluster_core.engine_jobs import Adapter
from cluster_core.errors import AdapterNotLoadedError
from fault_sim.blocks.fabric import Fabric
from worker_runtime.loaded_adapters import LoadedAdapters


class BlockAdapters(LoadedAdapters):
    """fabric: whose hosts have the folders."""

    def __init__(self, most: int, fabric: Fabric) -> None:
        super().__init__(most, digest_of=self._found, load=self._came, unload=self._went)
        self._fabric = fabric

    async def _found(self, path: str) -> str:
        if path not in self._fabric.adapters:
            raise AdapterNotLoadedError(f"there is no adapter at {path}")
        return self._fabric.adapters[path]

    async def _came(self, adapter: Adapter) -> None:
        """It takes no memory."""

    async def _went(self, digest: str) -> None:
        """Nor gives any back."""
