"""Moving KV blocks: between the pools over NIXL."""
