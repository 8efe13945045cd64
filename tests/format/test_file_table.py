"""The table of files in an index replaces the list in the manifest, and is refused if it is wrong."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from msgspec.structs import replace

from reknit.errors import FormatError, VersionError
from reknit.format.checksum import check_version
from reknit.format.file_table import entries, with_table
from reknit.format.file_table import table_of as table_of_all
from reknit.format.index import decode_index, encode_index
from reknit.format.index.parquet import with_section
from reknit.format.manifest_file import decode_manifest, decode_record, encode_manifest
from reknit.types.manifest import Manifest, TablePlace
from tests.attacks.hostile_documents import signed
from tests.attacks.hostile_table import GOOD, manifest_of, table_of
from tests.format.samples import in_the_index, manifests, sample_index, sample_manifest


def same_files(a: Manifest, b: Manifest) -> bool:
    """Return whether two manifests differ in the order of files at most, and in the size of the index."""
    files = [{file.path: file for file in each.files if file.path != a.index_path} for each in (a, b)]
    blobs = [{blob.path: blob for blob in each.blobs} for each in (a, b)]
    return files[0] == files[1] and blobs[0] == blobs[1]


@given(manifests())
def test_it_says_what_a_manifest_says_that_lists_all_files(manifest: Manifest) -> None:
    files = {file.path: file for file in manifest.files if file.path != manifest.index_path}
    assert {file.path: file for file in entries(table_of_all(manifest), manifest.block_nbytes)} == files
    if not files:
        return  # the index records that it has no table
    listed = decode_manifest(encode_manifest(manifest))
    index, short = in_the_index(manifest)
    record = decode_record(encode_manifest(short))
    assert record == short
    whole = with_table(record, index)
    assert same_files(whole, listed)
    assert whole.index == short.index
    assert (whole.num_files, whole.nbytes) == (record.num_files, record.nbytes)
    assert whole.num_files == len(listed.files)
    assert replace(whole, files=(), blobs=()) == replace(listed, files=(), blobs=())
    assert decode_manifest(encode_manifest(whole)) == whole


def test_the_manifest_stays_small_and_old_readers_are_told_that_they_cannot_read_it() -> None:
    _, short = in_the_index(sample_manifest())
    data = encode_manifest(short)
    assert b"safetensors" not in data
    assert b'"requires":["file_table"]' in data
    check_version(1, ["file_table"])
    with pytest.raises(VersionError, match="features that this reknit does not support: another_table"):
        decode_record(_signed(data.replace(b'["file_table"]', b'["another_table"]')))


def test_an_index_with_a_table_is_read_by_whoever_reads_parquet() -> None:
    plain = encode_index(sample_index())
    index, start = with_section(plain, b"anything" * 1000)
    assert index[start : start + 8] == b"anything"
    assert pq.read_table(pa.BufferReader(index)).equals(pq.read_table(pa.BufferReader(plain)))
    assert decode_index(index).tensors == decode_index(plain).tensors


def test_a_manifest_without_a_table_is_left_as_it_is() -> None:
    assert with_table(sample_manifest(), b"") == sample_manifest()


def test_a_manifest_that_lacks_its_files_is_no_whole_one() -> None:
    _, short = in_the_index(sample_manifest())
    with pytest.raises(FormatError, match="listed in the index"):
        decode_manifest(encode_manifest(short))


def test_the_table_that_attacks_start_from_is_sound() -> None:
    whole = with_table(manifest_of(table_of()), table_of())
    assert [file.path for file in whole.files[:-1]] == GOOD["paths"].split("\n")
    assert [file.digests for file in whole.files[:-1]] == [(1, 2), (), (3,)]
    assert [(blob.item, blob.coordinate) for blob in whole.blobs] == [
        ("extra", None),
        ("extra", {"dp": 3, "tp": -1}),
    ]


def test_a_table_outside_the_index_or_without_files_is_refused() -> None:
    sample = sample_manifest()
    places = (0, 0, 3), (0, 5, 0), (-1, 5, 3), (4999, 2, 3), (1 << 62, 1 << 62, 3)
    for table in (*(TablePlace(*place, 1) for place in places), TablePlace(0, 5, 3, -1)):
        with pytest.raises(FormatError, match="table"):
            encode_manifest(replace(sample, files=(sample.index,), blobs=(), table=table))


def test_a_manifest_lists_all_files_or_only_the_index() -> None:
    sample = sample_manifest()
    table = TablePlace(0, 5, 3, 1)
    with pytest.raises(FormatError, match="beside the index"):
        encode_manifest(replace(sample, blobs=(), table=table))
    _, short = in_the_index(sample)
    data = encode_manifest(short)
    for old, new in ((b'["file_table"]', b"[]"), (b'"table":', b'"tables":')):
        with pytest.raises(FormatError, match="file_table"):
            decode_record(_signed(data.replace(old, new)))


def _signed(data: bytes) -> bytes:
    return signed(data[:-29])
