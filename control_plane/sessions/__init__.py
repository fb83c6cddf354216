"""Streaming sessions: prompts that arrive, and change, while they are prefilled."""
