from __future__ import annotations

import base64
import json
import tracemalloc
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from reknit.errors import CorruptError, FormatError, ReknitError, StateError, VersionError
from reknit.format import manifest_file, strict_json
from reknit.format.manifest_file import MAX_SPARE_VALUES, decode_generation, decode_manifest, encode_manifest
from reknit.types.manifest import BlobFile, FileEntry, Manifest
from tests.format.samples import manifests, sample_manifest, taken
from tests.running.examples import examples


def resigned(body: bytes) -> bytes:
    return body + f',"digest":"{xxhash.xxh3_64_hexdigest(body)}"}}'.encode()


@given(manifests())
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_the_digest_is_over_every_byte_before_it() -> None:
    data = encode_manifest(sample_manifest())
    body, tail = data[:-29], data[-29:].decode()
    assert tail == f',"digest":"{xxhash.xxh3_64_hexdigest(body)}"}}'
    assert json.loads(data)["digest"] == xxhash.xxh3_64_hexdigest(body)


def test_the_document_is_plain_json_with_the_documented_members() -> None:
    document = json.loads(encode_manifest(sample_manifest()))
    assert list(document) == [
        *("format", "format_version", "requires", "write_id", "generation", "step", "created", "items"),
        *("block_nbytes", "index", "files", "blobs", "uses_pickle", "origin", "metadata", "digest"),
    ]
    file = document["files"][0]
    digests = sample_manifest().files[0].digests
    assert base64.b64decode(file["digests"]) == b"".join(number.to_bytes(8, "little") for number in digests)


def test_a_manifest_of_zeros_is_refused_without_a_copy_of_it() -> None:
    for end in (b"", b',"digest":"0123456789abcdef"}'):
        zeros = bytes(32 << 20) + end
        tracemalloc.start()
        try:
            with pytest.raises(CorruptError, match="digest"):
                decode_manifest(zeros)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


def test_more_values_than_any_files_have_are_refused_before_the_last_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(strict_json, "_SCAN_NBYTES", 1 << 10)
    monkeypatch.setattr(manifest_file, "MAX_SPARE_VALUES", 1000)
    body = b'{"format":"reknit","x":[' + b"[]," * (1 << 20)  # this is not even JSON
    with pytest.raises(FormatError, match="which is the limit"):
        decode_manifest(resigned(body))


def test_a_file_too_large_to_be_read_as_a_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = sample_manifest()
    data = encode_manifest(manifest)
    for name, path in (
        ("MAX_INDEX_NBYTES", "index.01234567.parquet"),
        ("MAX_BLOBS_NBYTES", "extra/00000.01234567.msgpack"),
    ):
        (nbytes,) = (file.nbytes for file in manifest.files if file.path == path)
        with monkeypatch.context() as patch:
            patch.setattr(manifest_file, name, nbytes)
            assert decode_manifest(data) == manifest
            patch.setattr(manifest_file, name, nbytes - 1)
            with pytest.raises(FormatError, match="too large"):
                decode_manifest(data)


@settings(max_examples=examples(300))
@given(st.data())
def test_a_flipped_bit_anywhere_is_noticed(data: st.DataObject) -> None:
    good = encode_manifest(sample_manifest())
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ReknitError):
        decode_manifest(bytes(bad))


def test_a_manifest_cut_short_anywhere_is_refused() -> None:
    good = encode_manifest(sample_manifest())
    assert taken((good[:length] for length in range(len(good))), decode_manifest, CorruptError) == []


def test_metadata_that_json_cannot_hold_is_refused_by_its_place() -> None:
    cases: list[tuple[Any, str]] = [
        ({"a": {1, 2}}, "metadata['a']"),
        ({"a": [1, (2,)]}, "metadata['a'][1]"),
        ({"a": float("nan")}, "metadata['a']"),
        ({"a": float("inf")}, "metadata['a']"),
        ({"a": 1 << 64}, "metadata['a']"),
        ({"a": "\ud800"}, "metadata['a']"),
        ({"\ud800": 1}, "metadata"),
        ({1: 1}, "metadata"),
        ({"a": {"b": b""}}, "metadata['a']['b']"),
    ]
    for metadata, where in cases:
        with pytest.raises(StateError) as caught:
            encode_manifest(replace(sample_manifest(), metadata=metadata))
        assert where in str(caught.value)


def test_metadata_that_contains_itself_is_refused() -> None:
    metadata: dict[str, Any] = {}
    metadata["again"] = [metadata]
    with pytest.raises(StateError, match="contains itself"):
        encode_manifest(replace(sample_manifest(), metadata=metadata))


def test_metadata_as_deep_as_allowed_is_kept() -> None:
    value: Any = 1
    for _ in range(30):
        value = [value]
    manifest = replace(sample_manifest(), metadata={"deep": value})
    assert decode_manifest(encode_manifest(manifest)) == manifest
    with pytest.raises(StateError):
        encode_manifest(replace(sample_manifest(), metadata={"deep": [value]}))


