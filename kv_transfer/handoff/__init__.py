"""The rules of a hand-off from a prefill worker to a decode worker."""
