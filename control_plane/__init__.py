"""The control plane: router, request lifecycle, placement, membership, start-up, command line. Knows no engine."""
