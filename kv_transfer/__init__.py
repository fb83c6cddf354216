"""KV blocks: handed from pool to pool over NIXL, kept over two tiers, and claimed in the index of the cluster."""
