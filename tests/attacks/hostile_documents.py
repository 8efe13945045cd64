"""Manifests, headers and blob files that lie, and extents that do not fit their files."""

from __future__ import annotations

import base64
import json
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash
from msgspec.msgpack import Ext
from msgspec.structs import replace

from reknit.format.manifest_file import encode_manifest
from reknit.types.manifest import FileEntry
from tests.format.samples import sample_manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HUGE = 1 << 62
FLOOD_NBYTES = 8 << 20


def signed(body: bytes) -> bytes:
    """Return a manifest of these bytes, all but the last member, with the digest that they should have."""
    return body + f',"digest":"{xxhash.xxh3_64_hexdigest(body)}"}}'.encode()


def manifests() -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of every hostile manifest; all of them carry a true digest where they can."""
    good = encode_manifest(sample_manifest())
    yield "empty", b""
    yield "null", b"null"
    yield "digest_of_other_bytes", good.replace(b'"step":1000', b'"step":1001')
    yield "digest_not_last", good[:-1] + b',"x":1}'
    yield "digest_in_capitals", good[:-18] + good[-18:-2].upper() + good[-2:]
    yield "space_after_the_digest", good + b"\n"
    yield "nested_a_million_deep", signed(b'{"metadata":' + b"[" * 1_000_000)
    yield "nested_objects", signed(b'{"metadata":' + b'{"a":' * 1_000_000)
    yield (
        "nested_just_too_deep",
        signed(good[:-29].replace(b'"tags":', b'"tags":' + b"[" * 31 + b"]" * 31 + b',"t":')),
    )
    yield "key_twice", signed(good[:-29] + b',"step":7')
    yield "key_twice_in_metadata", signed(good[:-29].replace(b'"loss":1.5', b'"loss":1.5,"l\\u006fss":2.5'))
    yield "not_utf8", signed(good[:-29].replace(b'"model"', b'"m\xffdel"'))
    yield "lone_surrogate", signed(good[:-29].replace(b'"model"', b'"m\\ud800del"'))
    yield "trailing_document", signed(good[:-29] + b"}{")
    yield "huge_number", signed(good[:-29].replace(b'"step":1000', b'"step":' + b"9" * 1_000_000))
    yield "infinite_number", signed(good[:-29].replace(b'"loss":1.5', b'"loss":1e999'))
    yield "not_a_number", signed(good[:-29].replace(b'"loss":1.5', b'"loss":NaN'))
    for name, part in _FLOODS.items():
        flood = b",".join([part] * (FLOOD_NBYTES // (len(part) + 1)))
        yield f"flood_of_{name}", signed(good[:-29].replace(b'"tags":', b'"x":[%b],"tags":' % flood))
        yield f"flood_of_unread_{name}", signed(good[:-29] + b',"x":[%b]' % flood)
    keys = b",".join(b'"%x":0' % k for k in range(FLOOD_NBYTES // 9))
    yield "flood_of_keys", signed(good[:-29].replace(b'"tags":', b'%b,"tags":' % keys))
    yield "flood_of_unread_keys", signed(good[:-29] + b',"x":{%b}' % keys)
    blob = b'"blobs":[{"item":"extra","path":"x","coordinate":{%b}},' % keys
    yield "flood_of_coordinates", signed(good[:-29].replace(b'"blobs":[', blob))
    items = b",".join(b'"%x"' % k for k in range(FLOOD_NBYTES // 8))
    yield "flood_of_items", signed(good[:-29].replace(b'"items":[', b'"items":[%b,' % items))
    yield from changed_manifests()


def changed_manifests() -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of every manifest of which one member is hostile."""
    good = encode_manifest(sample_manifest())
    for name, change in _MEMBERS.items():
        document = json.loads(good)
        del document["digest"]
        change(document)
        yield name, signed(json.dumps(document).encode()[:-1])


_FLOODS = {
    **{"numbers": b"0", "lists": b"[]", "objects": b"{}", "pairs": b'{"":0}', "texts": b'"ab"'},
    **{"nests": b"[[[[[[]]]]]]"},
}


