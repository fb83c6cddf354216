"""The prefill pool: computes prompts and their first tokens, and leases the KV blocks to the decode pool."""
