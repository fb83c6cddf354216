"""The HTTP APIs: vLLM's own front over the router's gRPC, in a process without an engine."""
