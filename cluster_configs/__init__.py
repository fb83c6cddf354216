"""Configuration: its schema, its profiles, and how a configuration in force comes together."""
