"""Which worker a request goes to, why, and which prefixes are copied to further workers."""
