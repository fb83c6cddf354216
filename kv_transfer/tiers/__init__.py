"""Cached prefixes over device and host memory: who leaves, who is copied, who comes back."""
