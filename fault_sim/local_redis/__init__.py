"""Redis in memory: what of it the registry and the prefix index use, with expiry on the clock of the process.

One `Store` is the server; each client is made for a host and reaches it over that host's link. A server that is down
refuses connections; a link that is cut lets calls run into their timeout. Scripts are known by their text and written
again in `scripts`; the contract tests run the same production code against this and a real Redis.
"""
