"""The fuzzers; vLLM is imported by several modules here, and asks no hub."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
