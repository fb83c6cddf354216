"""What a batch waits for by a real clock: one try, where its service is frozen."""

from tests.pure.command_line.test_batch_run import World, status


def test_a_frozen_service_keeps_a_request_for_one_try_and_the_others_not_at_all() -> None:
    world = World(lambda name, tried: status(200), try_s=0.01)
    world.silent.add("a")
    figures = world.play("a", "b", "c")
    assert (figures.answered, figures.expired) == (2, 1)
    assert "did not answer in time" in world.answers["a"].message and figures.tried_again > 3
