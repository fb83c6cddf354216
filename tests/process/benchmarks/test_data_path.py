"""The measurement of the data path on its real processes, small: that it measures, not what."""

from benchmarks import data_path


async def test_tokens_come_through_router_and_worker_and_cost_something() -> None:
    said: list[str] = []

    report = await data_path.measure(32, 1.0, [50.0], said.append)

    (load,) = report.loads
    for each in (load, report.before):
        assert each.tokens_per_s > 0
        assert each.tokens_per_message >= 1
        # A process's time is told in hundredths of a second: the worker's may be none.
        assert each.worker_us_per_token >= 0
        assert each.router_us_per_token > 0
    assert report.table()["router_tokens_per_s"] == round(1e6 / load.router_us_per_token)
    assert len(said) == 2
