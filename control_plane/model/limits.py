"""Limits of the service, and what holds where a client leaves a field of its request empty."""

from rachis.v1 import generation_pb2 as generation

DEFAULT_MAX_TOKENS = 128
# Of one pool.
MOST_WORKERS = 1024
# Of one list in a client's message: chat messages, pieces of an update.
MOST_ENTRIES = 2048
# Of a request, either way.
MAX_PRIORITY = 1000


def max_tokens_of(sampling: generation.SamplingParams) -> int:
    return sampling.max_tokens if sampling.HasField("max_tokens") else DEFAULT_MAX_TOKENS
