"""Checkpoint nouns of every shape, for the tests of the format, and comparisons of them."""

from __future__ import annotations

import argparse
import datetime
import enum
import pathlib
import struct
import types
from collections import Counter, OrderedDict, defaultdict, deque
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from msgspec.structs import replace

from reknit.format.checksum import block_digests, num_blocks
from reknit.format.file_table import encode_table, table_of
from reknit.format.index import encode_index
from reknit.format.index.parquet import with_section
from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE
from reknit.types.manifest import BlobFile, FileEntry, Index, Manifest, TablePlace, TensorEntry
from reknit.types.shard import Tagged, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
WRITE_ID = "0123456789abcdef0123456789abcdef"
names = st.text(max_size=12)
"""Any Unicode text but lone surrogates."""


class Colour(enum.Enum):
    RED = "r"
    BLUE = 2
    ROUGE = "r"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Outer:
    class Inner(enum.Enum):
        ONE = 1


Errors = type[Exception] | tuple[type[Exception], ...]


def taken(cases: Iterable[Any], reader: Callable[[Any], object], refusals: Errors) -> list[Any]:
    """Return the cases, or the names of them, that a reader takes without one of the refusals."""
    named: Iterable[tuple[Any, Any]] = (
        cases.items() if isinstance(cases, dict) else ((case, case) for case in cases)
    )
    found = []
    for name, case in named:
        try:
            reader(case)
        except refusals:
            continue
        found.append(name)
    return found


def index_of(rows: list[tuple[str, str, TensorSpec, Box, str, int]]) -> Index:
    """Build an index of rows (item, fqn, spec, box, file, start)."""
    rows = sorted(rows, key=lambda row: (row[0], row[1], row[3].offsets))
    tensors = sorted({(item, fqn): spec for item, fqn, spec, *_ in rows}.items())
    ids = {name: number for number, (name, _) in enumerate(tensors)}
    files = sorted({row[4] for row in rows})
    width = max((max(row[3].ndim, 1) for row in rows), default=1)

    def column(values: list[Any], *shape: int) -> Any:
        return np.array(values, dtype=np.int64).reshape(len(rows), *shape)

    return Index(
        tensors=tuple(TensorEntry(item, fqn, spec) for (item, fqn), spec in tensors),
        files=tuple(files),
        tensor=column([ids[row[0], row[1]] for row in rows]),
        offsets=column([row[3].offsets + (0,) * (width - row[3].ndim) for row in rows], width),
        lengths=column([row[3].lengths + (1,) * (width - row[3].ndim) for row in rows], width),
        file=column([files.index(row[4]) for row in rows]),
        start=column([row[5] for row in rows]),
        nbytes=column([row[3].numel * row[2].itemsize for row in rows]),
    )


def same_index(a: Index, b: Index) -> bool:
    columns = ("tensor", "offsets", "lengths", "file", "start", "nbytes")
    return (
        a.tensors == b.tensors
        and a.files == b.files
        and all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)
    )


