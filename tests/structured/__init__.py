"""Grammars over a real hand-off, against one plain vLLM: `python -m tests.structured`."""
