"""What the blocks of a hand-off are of, as a digest that travels with them: a pull of other tokens' KV is refused.

The prefill side stamps what its engine has computed, when the request ends there; the decode side compares what its
engine is about to compute, before it pulls. Between the two lie the router's bookkeeping, retries, sessions whose
prompts change, and answers that go on elsewhere; a mistake in any of them would give wrong tokens in silence.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

# Key that Rachis adds to vLLM's `kv_transfer_params`, see `kv_transfer.handoff.rules`: [tokens, digest], or None once
# the decode side has compared it.
TOKENS_DIGEST_PARAM = "rachis_tokens"
_DIGEST_BYTES = 16


def tokens_digest(token_ids: Sequence[int], kv_scope: str) -> str:
    """Of the tokens whose KV it is, in order, and of what else it depends on: see `EngineJob.kv_scope`."""
    hashed = hashlib.blake2b(array("I", token_ids).tobytes(), digest_size=_DIGEST_BYTES)
    hashed.update((kv_scope).encode())
    return hashed.hexdigest()


def stamp(token_ids: Sequence[int], kv_scope: str) -> list[Any]:
    """What is sent."""
    return [len(token_ids), tokens_digest(token_ids, kv_scope)]


def is_of(stamped: Any, token_ids: Sequence[int], kv_scope: str) -> bool:
    """The blocks are of these tokens, no more and no fewer: blocks of a longer or a shorter lease would be taken for
    those of other positions. What nobody has stamped is of none."""
    match stamped:
        case [int(count), str(digest)] if 0 < count == len(token_ids):
            return tokens_digest(token_ids, kv_scope) == digest
    return False