@st.composite
def indexes(draw: st.DrawFn) -> Index:
    """An index whose tensors are cut into grids, with the chunks laid into a few files."""
    rows: list[tuple[str, str, TensorSpec, Box, str, int]] = []
    ends: dict[str, int] = {}
    files = draw(st.lists(st.sampled_from([f"model/{n:05d}.x.safetensors" for n in range(5)]), min_size=1))
    for item, fqn in draw(st.lists(st.tuples(names, names), unique=True, max_size=5)):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        spec = TensorSpec(shape, draw(st.sampled_from(sorted(ITEMSIZE))))
        for box in draw(grids(shape)):
            path = draw(st.sampled_from(files))
            start = -(-ends.get(path, 4096) // spec.itemsize) * spec.itemsize
            ends[path] = start + box.numel * spec.itemsize
            rows.append((item, fqn, spec, box, path, start))
    return index_of(rows)


def grids(shape: tuple[int, ...]) -> st.SearchStrategy[list[Box]]:
    """The boxes of a tensor cut along its first axis; an empty tensor stays whole."""
    if not prod(shape) or not shape:
        return st.just([Box.whole(shape)])
    cuts = st.sets(st.integers(1, max(shape[0] - 1, 1)), max_size=3) if shape[0] > 1 else st.just(set())
    return cuts.map(lambda inner: _cut(shape, sorted(inner)))


def _cut(shape: tuple[int, ...], inner: list[int]) -> list[Box]:
    edges = [0, *inner, shape[0]]
    zeros = (0,) * (len(shape) - 1)
    return [Box((a, *zeros), (b - a, *shape[1:])) for a, b in pairwise(edges)]


def sample_index() -> Index:
    """A small index with every shape of tensor."""
    model = "model/00000.01234567.safetensors"
    matrix = TensorSpec((6, 4), "bfloat16")
    return index_of(
        [
            ("model", "norm.weight", TensorSpec((4,), "float32"), Box((0,), (4,)), model, 4096),
            ("model", "layer.weight", matrix, Box((0, 0), (3, 4)), model, 4112),
            ("model", "layer.weight", matrix, Box((3, 0), (3, 4)), "model/00001.01234567.safetensors", 4096),
            ("optimizer", "step", TensorSpec((), "int64"), Box((), ()), "optimizer/x.safetensors", 4096),
            ("optimizer", "empty", TensorSpec((0, 3), "int8"), Box((0, 0), (0, 3)), model, 4096),
        ]
    )


def sample_manifest() -> Manifest:
    """A small manifest with every kind of member."""
    block = 4096
    files = {
        "index.01234567.parquet": b"i" * 5000,
        "model/00000.01234567.safetensors": b"m" * 8192,
        "extra/00000.01234567.msgpack": b"\x80",
        "extra/00000.own.01234567.msgpack": b"",
    }
    return Manifest(
        format_version=1,
        write_id=WRITE_ID,
        step=1000,
        created=1789000000.25,
        items=("extra", "model", "dätaloader/0"),
        index_path="index.01234567.parquet",
        files=tuple(
            FileEntry(path, len(data), tuple(block_digests(data, block))) for path, data in files.items()
        ),
        blobs=(
            BlobFile("extra", "extra/00000.01234567.msgpack", None),
            BlobFile("extra", "extra/00000.own.01234567.msgpack", {"dp": 1, "tp": 0}),
        ),
        block_nbytes=block,
        uses_pickle=True,
        origin={"world_size": 8, "torch": "2.13.0"},
        metadata={"loss": 1.5, "tags": ["a", None, True, {"x": -0.0}]},
        generation=1789000000123,
    )


def in_the_index(manifest: Manifest) -> tuple[bytes, Manifest]:
    """Return an index that lists the files of a manifest, and the manifest that leaves that to it."""
    table = table_of(manifest)
    data = encode_table(table, manifest)
    index, start = with_section(encode_index(sample_index()), data)
    own = FileEntry(manifest.index_path, len(index), tuple(block_digests(index, manifest.block_nbytes)))
    place = TablePlace(start, len(data), len(table.paths), int(table.nbytes.sum()))
    return index, replace(manifest, files=(own,), blobs=(), table=place)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_paths = st.lists(
    st.text("abc%._-09", min_size=1, max_size=8).filter(lambda p: p not in (".", "..")),
    min_size=1,
    max_size=3,
).map("/".join)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    paths = draw(
        st.lists(_paths, min_size=1, max_size=5, unique=True).filter(lambda p: "manifest.json" not in p)
    )
    items = tuple(draw(st.lists(names, unique=True, max_size=4)))
    block = draw(st.sampled_from([4096, 1 << 22]))
    sizes = [draw(st.integers(0, 5 * block)) for _ in paths]
    numbers = st.integers(0, (1 << 64) - 1)
    files = tuple(
        FileEntry(path, size, tuple(draw(numbers) for _ in range(num_blocks(size, block))))
        for path, size in zip(paths, sizes, strict=True)
    )
    places = st.none() | st.dictionaries(
        st.text(max_size=4), st.integers(-(1 << 63), (1 << 63) - 1), max_size=2
    )
    blobs = (
        tuple(BlobFile(draw(st.sampled_from(items)), path, draw(places)) for path in paths[1:])
        if items
        else ()
    )
    objects = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
    dropped = draw(
        st.dictionaries(names.filter(lambda name: name not in items), st.floats(0, 1e11), max_size=2)
    )
    return Manifest(
        format_version=1,
        write_id=draw(st.uuids()).hex,
        step=draw(st.none() | st.integers(0, (1 << 63) - 1)),
        created=draw(st.floats(0, 1e11)),
        items=items,
        index_path=paths[0],
        files=files,
        blobs=blobs,
        block_nbytes=block,
        uses_pickle=draw(st.booleans()),
        origin=draw(objects),
        metadata=draw(objects),
        generation=draw(st.none() | st.integers(0, (1 << 63) - 1)),
        saved_as=draw(st.uuids()).hex if dropped else None,
        dropped=dropped,
        moved_to=draw(st.sampled_from([None, "/cold/run", "s3://cold/run/step"])),
    )


nan_payloads = st.integers(1, (1 << 51) - 1).map(
    lambda bits: struct.unpack("<d", struct.pack("<Q", 0x7FF8 << 48 | bits))[0]
)
_zones = st.none() | st.timedeltas(
    min_value=datetime.timedelta(hours=-23), max_value=datetime.timedelta(hours=23)
).map(datetime.timezone)
_array_dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?", sizes=(64, 128)),
    hnp.datetime64_dtypes(endianness="<"),
    hnp.timedelta64_dtypes(endianness="<"),
    hnp.unicode_string_dtypes(min_len=1, max_len=4),
    hnp.byte_string_dtypes(min_len=1, max_len=4),
)
_ml = st.sampled_from([ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4])
arrays = hnp.arrays(_array_dtypes, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)) | st.builds(
    lambda values, kind: np.array(values).astype(kind), st.lists(st.integers(-8, 7), max_size=5), _ml
)
scalars = hnp.arrays(_array_dtypes, ()).map(lambda array: array[()]) | st.builds(
    lambda value, kind: kind(value), st.integers(-8, 7), _ml
)
_keys = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.sampled_from([*Colour, *Level, Outer.Inner.ONE])
    | st.datetimes(timezones=_zones)
    | st.fractions().map(float),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=4,
)
leaves = st.one_of(
    _keys,
    st.floats(),
    nan_payloads,
    st.integers(-(1 << 200), 1 << 200),
    st.complex_numbers(allow_nan=True),
    arrays,
    scalars,
    st.dates(),
    st.times(timezones=_zones),
    st.timedeltas(),
    st.binary(max_size=5).map(bytearray),
    st.sampled_from([pathlib.Path("/a/b"), pathlib.PurePosixPath("é/x"), pathlib.PureWindowsPath("C:\\x")]),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 5)),
    st.builds(slice, st.none() | st.integers(), st.integers(), st.none()),
    st.just(np.dtype("float32")),
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    texts = st.dictionaries(st.text(max_size=5), inner, max_size=3)
    anything = st.dictionaries(_keys, inner, max_size=3)
    lists = st.lists(inner, max_size=3)
    factories = st.sampled_from([None, list, dict, int, float, str, set])
    return st.one_of(
        lists,
        lists.map(tuple),
        texts,
        anything,
        anything.map(OrderedDict),
        st.builds(defaultdict, factories, anything),
        st.sets(_keys, max_size=4),
        st.lists(_keys, max_size=4).map(Counter),
        st.builds(deque, lists, st.none() | st.integers(3, 9)),
        texts.map(lambda members: argparse.Namespace(**members)),
        texts.map(lambda members: types.SimpleNamespace(**members)),
        st.builds(Tagged, st.text(max_size=5), inner),
    )


