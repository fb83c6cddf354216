"""What every room speaks of: a request, its lifecycle and its leases, the worker that it is sent to."""
