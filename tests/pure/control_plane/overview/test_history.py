"""The last hour of a service, its ages told by the router's own clock."""

from rachis.v1 import admin_pb2 as admin

from control_plane.overview.history import History
from tests.pure.control_plane.overview.test_rows import DECODE


def overview(ready: int, **fields: object) -> admin.GetOverviewResponse:
    pool = admin.PoolOverview(pool=DECODE, workers={"ready": ready, "draining": 1}, running_requests=3)
    return admin.GetOverviewResponse(pools=[pool], **fields)  # type: ignore[arg-type]  # by name


def test_samples_come_oldest_first_with_their_ages() -> None:
    history = History()
    history.add(overview(1), 10.0)
    history.add(overview(2, ttft=admin.TimesOverview(requests=5, p90_s=0.5)), 15.0)
    samples = history.told(16.0).samples
    assert [(each.age_s, each.pools[0].ready_workers, each.pools[0].workers) for each in samples] == [
        (6.0, 1, 2), (1.0, 2, 3),
    ]  # fmt: skip
    assert not samples[0].HasField("ttft_p90_s") and samples[1].ttft_p90_s == 0.5
    assert not samples[0].pools[0].HasField("desired_workers")


def test_the_oldest_is_forgotten_beyond_the_bound() -> None:
    history = History(most=3)
    for at_s in range(5):
        history.add(overview(at_s), float(at_s))
    assert [sample.pools[0].ready_workers for sample in history.told(5.0).samples] == [2, 3, 4]
