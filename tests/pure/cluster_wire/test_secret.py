"""Salts of tenants: the same for the same, and never the same for others."""

from itertools import combinations

from cluster_wire.secret import Secret

A, B = Secret(b"a" * 32), Secret(b"b" * 32)


def test_a_salt_is_that_of_its_tenant_and_of_the_clients_own() -> None:
    asked = [
        ("acme", ""),
        ("acme", "x"),
        ("zeta", ""),
        ("zeta", "x"),
        ("", ""),
        ("acm", "e"),
        ("acmex", ""),
        ("", "acme"),
    ]
    salts = {(tenant, salt): A.salt(tenant, salt, "never") for tenant, salt in asked}
    for one, other in combinations(asked, 2):
        assert salts[one] != salts[other], (one, other)
    assert A.salt("acme", "x", "never") == salts["acme", "x"]


def test_without_the_secret_no_salt_is_found() -> None:
    assert A.salt("acme", "", "never") != B.salt("acme", "", "never")


def test_tenants_share_where_they_are_to_and_clients_refine_it() -> None:
    assert A.salt("acme", "", "always") == A.salt("zeta", "", "always")
    assert A.salt("acme", "x", "always") != A.salt("acme", "", "always")


def test_a_salt_fits_where_salts_go() -> None:
    salt = A.salt("acme", "ü" * 128, "never")
    assert len(salt) == 64 and salt.isalnum()


def test_the_services_key_is_no_salt_and_is_not_shown() -> None:
    assert A.service_key != B.service_key
    assert A.service_key[3:] not in {A.salt("", "", "never"), A.salt("service key", "", "never")}
    assert "a" * 8 not in repr(A) and "61616161" not in repr(A)
