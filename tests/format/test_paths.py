from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reknit.errors import CorruptError, FormatError, StateError, UsageError
from reknit.format import paths
from reknit.format.paths import FileName
from reknit.types.box import Box
from reknit.types.shard import TensorSpec
from tests.format.samples import WRITE_ID, grids, names, taken


@given(names)
@example("")
@example(".")
@example("..")
@example(".hidden")
@example("manifest.json")
@example("index.01234567.parquet")
@example("Index.parquet")
@example("pending.0000000000000007.01234567")
@example("Pending.000000000000000F.01234567")
@example("a/b\\c\0%41")
def test_every_item_name_has_a_safe_folder_and_comes_back_from_it(name: str) -> None:
    folder = paths.escape_item(name)
    assert re.fullmatch(r"[A-Za-z0-9_.%-]+", folder)
    assert not folder.startswith(".")
    assert not folder.endswith(".")
    assert folder != paths.MANIFEST_PATH
    assert paths.parse_path(folder) is None
    assert paths.checked_relative(f"{folder}/x") == f"{folder}/x"
    assert paths.unescape_item(folder) == name


@given(names, names)
def test_two_item_names_never_share_a_folder(a: str, b: str) -> None:
    assert (paths.escape_item(a) == paths.escape_item(b)) == (a == b)


def test_a_folder_that_no_item_has_and_an_item_that_no_folder_can_have_are_refused() -> None:
    folders = "a%", "%2", "%2e", "%41", "%ff", "a b", ".x", "%FF", "", "manifest.json"
    assert taken(folders, paths.unescape_item, FormatError) == []
    assert taken(("\ud800", "ä" * 70, "x" * 5000), paths.escape_item, StateError) == []


@given(names, st.integers(0, 200_000), st.integers(0, 20))
def test_the_name_of_every_file_says_what_it_is(item: str, rank: int, part: int) -> None:
    parsed = paths.parse_path(paths.data_path(item, rank, WRITE_ID, part))
    assert parsed == FileName("data", "01234567", item, rank, part)
    blobs = paths.parse_path(paths.blob_path(item, rank, WRITE_ID))
    assert blobs == FileName("blobs", "01234567", item, rank, 0)
    own = paths.parse_path(paths.blob_path(item, rank, WRITE_ID, own=part))
    assert own == FileName("own", "01234567", item, rank, part)


def test_file_names_look_as_documented() -> None:
    assert paths.data_path("model", 7, WRITE_ID) == "model/00007.01234567.safetensors"
    assert paths.data_path("model", 7, WRITE_ID, 2) == "model/00007.2.01234567.safetensors"
    assert paths.blob_path("a/b", 123456, WRITE_ID) == "a%2Fb/123456.01234567.msgpack"
    assert paths.blob_path("", 7, WRITE_ID, own=0) == "%/00007.own.01234567.msgpack"
    assert paths.blob_path("extra", 7, WRITE_ID, own=3) == "extra/00007.own.3.01234567.msgpack"
    assert paths.index_path(WRITE_ID) == "index.01234567.parquet"
    assert paths.marker_path(0x19A, WRITE_ID) == "pending.000000000000019a.01234567"
    assert paths.parse_path(paths.index_path(WRITE_ID)) == FileName("index", "01234567")
    assert paths.parse_path("manifest.json") == FileName("manifest", None)


@given(st.integers(0, (1 << 63) - 1), st.uuids().map(lambda drawn: drawn.hex))
def test_the_marker_of_a_save_says_whose_it_is(generation: int, write_id: str) -> None:
    path = paths.marker_path(generation, write_id)
    assert paths.parse_path(path) == FileName("marker", write_id[:8], generation=generation)
    assert paths.checked_relative(path) == path


def test_a_generation_that_no_marker_can_hold_is_refused() -> None:
    for generation in (-1, 1 << 63):
        with pytest.raises(UsageError, match="generation"):
            paths.marker_path(generation, WRITE_ID)


