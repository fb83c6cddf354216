"""One service on its machine: what is checked, started, kept and ended around the router."""
