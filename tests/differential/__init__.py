"""The HTTP APIs against `vllm serve` of the same model: which answers differ, and why."""
