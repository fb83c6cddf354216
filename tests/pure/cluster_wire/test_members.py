"""Seals between the parts of a service: what nobody without the secret can make, and what is damaged on the way."""

import pytest
from rachis.v1 import worker_pb2 as wire

from cluster_wire.members import member_metadata, sealed, unsealed
from cluster_wire.secret import Secret

SECRET, OTHER = Secret(b"a" * 32), Secret(b"b" * 32)
RECORD = wire.WorkerRegistration(worker_id="decode-0", address="10.0.0.7:1", generation=7).SerializeToString()


def test_what_is_sealed_is_opened_by_who_has_the_secret() -> None:
    assert unsealed(SECRET, sealed(SECRET, RECORD)) == RECORD
    assert unsealed(SECRET, sealed(SECRET, b"")) == b""


WHOLE = sealed(SECRET, RECORD)


@pytest.mark.parametrize(
    "written",
    [RECORD, b"", b"x" * 31, sealed(OTHER, RECORD), WHOLE[:-1], WHOLE + b"\0", bytes(32) + RECORD],
)
def test_a_stranger_makes_none(written: bytes) -> None:
    assert unsealed(SECRET, written) is None


def test_any_change_breaks_it() -> None:
    for index in range(len(WHOLE)):
        changed = bytearray(WHOLE)
        changed[index] ^= 1
        assert unsealed(SECRET, bytes(changed)) is None


def test_without_a_secret_records_are_as_they_were() -> None:
    assert sealed(None, RECORD) == RECORD == unsealed(None, RECORD)
    assert member_metadata(None) == ()