SAMPLE = sample_manifest()
WRONG: dict[str, list[Any]] = {
    "write_id": ["short", "A" * 32],
    "saved_as": ["a" * 32],
    "dropped": [{"optimizer": 1.0}],
    "moved_to": [
        *("", "cold/run", "s3://cold/run?endpoint=http://elsewhere", "/cold/run\n", "/" + "x" * 4096)
    ],
    "generation": [-1, 1 << 63, 1.5],
    "step": [-1, "1"],
    "created": [float("nan")],
    "block_nbytes": [1000, 5000, 0],
    "index_path": ["elsewhere"],
    "items": [("extra", "extra"), ("model",), list(SAMPLE.items)],
    "files": [
        (FileEntry("a", 1, (1, 2)),),
        (FileEntry("../a", 1, (1,)),),
        (*SAMPLE.files, SAMPLE.files[0]),
        (*SAMPLE.files, FileEntry("manifest.json", 0, ())),
        (*SAMPLE.files, FileEntry("negative", -1, ())),
        (*SAMPLE.files, FileEntry("x", 1, (1 << 64,))),
    ],
    "blobs": [
        (BlobFile("extra", "nowhere", None),),
        (BlobFile("extra", "index.01234567.parquet", None),),
        SAMPLE.blobs[:1] * 2,
        tuple(BlobFile("extra", SAMPLE.blobs[0].path, {"dp": dp}) for dp in range(2)),
        (BlobFile("extra", SAMPLE.blobs[0].path, {"dp": 1 << 63}),),
    ],
}


def test_a_manifest_that_a_reader_would_refuse_is_not_written() -> None:
    changes: list[dict[str, Any]] = [{name: value} for name, values in WRONG.items() for value in values]
    changes.append({"saved_as": "short", "dropped": {"optimizer": 1.0}})
    for dropped in (
        {"model": 1.0},
        *({"optimizer": at} for at in (float("nan"), -1.0, 1e300)),
        {"\ud800": 1.0},
    ):
        changes.append({"saved_as": "a" * 32, "dropped": dropped})
    refusals = FormatError, StateError
    assert taken(changes, lambda change: encode_manifest(replace(SAMPLE, **change)), refusals) == []


def test_of_any_number_of_files_a_manifest_is_read_and_of_other_values_only_so_many() -> None:
    sample = sample_manifest()
    paths = [f"extra/{rank:05d}.own.01234567.msgpack" for rank in range(1, 10_000)]
    axes = {"dp": 1, "tp": 2, "pp": 3, "ep": 4, "cp": 5, "rank": 6}
    manifest = replace(
        sample,
        files=(*sample.files, *(FileEntry(path, 1, (7,)) for path in paths)),
        blobs=(*sample.blobs, *(BlobFile("extra", path, axes) for path in paths)),
        metadata={"x": list(range(MAX_SPARE_VALUES - 100))},
    )
    assert decode_manifest(encode_manifest(manifest)) == manifest
    with pytest.raises(FormatError, match="values beside those of its files") as caught:
        encode_manifest(replace(sample, metadata={"x": [0] * MAX_SPARE_VALUES}))
    assert "entries of the state" in str(caught.value.remedy)
    with pytest.raises(FormatError, match="has more than 1024 bytes"):
        encode_manifest(replace(sample, blobs=(BlobFile("extra", sample.blobs[0].path, {"d" * 1100: 1}),)))


def test_a_manifest_of_future_fields_is_read_without_them() -> None:
    good = encode_manifest(sample_manifest())
    body = good[:-29] + b',"novelty":[1,{"x":2}]'
    assert decode_manifest(resigned(body)) == sample_manifest()


def test_a_manifest_of_a_writer_that_knew_no_generation_has_none() -> None:
    manifest = replace(sample_manifest(), generation=None)
    data = encode_manifest(manifest)
    assert b"generation" not in data
    assert decode_manifest(data) == manifest
    assert decode_generation(data) is None


def test_the_generation_is_told_also_of_a_manifest_that_is_too_new_to_be_read() -> None:
    good = encode_manifest(sample_manifest())
    newer = resigned(good[:-29].replace(b'"format_version":1', b'"format_version":99'))
    with pytest.raises(VersionError):
        decode_manifest(newer)
    assert decode_generation(newer) == decode_generation(good) == sample_manifest().generation


def test_the_generation_of_a_damaged_manifest_is_not_told() -> None:
    good = encode_manifest(sample_manifest())
    for bad in (b"", good[:-1], good.replace(b'"generation":1', b'"generation":2'), resigned(b'{"format":1')):
        with pytest.raises(CorruptError) as caught:
            decode_generation(bad)
        assert caught.value.path == "manifest.json"


def test_blocks_are_a_power_of_two_within_bounds_also_where_all_files_are_empty() -> None:
    empty = tuple(FileEntry(file.path, 0, ()) for file in sample_manifest().files)
    assert decode_manifest(encode_manifest(replace(sample_manifest(), files=empty))).files == empty
    for block_nbytes in (1, 2048, 5000, 1 << 31):
        with pytest.raises(FormatError, match="block_nbytes"):
            encode_manifest(replace(sample_manifest(), files=empty, block_nbytes=block_nbytes))


def test_a_redirect_says_that_readers_have_to_know_of_it() -> None:
    data = encode_manifest(replace(sample_manifest(), moved_to="s3://cold/run"))
    assert json.loads(data)["requires"] == ["moved"]
    for requires in (b"[]", b'["later"]'):
        body = data[:-29].replace(b'"requires":["moved"]', b'"requires":' + requires)
        with pytest.raises((FormatError, VersionError), match=r"'moved'|later"):
            decode_manifest(resigned(body))
