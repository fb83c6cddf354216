"""Host memory for KV blocks: its slots, copies between it and the device, requests swapped out to it."""
