"""Tenants' rates for Prometheus. No figure names a tenant: there may be any number of them."""

import asyncio

from prometheus_client.core import Metric

from control_plane.intake.shared_rates import SharedRates
from control_plane.intake.tenant_rates import LIMITS
from control_plane.metrics.families import counter, counters, gauge
from control_plane.metrics.loop_collector import SmallLoopCollector


class RateCollector(SmallLoopCollector):
    what = "tenants' rates"

    def __init__(self, shared: SharedRates, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._shared = shared

    async def read(self) -> list[Metric]:
        rates = self._shared.rates
        return [
            counters(
                "rachis_rate_refusals_total",
                "Requests and sessions that were refused because their tenant had had its rate, by the limit",
                ("limit",),
                {(limit,): float(rates.refused[limit]) for limit in LIMITS},
            ),
            counter(
                "rachis_rate_requests_apart_total",
                "Requests of tenants with limits that came while Redis did not answer: this router went by its part",
                self._shared.apart,
            ),
            gauge("rachis_rate_tenants", "Tenants whose rates are not whole, as this router knows", len(rates)),
        ]
