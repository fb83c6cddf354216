"""WorkerService of an engine that does both: it prefills for others, pulls from others, and computes whole requests."""

from decode_worker.service import DecodeService
from prefill_worker.service import PrefillService


class SharedService(PrefillService, DecodeService):
    """Each call as the worker of that pool answers it."""
