"""The decode pool: pulls the KV blocks of prefilled prompts and generates the tokens that the client sees."""
