"""What a client may ask for: admission, limits, tokens. A request that leaves this room is well formed."""
