"""Checksums of blocks in a device's memory: what they tell apart."""

from random import Random

import pytest
import torch

from kv_transfer.handoff.block_checksums import BlockChecksums

pytestmark = pytest.mark.integration

BLOCKS, BYTES = 12, 200


def memory(seed: int = 1, layers: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-128, 128, (BLOCKS, BYTES), dtype=torch.int8, generator=generator) for _ in range(layers)]


def test_equal_blocks_have_equal_checksums_wherever_they_lie_and_however_many_are_asked_for() -> None:
    views = memory()
    copied = [torch.zeros(BLOCKS, BYTES, dtype=torch.int8) for _ in views]
    for view, copy in zip(views, copied, strict=True):
        copy[[5, 0, 7]] = view[[2, 3, 4]]
    sent, landed = BlockChecksums(views), BlockChecksums(copied)
    assert sent.of([2, 3, 4]) == landed.of([5, 0, 7]) == [*sent.of([2]), *sent.of([3]), *sent.of([4])]
    assert sent.of([]) == []


@pytest.mark.parametrize("size", [8, 13, 200])
def test_one_bit_anywhere_is_noticed(size: int) -> None:
    views = [view[:, :size].contiguous() for view in memory()]
    checksums, rng = BlockChecksums(views), Random(size)
    (before,) = checksums.of([3])
    for _ in range(100):
        view, place, bit = rng.choice(views), rng.randrange(size), rng.randrange(8)
        view[3, place] ^= 1 << bit if bit < 7 else -128
        (changed,) = checksums.of([3])
        assert changed != before
        view[3, place] ^= 1 << bit if bit < 7 else -128
    assert checksums.of([3]) == [before]


def test_words_and_layers_that_change_places_are_noticed() -> None:
    views = memory()
    checksums = BlockChecksums(views)
    (before,) = checksums.of([1])
    views[0][1, :16] = views[0][1, :16].roll(8)
    (rolled,) = checksums.of([1])
    views[0][1], views[1][1] = views[1][1].clone(), views[0][1].clone()
    assert len({before, rolled, *checksums.of([1])}) == 3


def test_many_blocks_are_taken_in_parts() -> None:
    blocks = list(range(BLOCKS))
    assert BlockChecksums(memory(), 2 * BYTES).of(blocks) == BlockChecksums(memory()).of(blocks)
