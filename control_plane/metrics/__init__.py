"""What Prometheus and the probes of the router are told."""
