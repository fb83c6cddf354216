"""Policies of prefix caches, replayed over a trace: `rachis bench prefix-cache`."""
