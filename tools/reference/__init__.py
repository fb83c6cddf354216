"""The pages of `docs/reference`, each written from the source that it describes."""
