"""One router process: its gRPC services, put together and taken down in one order."""
