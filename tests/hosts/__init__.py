"""Rachis on several hosts, made of namespaces on one machine; see `tests.hosts.__main__`."""

IN_NAMESPACE = "RACHIS_TEST_HOSTS"
