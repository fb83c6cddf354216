"""What somebody who reads a worker's snapshot and stream believes, as a plain follower of both."""

from dataclasses import dataclass
from typing import Any

from cluster_core.engine_reports import PrefixClaims
from cluster_wire import registry
from kv_transfer.claims.claims import decode_batch, decode_snapshot


@dataclass(frozen=True, slots=True)
class Read:
    """sequence: of the last batch, or of the snapshot. batches: numbers of those behind the snapshot."""

    generation: int
    sequence: int
    claims: PrefixClaims
    batches: tuple[int, ...]


async def read_claims(client: Any, service_id: str, worker_id: str) -> Read | None:
    """None: there is no snapshot. Asserts that ids and contents agree and that no number is left out."""
    stored = await client.get(registry.snapshot_key(service_id, worker_id))
    if stored is None:
        return None
    snapshot = decode_snapshot(stored)
    generation, sequence = snapshot.generation, snapshot.sequence
    device, host = set(snapshot.device.tolist()), set(snapshot.host.tolist())
    entries = await client.xrange(registry.claims_key(service_id, worker_id), min=f"({generation}-{sequence}")
    batches = []
    for identity, fields in entries:
        batch = decode_batch(fields[b"b"])
        assert identity.decode() == f"{batch.generation}-{batch.sequence}"
        if batch.generation != generation:
            break
        assert batch.sequence == sequence + 1, "a gap"
        sequence = batch.sequence
        batches.append(sequence)
        device |= set(batch.change.device_stored.tolist())
        device -= set(batch.change.device_removed.tolist())
        host |= set(batch.change.host_stored.tolist())
        host -= set(batch.change.host_removed.tolist())
    return Read(generation, sequence, PrefixClaims(frozenset(device), frozenset(host)), tuple(batches))
