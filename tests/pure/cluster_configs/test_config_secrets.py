"""Passwords and keys of a configuration: shown nowhere, nor repeated by what refuses it."""

import re
from pathlib import Path
from typing import Any

import pytest

from cluster_configs.front_keys import apart
from cluster_configs.loading import load, masked, parse_assignments
from cluster_core.errors import ConfigError


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@host:6379/0", "redis://:***@host:6379/0"),
        ("redis://user:s@cret@host/0", "redis://user:***@host/0"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("plain", "plain"),
        (7, 7),
        (None, None),
    ],
)
def test_a_url_is_printed_without_its_password(url: Any, shown: Any) -> None:
    assert masked(url) == shown


def test_a_url_is_printed_without_a_password_in_its_query() -> None:
    assert "secret" not in masked("redis://host/0?password=secret")


def test_a_url_that_does_not_parse_is_printed_all_the_same() -> None:
    assert "://" in masked("redis://[::1/0")


_PASSWORDS = (
    "[redis://:s3cret@r:1/0",
    "*s3cret",
    "!s3cret it",
    "!s3'cret it",
    "a: s3cret: b",
    "'s3cret",
    '"\\s3cret"',
    "@s3cret",
    "%s3cret",
    "- |s3cret",
    "s3cret\u0000",
    "0o9_s3cret: 2024-13-45",
)


@pytest.mark.parametrize("value", _PASSWORDS)
def test_what_is_no_yaml_is_refused_without_a_word_of_it_and_with_its_place(tmp_path: Path, value: str) -> None:
    path = tmp_path / "rachis.yaml"
    path.write_text(f"redis:\n  port: 1\n  url: {value}\n")
    refused = []
    for load_it in (
        lambda: parse_assignments([f"redis.url={value}"]),
        lambda: load(environment={"RACHIS_REDIS__URL": value}),
        lambda: load(file=path),
    ):
        with pytest.raises(ConfigError) as error:
            load_it()
        refused.append(str(error.value))
    assert "3cret" not in " ".join(refused)
    assert all("is not valid YAML: " in each for each in refused)
    if "\0" not in value and "2024" not in value:
        assert "line 3, column" in refused[2] or "line 4, column" in refused[2]
    assert refused[0].startswith("--set redis.url: ") and refused[1].startswith("RACHIS_REDIS__URL: ")


def test_a_value_that_may_hold_a_key_is_not_repeated_when_it_is_refused() -> None:
    for key, value in (("gateway.options", "--api-key s3cret"), ("tracing.otlp_endpoint", "ftp://a:s3cret@c")):
        with pytest.raises(ConfigError, match=re.escape(key)) as error:
            load(flags={key: value})
        assert "s3cret" not in str(error.value)
    with pytest.raises(ConfigError, match="is not of the form key=value") as error:
        parse_assignments(["redis.url:redis://:s3cret@r:1/0"])
    assert "s3cret" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "shown", "others"),
    [
        (["--api-key", "k1", "k2", "--port", "1"], ["--api-key", "***", "***", "--port", "1"], ["--port", "1"]),
        (["--api-key=k1", "--x"], ["--api-key=***", "--x"], ["--x"]),
        (["--api_key=k1=k1"], ["--api_key=***"], []),
        (["--api-k", "k1"], ["--api-k", "***"], []),
        (["--api-server-count", "2"], ["--api-server-count", "2"], ["--api-server-count", "2"]),
        (["a", "redis://:k1@h"], ["a", "redis://:***@h"], ["a", "redis://:k1@h"]),
        ([], [], []),
    ],
)
def test_keys_among_options_of_a_gateway_are_masked_and_told_apart(
    options: list[str], shown: list[str], others: list[str]
) -> None:
    loaded = load(flags={"gateway.options": options})
    (entry,) = (each for each in loaded.entries if each.key == "gateway.options")
    assert masked(entry.value) == shown
    assert apart(options)[0] == others
