"""Makes the servers and channels of one simulation; see the package."""
