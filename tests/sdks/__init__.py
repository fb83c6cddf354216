"""What people build on, in an environment of its own that has nothing of ours but the client: `python -m tests.sdks`.

It is made by `make sdks` from requirements/sdks.lock; the checks run against a service that is there.
"""
