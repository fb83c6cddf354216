"""Second copies and strays, and which of them steps in."""

from kv_transfer.tiers.set_aside import SetAside


def test_the_newest_spare_steps_in_and_is_set_aside_no_more() -> None:
    aside = SetAside()
    aside.add_spare(1, b"a")
    aside.add_spare(2, b"a")
    assert [aside.take_spare(b"a") for _ in range(3)] == [2, 1, None]
    assert (aside.blocks, aside.spares) == ({}, {})


def test_a_stray_never_steps_in() -> None:
    aside = SetAside()
    aside.add_strays([(1, b"a"), (2, b"b")])
    assert aside.take_spare(b"a") is None
    assert aside.blocks == {1: b"a", 2: b"b"}
    aside.check_invariants()


def test_a_spare_that_left_the_device_does_not_step_in() -> None:
    aside = SetAside()
    aside.add_spare(1, b"a")
    assert aside.forget(1)
    assert not aside.forget(1)
    assert aside.take_spare(b"a") is None
    aside.check_invariants()


def test_a_block_that_is_set_aside_again_counts_once_and_under_its_last_hash() -> None:
    aside = SetAside()
    aside.add_spare(1, b"a")
    aside.add_spare(1, b"b")
    aside.check_invariants()
    assert (aside.take_spare(b"a"), aside.take_spare(b"b")) == (None, 1)