def test_a_file_of_somebody_else_is_not_taken_for_ours() -> None:
    others = [
        *("model/0.01234567.safetensors", "model/00000.safetensors", "model/00000.0123456G.safetensors"),
        *("model/00000.0.01234567.safetensors", "model/00000.01.01234567.safetensors"),
        *("model/00000.own.0.01234567.msgpack", "model/012345.01234567.safetensors"),
        *("model/00000.01234567.safetensors\n", "a/model/00000.01234567.safetensors"),
        *("..%/00000.01234567.msgpack", "index.0123.parquet", "pending.7.01234567"),
        *("pending.0000000000000007", "pending.000000000000000F.01234567"),
        *("pending.0000000000000007.01234567.tmp", "model/pending.0000000000000007.01234567"),
        *("manifest.json.tmp", "notes.txt", ""),
    ]
    assert [path for path in others if paths.parse_path(path) is not None] == []


def test_write_ids_are_new_each_time_and_checked() -> None:
    assert paths.new_write_id() != paths.new_write_id()
    assert paths.short_id(paths.new_write_id()).isalnum()
    bad = "", "0123", "g" * 32, "A" * 32, "../" + "0" * 29, "0" * 33
    assert taken(bad, paths.short_id, UsageError) == []


def test_an_unsafe_path_is_refused() -> None:
    unsafe = [
        *("", "/", "/etc/passwd", "a//b", "a/", "./a", "a/.", "..", "a/../b", "a\\b", "a\0b", "C:x", "a\nb"),
        *("\ud800", "x" * 201, "/".join(["x" * 150] * 8)),
    ]
    assert taken(unsafe, paths.checked_relative, FormatError) == []


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(names, shapes, st.data())
@example("__metadata__", (2,), None)
@example("a[0:1]", (2,), None)
@example("a%5B", (), None)
def test_the_key_of_every_box_says_which_it_is(
    fqn: str, shape: tuple[int, ...], data: st.DataObject | None
) -> None:
    boxes = data.draw(grids(shape)) if data else [Box.whole(shape)]
    for box in boxes:
        key = paths.entry_key(fqn, TensorSpec(shape, "int8"), box)
        assert key != "__metadata__"
        assert paths.parse_entry_key(key) == (fqn, None if box == Box.whole(shape) else box)


@given(names, names)
def test_a_name_with_brackets_never_meets_a_part_of_another_tensor(a: str, b: str) -> None:
    spec = TensorSpec((8,), "int8")
    part = paths.entry_key(a, spec, Box((0,), (1,)))
    assert paths.entry_key(b, spec, Box((0,), (8,))) != part
    assert paths.entry_key(part, spec, Box((0,), (8,))) != part


def test_keys_look_as_documented() -> None:
    spec = TensorSpec((256, 512), "int8")
    assert paths.entry_key("w", spec, Box((0, 0), (256, 512))) == "w"
    assert paths.entry_key("w", spec, Box((0, 256), (128, 256))) == "w[0:128,256:512]"
    assert paths.entry_key("a[1]%\n\x85", spec, Box.whole((256, 512))) == "a%5B1%5D%25%0A%C2%85"
    assert paths.entry_key("__metadata__", spec, Box.whole((256, 512))) == "%5F_metadata__"


def test_a_key_that_no_writer_writes_is_refused() -> None:
    keys = [
        *("a[", "a[]", "a]", "a[0:1", "a[0:1]x", "a[1:0]", "a[01:2]", "a[0:-1]", "a[0:1,]"),
        *("a[0:9223372036854775808]", "%41", "%", "%FF", "%5b", "a\n", "__metadata__", "[[0:1]]"),
    ]
    assert taken(keys, paths.parse_entry_key, CorruptError) == []


def test_a_name_that_utf8_cannot_hold_is_refused() -> None:
    with pytest.raises(StateError, match="Unicode"):
        paths.entry_key("\udfff", TensorSpec((), "int8"), Box((), ()))
