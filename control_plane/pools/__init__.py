"""The life of the pools: workers started, scaled, drained, restarted, taken down."""
