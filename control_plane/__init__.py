"""The control plane, in rooms that follow a request: see ARCHITECTURE.md. Knows no engine."""
