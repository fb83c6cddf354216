"""The imitated GPU: vLLM's real engine over a worker that computes nothing and takes a cost model's time."""
