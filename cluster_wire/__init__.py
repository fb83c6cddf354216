"""Between the processes of a service: how a call ends, and where Redis keeps what."""
