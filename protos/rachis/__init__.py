"""The wire: generated stubs in `v1`, and the few conventions around them in `wire` and `registry`."""