values = st.recursive(leaves, _containers, max_leaves=6)
"""Everything that the blob codec stores."""


def same(a: Any, b: Any) -> bool:
    """Return whether two values are of exactly one type and equal in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float) and not isinstance(a, np.generic):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex) and not isinstance(a, np.generic):
        return same([a.real, a.imag], [b.real, b.imag])
    if isinstance(a, (np.ndarray, np.generic)):
        if isinstance(a, str):
            return str.__str__(a) == str.__str__(b)
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, dict):
        if isinstance(a, defaultdict) and a.default_factory is not b.default_factory:
            return False
        return same([pair for pair in a.items()], [pair for pair in b.items()])
    if isinstance(a, (argparse.Namespace, types.SimpleNamespace)):
        return same(vars(a), vars(b))
    if isinstance(a, (datetime.datetime, datetime.time)):
        return bool(
            a == b and a.fold == b.fold and a.utcoffset() == b.utcoffset() and a.tzname() == b.tzname()
        )
    if isinstance(a, Tagged):
        return a.tag == b.tag and same(a.value, b.value)
    if isinstance(a, (set, frozenset)):
        return len(a) == len(b) and {type(x) for x in a} == {type(x) for x in b} and a == b
    if isinstance(a, slice):
        return same([a.start, a.stop, a.step], [b.start, b.stop, b.step])
    return bool(a == b)
