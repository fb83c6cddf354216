"""The cluster in simulated time: the production code of the control plane and the schedulers over modelled engines."""
