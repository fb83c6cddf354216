"""The operator's file of what tenants may have: what it says, and the sentence for what it cannot say."""

import pytest

from cluster_core.errors import ConfigError
from control_plane.access.tenant_limits import UNLIMITED, TenantLimits, limits_of, parsed_tenants

FILE = """
acme: {requests_per_s: 20, tokens_per_s: 40000, burst_s: 5, weight: 2}
zeta: {weight: 0.5}
"*": {requests_per_s: 1.5}
"""


def test_each_tenant_has_its_own_limits_and_the_others_those_of_the_star() -> None:
    tenants = parsed_tenants(FILE)
    assert limits_of(tenants, "acme") == TenantLimits(20.0, 40000.0, 5.0, 2.0)
    assert limits_of(tenants, "zeta") == TenantLimits(weight=0.5)
    assert limits_of(tenants, "who") == TenantLimits(requests_per_s=1.5)


@pytest.mark.parametrize("text", ["", "{}", "# nobody", "other: {weight: 2}"])
def test_who_is_not_named_has_no_limits(text: str) -> None:
    assert limits_of(parsed_tenants(text), "acme") is UNLIMITED


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "acme: {requests_per_s: 0}",
            "acme.requests_per_s: must be a number from 0.001 to 1,000,000, got 0; a tenant that may send",
        ),
        ("acme: {requests_per_s: -3}", "acme.requests_per_s: must be a number from 0.001 to 1,000,000, got -3"),
        ("acme: {requests_per_s: .nan}", "acme.requests_per_s: must be a number from 0.001 to 1,000,000, got nan"),
        ("acme: {tokens_per_s: .inf}", "acme.tokens_per_s: must be a number from 0.01 to 1,000,000,000, got inf"),
        ("acme: {tokens_per_s: 1.0e+30}", "acme.tokens_per_s: must be a number from 0.01 to 1,000,000,000, got 1e+30"),
        ("acme: {tokens_per_s: many}", "acme.tokens_per_s: must be a number from 0.01 to 1,000,000,000, got 'many'"),
        ("acme: {tokens_per_s: true}", "acme.tokens_per_s: must be a number from 0.01 to 1,000,000,000, got True"),
        ("acme: {tokens_per_s: }", "acme.tokens_per_s: must be a number from 0.01 to 1,000,000,000, got None"),
        ("acme: {burst_s: 0.5}", "acme.burst_s: must be a number from 1 to 3,600, got 0.5"),
        ("acme: {weight: 0}", "acme.weight: must be a number from 0.01 to 100, got 0"),
        ("acme: {weight: 101}", "acme.weight: must be a number from 0.01 to 100, got 101"),
        ("acme: {request_per_s: 1}", "acme.request_per_s: is none of requests_per_s, tokens_per_s, burst_s, weight"),
        ("acme: 3", "acme: must be a table of requests_per_s, tokens_per_s, burst_s, weight, got 3"),
        ("a b: {weight: 1}", "a b: must be 1 to 64 letters"),
        ("12: {weight: 1}", "12: must be 1 to 64 letters"),
        ("on: {weight: 1}", "True: must be 1 to 64 letters"),
        ("[acme]", "must be a table of tenants"),
        ("acme: {", "is not valid YAML"),
        ("acme: {requests_per_s: " + "9" * 5000 + "}", "is not valid YAML"),
        ("acme: {requests_per_s: 0x" + "f" * 5000 + "}", "has a number that is too long"),
        ("acme: {weight: 1}\nzeta: {}\nacme: {weight: 2}", "acme: is there twice, in lines 1 and 3"),
        ("acme:\n  weight: 1\n  weight: 2", "weight: is there twice, in lines 2 and 3"),
    ],
)
def test_what_a_limit_cannot_be_is_a_sentence_with_tenant_limit_and_bounds(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parsed_tenants(text)
    assert str(raised.value).startswith(sentence)
