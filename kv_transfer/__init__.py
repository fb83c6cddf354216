"""KV blocks: handed from pool to pool over NIXL, kept over two tiers, and told of to the index of the cluster."""
