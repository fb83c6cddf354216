"""Who calls, what they may do, and what keeps the tenants' caches apart."""
