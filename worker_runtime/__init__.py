"""What every worker is made of: the engine on its thread, WorkerService, and its registration."""
