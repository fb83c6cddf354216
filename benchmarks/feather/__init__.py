"""Stop policies of the decode scheduler on a real engine: `rachis bench feather`."""
