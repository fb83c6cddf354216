"""Cached prefixes over device and host memory: what leaves, what is copied, what comes back."""