def _set(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document[name] = value

    return change


def _drop(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.pop(name)


def _file(**members: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["files"].append({"path": "x", "nbytes": 0, "digests": "", **members})


_PATHS = {
    "absolute": "/etc/passwd",
    "of_a_drive": "C:/x",
    "up": "../x",
    "up_in_the_middle": "a/../../x",
    "with_nul": "a\0b",
    "with_backslash": "..\\x",
    "empty": "",
    "dot": ".",
    "with_an_empty_part": "a//b",
    "ending_in_a_slash": "a/",
    "with_a_newline": "a\nb",
    "without_end": "a/" * 100_000 + "b",
    "of_a_url": "file:///etc/passwd",
}
_ONE_DIGEST = base64.b64encode(bytes(8)).decode()
_MEMBERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "other_format": _set("format", "tensorstore"),
    "version_zero": _set("format_version", 0),
    "version_of_the_future": _set("format_version", 2),
    "version_as_text": _set("format_version", "1"),
    "version_true": _set("format_version", True),
    "version_huge": _set("format_version", 1 << 80),
    "unknown_feature": _set("requires", ["teleport"]),
    "requires_nothing_at_all": _drop("requires"),
    "no_items": _drop("items"),
    "no_files": _drop("files"),
    "write_id_is_a_path": _set("write_id", "../../../../../../etc/cron.d/abc"),
    "write_id_with_a_newline": _set("write_id", "0" * 32 + "\n"),
    "generation_negative": _set("generation", -1),
    "generation_null": _set("generation", None),
    "generation_as_text": _set("generation", "7"),
    "generation_larger_than_63_bits": _set("generation", 1 << 63),
    "step_negative": _set("step", -1),
    "step_half": _set("step", 1.5),
    "block_of_one": _set("block_nbytes", 1),
    "block_of_zero": _set("block_nbytes", 0),
    "block_of_everything": _set("block_nbytes", 1 << 62),
    "item_twice": _set("items", ["extra", "extra"]),
    "items_as_text": _set("items", "extra"),
    "item_without_end": _set("items", ["extra", "x" * 100_000]),
    "index_elsewhere": _set("index", "../index.parquet"),
    "index_not_listed": _set("index", "index.fedcba98.parquet"),
    "metadata_a_list": _set("metadata", []),
    "file_twice": lambda document: document["files"].append(document["files"][0]),
    "file_is_the_manifest": _file(path="manifest.json"),
    "file_with_too_few_digests": _file(nbytes=4097, digests=_ONE_DIGEST),
    "file_with_too_many_digests": _file(nbytes=0, digests=_ONE_DIGEST),
    "file_with_half_a_digest": _file(nbytes=1, digests="AAAA"),
    "file_with_digests_that_are_no_base64": _file(nbytes=1, digests="!" + _ONE_DIGEST[1:]),
    "file_with_loose_base64": _file(nbytes=1, digests=_ONE_DIGEST.replace("AA=", "AB=")),
    "file_of_exabytes": _file(nbytes=HUGE),
    "file_larger_than_64_bits": _file(nbytes=1 << 64),
    "file_negative": _file(nbytes=-1),
    "blob_not_listed": _set("blobs", [{"item": "extra", "path": "extra/x", "coordinate": None}]),
    "blob_of_no_item": lambda document: document["blobs"][0].update(item="nothing"),
    "blob_is_the_index": lambda document: document["blobs"][0].update(path="index.01234567.parquet"),
    "blob_twice": lambda document: document["blobs"].append(document["blobs"][0]),
    "coordinate_not_whole": lambda document: document["blobs"][1].update(coordinate={"dp": 0.5}),
    "coordinate_huge": lambda document: document["blobs"][1].update(coordinate={"dp": 1 << 64}),
    **{f"path_{name}": _file(path=path) for name, path in _PATHS.items()},
}


def headers() -> Iterator[tuple[str, tuple[bytes, int]]]:
    """Yield name, first bytes and file size of every hostile data file."""
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    yield "empty", (b"", 0)
    yield "shorter_than_its_length", (b"\0\0\0", 3)
    yield "header_of_nothing", (bytes(8), 8)
    yield "header_beyond_the_file", (struct.pack("<Q", 1000) + b"{}", 10)
    yield "header_of_exabytes", (struct.pack("<Q", 2**64 - 1) + b"{}", 10)
    yield "header_of_a_gigabyte", (struct.pack("<Q", 1 << 30) + b"{}", 1 << 40)
    yield "header_cut_short", (struct.pack("<Q", 1000) + b"{}", 5000)
    yield "nested_a_million_deep", header_of(b'{"a":' * 1_000_000, 0)
    yield "key_twice", header_of(b'{"a":%b,"a":%b}' % ((json.dumps(entry).encode(),) * 2), 4)
    yield "metadata_twice", header_of(b'{"__metadata__":{},"__metadata__":{"a":"b"}}', 0)
    yield "not_utf8", header_of(b'{"\xff":1}', 0)
    yield "a_list", header_of(b"[]", 0)
    yield "metadata_not_text", header_of({"__metadata__": {"a": 1}}, 0)
    yield "metadata_a_list", header_of({"__metadata__": []}, 0)
    yield "entry_not_an_object", header_of({"a": 5}, 0)
    yield "file_longer_than_described", header_of({"a": entry}, 5)
    yield "file_shorter_than_described", header_of({"a": entry}, 3)
    yield "bytes_unused_at_the_front", header_of({"a": {**entry, "data_offsets": [1, 5]}}, 5)
    yield "overlap", header_of({"a": entry, "b": {**entry, "data_offsets": [2, 6]}}, 6)
    three = {"a": entry, "b": {**entry, "data_offsets": [2, 6]}, "c": {**entry, "data_offsets": [8, 12]}}
    yield "overlap_and_hole_that_cancel", header_of(three, 12)
    yield "same_extent_twice", header_of({"a": entry, "b": entry}, 4)
    yield "hole", header_of({"a": entry, "b": {**entry, "data_offsets": [5, 9]}}, 9)
    changes: dict[str, dict[str, Any]] = {
        "dtype_unknown": {"dtype": "F4"},
        "dtype_a_number": {"dtype": 5},
        "size_does_not_fit_the_shape": {"shape": [5]},
        "shape_negative": {"shape": [-2, -2]},
        "shape_overflows": {"shape": [1 << 63, 2]},
        "shape_overflows_to_the_right_size": {"shape": [(1 << 62) + 1, 4]},
        "zero_hides_overflow": {"shape": [0, 1 << 62, 1 << 62], "data_offsets": [0, 0]},
        "shape_not_whole": {"shape": [4.0]},
        "shape_a_number": {"shape": 4},
        "too_many_dimensions": {"shape": [4] + [1] * 32},
        "millions_of_dimensions": {"shape": [1] * 1_000_000},
        "offsets_backwards": {"data_offsets": [4, 0]},
        "offsets_huge": {"data_offsets": [0, 1 << 64]},
        "offsets_three": {"data_offsets": [0, 4, 8]},
        "member_unknown": {"offset": 0},
    }
    for name, change in changes.items():
        yield name, header_of({"a": {**entry, **change}}, 4)
    foreign: dict[str, Any] = {
        "__metadata__": {"reknit.dtypes": '{"a":"complex64"}'},
        "a": {**entry, "shape": [0, 4]},
    }
    yield "foreign_dtype_of_other_size", header_of({**foreign, "a": {**entry, "data_offsets": [0, 4]}}, 4)
    yield (
        "dtypes_of_absent_keys",
        header_of({"__metadata__": {"reknit.dtypes": '{"b":"complex64"}'}, "a": entry}, 4),
    )


def header_of(document: Any, data_nbytes: int) -> tuple[bytes, int]:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + data_nbytes


def blobs() -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of every hostile file of blobs."""
    yield "empty", b""
    yield "a_list", b"\x90"
    yield "arrays_a_million_deep", b"\x81\xa1x" + b"\x91" * 1_000_000 + b"\xc0"
    yield "maps_a_million_deep", b"\x81\xa1x" * 1_000_000 + b"\xc0"
    yield "extensions_ten_thousand_deep", b"\x81\xa1x" + _nested_extensions(10_000)
    yield "list_of_billions", b"\x81\xa1x\xdd\xff\xff\xff\xff"
    yield "map_of_billions", b"\x81\xa1x\xdf\xff\xff\xff\xff"
    yield "text_of_gigabytes", b"\x81\xa1x\xdb\xff\xff\xff\xff"
    yield "bytes_of_gigabytes", b"\x81\xa1x\xc6\xff\xff\xff\xff"
    yield "extension_of_gigabytes", b"\x81\xa1x\xc9\xff\xff\xff\xff\x01"
    yield "names_of_billions", b"\xdf\xff\xff\xff\xff"
    yield "name_twice", b"\x82\xa1x\xc0\xa1x\xc0"
    yield "name_a_number", b"\x81\x01\xc0"
    yield "reserved_byte", b"\x81\xa1x\xc1"
    yield "text_not_utf8", b"\x81\xa1x\xa1\xff"
    yield "timestamp_extension", b"\x81\xa1x\xd6\xff\0\0\0\0"
    for name, part in _VALUE_FLOODS.items():
        count = (2 << 20) // len(part)
        yield f"flood_of_{name}", b"\x81\xa1x\xdd" + struct.pack(">I", count) + part * count
    for name, (code, payload) in _EXTENSIONS.items():
        yield name, msgspec.msgpack.encode({"x": Ext(code, msgspec.msgpack.encode(payload))})
    keys = [n * ((1 << 61) - 1) for n in range(9, 60_000)]
    raw = [n.to_bytes(n.bit_length() // 8 + 1, "big") for n in keys]
    members = [Ext(5, msgspec.msgpack.encode(one)) for one in raw]
    yield "keys_that_collide", msgspec.msgpack.encode({"x": Ext(2, msgspec.msgpack.encode(members))})
    pairs = [member for one in members for member in (one, None)]
    yield "table_keys_that_collide", msgspec.msgpack.encode({"x": Ext(4, msgspec.msgpack.encode(pairs))})


_VALUE_FLOODS = {
    **{"lists": b"\x90", "maps": b"\x80", "small_maps": b"\x81\xa0\xc0", "texts": b"\xa0"},
    **{"nests": b"\x91" * 20 + b"\xc0", "tuples": b"\xd5\x01\x91\x90", "sets": b"\xd4\x02\x90"},
    **{"deques": b"\xd5\x13\x91\xc0", "ordered": b"\xd4\x10\x90"},
}
_EXTENSIONS: dict[str, tuple[int, Any]] = {
    "pickle": (127, b"cos\nsystem\n(S'echo harm'\ntR."),
    "unknown_extension": (100, None),
    "array_of_terabytes": (7, ["<f8", [1 << 40], b""]),
    "array_of_overflowing_shape": (7, ["<f8", [1 << 32, 1 << 32], b""]),
    "array_whose_zero_hides_overflow": (7, ["<f8", [0, 1 << 62], b""]),
    "array_of_negative_shape": (7, ["<f8", [-1, -1], bytes(8)]),
    "array_of_objects": (7, ["|O", [1], bytes(8)]),
    "array_of_a_structure": (7, ["<i4,<i4", [1], bytes(8)]),
    "array_of_huge_text": (7, ["<U999999999", [1], bytes(4)]),
    "array_of_a_hundred_dimensions": (7, ["|i1", [1] * 100, b"\0"]),
    "bool_that_is_two": (7, ["|b1", [1], b"\x02"]),
    "text_beyond_unicode": (7, ["<U1", [1], b"\xff\xff\xff\xff"]),
    "int_of_two_megabytes": (5, b"\x01" + bytes(2 << 20)),
    "int_with_a_longer_form": (5, bytes(20)),
    "range_of_step_zero": (22, [0, 1, 0]),
    "deque_longer_than_itself": (19, [1, 1, 2]),
    "deque_of_negative_length": (19, [-1]),
    "date_of_year_zero": (11, [0, 1, 1]),
    "time_zone_of_a_year": (12, [0, 0, 0, 0, 0, [1 << 50, None]]),
    "duration_of_an_eternity": (13, [1 << 62, 0, 0]),
    "factory_that_is_code": (17, ["os.system"]),
    "key_that_cannot_be_one": (4, [[], 1]),
    "table_without_a_value": (16, ["a"]),
    "table_with_a_key_twice": (4, [1, "a", True, "b"]),
    "set_with_a_member_twice": (2, [1, 1.0]),
    "attribute_without_a_name": (20, [1, 1]),
    "enum_without_a_name": (15, ["os", None, "x"]),
}


def _nested_extensions(levels: int) -> bytes:
    # written from the inside out would be quadratic; lengths are all that counts
    heads = []
    rest = 1
    for _ in range(levels):
        heads.append(b"\xc9" + struct.pack(">I", rest + 1) + b"\x01\x91")
        rest += 7
    return b"".join(reversed(heads)) + b"\xc0"


def extents() -> Iterator[tuple[str, dict[str, int]]]:
    """Yield name and file sizes with which the good index does not agree."""
    sizes = {entry.path: 1 << 20 for entry in _files()}
    first = min(sizes)
    yield "file_missing", {path: size for path, size in sizes.items() if path != first}
    yield "file_too_short", {**sizes, first: 4097}
    yield "file_empty", {**sizes, first: 0}


def _files() -> tuple[FileEntry, ...]:
    names = (
        "model/00000.01234567.safetensors",
        "model/00001.01234567.safetensors",
        "optimizer/x.safetensors",
    )
    return tuple(replace(FileEntry("", 0, ()), path=name) for name in names)
