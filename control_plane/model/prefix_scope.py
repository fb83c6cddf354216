"""What besides its tokens the KV of a prompt depends on: prompts of two scopes have nothing in common."""

from dataclasses import dataclass

from rachis.v1 import worker_pb2 as wire


@dataclass(frozen=True, slots=True)
class PrefixScope:
    cache_salt: str = ""
    # None: the model alone.
    adapter: wire.Adapter | None = None

    @property
    def adapter_digest(self) -> str:
        return self.adapter.digest if self.adapter is not None else ""
