"""The first sampling step of a decode job is fixed to the token that was sampled elsewhere, and only that step.

Plain tensors and vLLM's own batch updates; marked `integration` because importing vLLM takes seconds.
"""

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.integration

ROWS, TOKENS = 4, 8
Update = Callable[..., None]


@pytest.fixture(scope="module")
def vllm_parts() -> dict[str, Any]:
    import torch
    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

    from kv_transfer.handoff.first_token_replay import FirstTokenReplay

    return {
        "torch": torch,
        "params": SamplingParams,
        "update": BatchUpdate,
        "swap": MoveDirectionality.SWAP,
        "move": MoveDirectionality.UNIDIRECTIONAL,
        "replay": FirstTokenReplay,
    }


class Batch:
    """A replay processor and the batch it sees."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self.parts = parts
        self.replay = parts["replay"](None, parts["torch"].device("cpu"), False)

    def added(
        self, row: int, first: int | None, output: list[int] | None = None
    ) -> tuple[int, Any, list[int], list[int]]:
        extra = None if first is None else {"rachis_first_token": first}
        return row, self.parts["params"](extra_args=extra), [1, 2, 3], output if output is not None else []

    def update(
        self, added: tuple[Any, ...] = (), removed: tuple[int, ...] = (), moved: tuple[tuple[int, int, Any], ...] = ()
    ) -> None:
        self.replay.update_state(self.parts["update"](ROWS, list(removed), list(added), list(moved)))

    def fixed(self) -> dict[int, int]:
        """Row -> the one token that its logits allow, of rows that are fixed; the others must be untouched."""
        torch = self.parts["torch"]
        before = torch.arange(ROWS * TOKENS, dtype=torch.float32).reshape(ROWS, TOKENS)
        after = self.replay.apply(before.clone())
        fixed = {}
        for row in range(ROWS):
            if torch.equal(after[row], before[row]):
                continue
            allowed = torch.isfinite(after[row]).nonzero().flatten().tolist()
            assert len(allowed) == 1
            assert torch.softmax(after[row], 0)[allowed[0]] == 1.0
            fixed[row] = allowed[0]
        return fixed


@pytest.fixture
def batch(vllm_parts: dict[str, Any]) -> Batch:
    return Batch(vllm_parts)


def test_a_row_with_a_first_token_allows_that_token_alone(batch: Batch) -> None:
    batch.update(added=(batch.added(1, 5), batch.added(2, 0)))

    assert batch.fixed() == {1: 5, 2: 0}


def test_a_row_without_a_first_token_is_untouched(batch: Batch) -> None:
    batch.update(added=(batch.added(0, None),))

    assert batch.fixed() == {}


def test_a_row_is_free_once_its_first_token_is_out(batch: Batch) -> None:
    output: list[int] = []
    batch.update(added=(batch.added(1, 5, output), batch.added(2, 6)))
    assert batch.fixed() == {1: 5, 2: 6}

    output.append(5)
    batch.replay.update_state(None)

    assert batch.fixed() == {2: 6}


def test_a_row_stays_fixed_while_its_prompt_is_computed_in_pieces(batch: Batch) -> None:
    batch.update(added=(batch.added(1, 5),))
    for _ in range(3):
        batch.replay.update_state(None)

    assert batch.fixed() == {1: 5}


def test_a_request_that_was_preempted_after_its_first_token_is_not_fixed_again(batch: Batch) -> None:
    batch.update(added=(batch.added(1, 5, [5, 3]),))

    assert batch.fixed() == {}


def test_a_removed_row_is_forgotten(batch: Batch) -> None:
    batch.update(added=(batch.added(1, 5),))
    batch.update(removed=(1,))

    assert batch.fixed() == {}


def test_a_new_request_in_a_row_replaces_what_the_row_was_fixed_to(batch: Batch) -> None:
    batch.update(added=(batch.added(1, 5), batch.added(2, 6)))
    batch.update(added=(batch.added(1, None), batch.added(2, 7)))

    assert batch.fixed() == {2: 7}


def test_a_moved_row_takes_its_token_along(batch: Batch) -> None:
    batch.update(added=(batch.added(3, 5),))
    batch.update(moved=((3, 0, batch.parts["move"]),))

    assert batch.fixed() == {0: 5}


def test_swapped_rows_swap_their_tokens(batch: Batch) -> None:
    batch.update(added=(batch.added(0, 5), batch.added(1, 6), batch.added(2, 7)))
    batch.update(moved=((0, 1, batch.parts["swap"]), (2, 3, batch.parts["swap"])))

    assert batch.fixed() == {0: 6, 1: 5, 3: 7}


def test_the_processor_may_change_what_greedy_sampling_picks(batch: Batch) -> None:
    assert batch.replay.is_argmax_invariant() is False
