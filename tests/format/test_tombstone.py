"""A tombstone is not a checkpoint to any reader, and a changed manifest is the same to every reader."""

from __future__ import annotations

import pytest

import reknit
from reknit.errors import CorruptError, VersionError
from reknit.format.manifest_file import changed, decode_record, encode_tombstone, is_tombstone
from reknit.storage.registry import open_storage


def test_readers_that_do_not_know_it_refuse_a_tombstone_and_no_two_are_the_same() -> None:
    data = encode_tombstone()
    assert is_tombstone(data)
    assert data != encode_tombstone()
    with pytest.raises(VersionError, match="tombstone"):
        decode_record(data)


def test_a_tombstone_of_a_version_that_counts_on_is_one() -> None:
    head, number, rest = encode_tombstone().partition(b'"format_version":1')
    assert number
    assert is_tombstone(head + b'"format_version":12' + rest)
    assert not is_tombstone(head + b'"format_version":"x"' + rest)


def test_a_changed_manifest_has_other_bytes_of_one_size_and_the_same_content() -> None:
    reknit.save("mem://test_tombstone/step", {"m": {"n": 1}}, step=3, overwrite=True)
    data = open_storage("mem://test_tombstone/step").get("manifest.json", limit=1 << 20)
    once = changed(data)
    twice = changed(once)
    assert len({data, once, twice}) == 3
    assert len(once) == len(twice)
    assert decode_record(data) == decode_record(once) == decode_record(twice)
    assert not is_tombstone(twice)
    with pytest.raises(CorruptError):
        changed(data[:-1])
