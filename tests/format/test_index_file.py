from __future__ import annotations

import contextlib
import io
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from reknit.errors import CorruptError, FormatError
from reknit.format import index as index_file
from reknit.format.index import arrow_file, decode_index, encode_index, parquet, plain_file
from reknit.format.index import checks as index_checks
from reknit.format.index.checks import check_extents
from reknit.format.paths import MAX_NAME_NBYTES
from reknit.types.box import Box
from reknit.types.manifest import Index
from reknit.types.shard import MAX_NDIM, TensorSpec
from tests.format.samples import index_of, indexes, same_index, sample_index, taken
from tests.running.examples import examples

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.format.index.columns import RowColumns
    from reknit.types.manifest import TensorEntry


@given(indexes())
def test_an_index_comes_back_as_it_was(index: Index) -> None:
    assert same_index(decode_index(encode_index(index)), index)
    assert same_index(decode_index(arrow_file.write_with_arrow(index)), index)


@given(indexes())
def test_a_small_index_is_written_without_arrow_which_reads_it(index: Index) -> None:
    data = plain_file.write_plain(index)
    assert data is not None
    assert same_index(checked(plain_file.read_plain(data)), index)
    work = parquet.check_parquet(data, num_columns=9, num_nodes=16)
    assert same_index(arrow_file.read_with_arrow(data, work).to_index(), index)


def checked(columns: RowColumns | None) -> Index:
    assert columns is not None
    return columns.to_index()


def test_an_index_of_many_rows_or_long_names_is_compressed() -> None:
    spec = TensorSpec((1,), "int8")
    for number, length, plain in (
        (plain_file.MAX_ROWS, 1, True),
        (plain_file.MAX_ROWS + 1, 1, False),
        (300, 1000, False),
    ):
        rows = [("m", f"{i:0{length}}", spec, Box.whole((1,)), "f", i) for i in range(number)]
        index = index_of(sorted(rows))
        data = encode_index(index)
        assert (plain_file.read_plain(data) is not None) == plain
        assert same_index(decode_index(data), index)


def test_scalars_and_matrices_mix_in_a_small_index() -> None:
    shapes: list[tuple[int, ...]] = [(), (0, 4), (2, 3), (), (5,), (1, 1, 1)]
    rows = [
        ("m", f"t{i}", TensorSpec(shape, "int8"), Box.whole(shape), "f", 8 * i)
        for i, shape in enumerate(shapes)
    ]
    data = encode_index(index_of(rows))
    assert same_index(checked(plain_file.read_plain(data)), index_of(rows))
    assert [row["shape"] for row in pq.ParquetFile(io.BytesIO(data)).read().to_pylist()] == list(
        map(list, shapes)
    )


def test_an_index_is_read_without_functions_of_arrow_which_end_the_process_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = arrow_file.write_with_arrow(sample_index())
    for name in ("pyarrow.compute", "pyarrow._compute"):
        monkeypatch.setitem(sys.modules, name, None)
    assert same_index(decode_index(data), sample_index())


def test_memory_is_asked_for_by_the_names_and_numbers_that_an_index_unfolds_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(arrow_file, "require_memory", asked.append)
    for number, length, ndim in ((1000, 900, 1), (20_000, 20, 8)):
        spec, box = TensorSpec((1,) * ndim, "int8"), Box((0,) * ndim, (1,) * ndim)
        rows = [("m", f"{i:0{length}}", spec, box, "m/00000.01234567.safetensors", i) for i in range(number)]
        asked.clear()
        decode_index(encode_index(index_of(rows)))
        assert asked[0] >= 10 * number * length + 8 * 3 * number * ndim


def test_an_index_without_tensors_and_files_in_any_order_come_back() -> None:
    assert same_index(decode_index(encode_index(index_of([]))), index_of([]))
    index = sample_index()
    last = len(index.files) - 1
    turned = replace(index, files=index.files[::-1], file=last - index.file)
    assert same_index(decode_index(encode_index(turned)), index)


def many_chunks(num_tensors: int, per_tensor: int) -> Index:
    spec = TensorSpec((per_tensor * 2, 8), "bfloat16")
    count = num_tensors * per_tensor
    tensor = np.repeat(np.arange(num_tensors), per_tensor)
    part = np.tile(np.arange(per_tensor), num_tensors)
    one = index_of([("model", "x", spec, Box.whole(spec.shape), "f", 0)]).tensors[0]
    return Index(
        tensors=tuple(one._replace(fqn=f"layers.{n:06d}.weight") for n in range(num_tensors)),
        files=tuple(f"model/{n:05d}.safetensors" for n in range(per_tensor)),
        tensor=tensor,
        offsets=np.stack([part * 2, np.zeros(count, np.int64)], axis=1),
        lengths=np.tile(np.array([2, 8], np.int64), (count, 1)),
        file=part,
        start=4096 + tensor * 32,
        nbytes=np.full(count, 32, np.int64),
    )


@pytest.mark.parametrize(("num_tensors", "per_tensor"), [(3000, 64), (132_000, 1), (2, 95_000)])
def test_an_index_of_many_row_groups_comes_back_within_its_own_limits(
    num_tensors: int, per_tensor: int
) -> None:
    index = many_chunks(num_tensors, per_tensor)
    assert len(index.tensor) > 2 * arrow_file.GROUP_ROWS
    assert same_index(decode_index(encode_index(index)), index)


def test_the_largest_index_that_is_not_looked_at_again_is_within_the_limits_of_readers() -> None:
    spec = TensorSpec((2,) * MAX_NDIM, "float64")
    item, long = "i" * MAX_NAME_NBYTES, "n" * (MAX_NAME_NBYTES - 4)
    index = index_of(
        [
            (item, f"{long}{n:04d}", spec, Box.whole(spec.shape), f"{n:05d}", 0)
            for n in range(index_file.UNCHECKED_ROWS)
        ]
    )
    assert same_index(decode_index(encode_index(index)), index)


def ranges(data: bytes, column: str) -> list[Any]:
    """Return the first and the last value of a column in the footer, for each row group."""
    footer = pq.ParquetFile(io.BytesIO(data)).metadata
    number = footer.schema.names.index(column)
    found = [footer.row_group(k).column(number).statistics for k in range(footer.num_row_groups)]
    return [None if one is None or not one.has_min_max else (one.min, one.max) for one in found]


def test_each_row_group_says_which_tensors_it_has() -> None:
    index = many_chunks(3000, 64)
    tensors = [
        index.tensors[number]
        for first in row_groups(index)
        for number in index.tensor[[first.start, first.stop - 1]]
    ]
    data = encode_index(index)
    assert ranges(data, "item") == [("model", "model")] * 3
    assert ranges(data, "fqn") == [(a.fqn, b.fqn) for a, b in zip(tensors[::2], tensors[1::2], strict=True)]


def row_groups(index: Index) -> list[range]:
    rows = range(len(index.tensor))
    return [
        rows[first : first + arrow_file.GROUP_ROWS] for first in range(0, len(rows), arrow_file.GROUP_ROWS)
    ]


def test_names_too_long_to_be_repeated_in_the_footer_are_left_out_of_it() -> None:
    index = many_chunks(3000, 64)
    entries = [entry._replace(fqn="a" * 4000 + entry.fqn) for entry in index.tensors]
    long = replace(index, tensors=tuple(entries))
    groups = 1 + (len(index.tensor) - 1) // arrow_file.GROUP_ROWS
    assert None not in ranges(encode_index(long), "item"), "three groups can afford it"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_file, "_STATISTICS_NBYTES", groups * 4 * 4000)
        data = encode_index(long)
    assert set(ranges(data, "fqn")) == {None}
    assert same_index(decode_index(data), long)


def test_duckdb_reads_only_the_row_groups_of_the_tensor_that_is_asked_for(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed")
    path = tmp_path / "index.parquet"
    path.write_bytes(encode_index(many_chunks(3000, 64)))
    with duckdb.connect() as connection:
        query = f"select count(*), min(start) from '{path}' where fqn = 'layers.002999.weight'"
        assert connection.execute(query).fetchall() == [(64, 4096 + 2999 * 32)]
        stored = f"select count(*) from parquet_metadata('{path}') where path_in_schema = 'fqn'"
        hit = f"{stored} and stats_max_value >= 'layers.002999.weight'"
        assert connection.execute(stored).fetchall() == [(3,)]
        assert connection.execute(hit).fetchall() == [(1,)]


def in_dimensions(index: Index, ndim: int) -> Index:
    """Return an index of tensors with more dimensions, all of length one."""
    more = ndim - 2
    specs = [entry.spec for entry in index.tensors]
    wider = [TensorSpec((*spec.shape, *[1] * more), spec.dtype) for spec in specs]
    entries = zip(index.tensors, wider, strict=True)
    return replace(
        index,
        tensors=tuple(entry._replace(spec=spec) for entry, spec in entries),
        offsets=np.pad(index.offsets, ((0, 0), (0, more))),
        lengths=np.pad(index.lengths, ((0, 0), (0, more)), constant_values=1),
    )


@pytest.mark.parametrize(
    ("num_tensors", "per_tensor", "ndim"), [(2500, 64, 2), (1250, 128, 6), (625, 256, 32)]
)
def test_an_index_that_repeats_itself_stays_far_from_the_limits_of_its_readers(
    num_tensors: int, per_tensor: int, ndim: int
) -> None:
    index = in_dimensions(many_chunks(num_tensors, per_tensor), ndim)
    data = encode_index(index)
    assert same_index(decode_index(data), index)
    footer = pq.ParquetFile(io.BytesIO(data)).metadata
    columns = [footer.row_group(g).column(c) for g in range(footer.num_row_groups) for c in range(9)]
    assert footer.num_rows < 0.75 * parquet.ROWS_PER_BYTE * len(data)
    assert sum(c.num_values for c in columns) < 0.75 * parquet.VALUES_PER_BYTE * len(data)
    assert sum(c.total_uncompressed_size for c in columns) < 0.75 * parquet.NBYTES_PER_BYTE * len(data)


def test_duckdb_and_pandas_read_the_index() -> None:
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed")
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    data = encode_index(sample_index())
    frame = pd.read_parquet(io.BytesIO(data))
    assert list(frame.columns) == [
        *("item", "fqn", "dtype", "shape", "offsets", "lengths", "file", "start", "nbytes")
    ]
    with duckdb.connect() as connection:
        connection.register("chunks", frame)
        query = "select file, lengths from chunks where fqn = 'layer.weight' order by offsets"
        found = connection.execute(query).fetchall()
    assert found == [
        ("model/00000.01234567.safetensors", [3, 4]),
        ("model/00001.01234567.safetensors", [3, 4]),
    ]


def set_column(index: Index, name: str, row: int, value: Any) -> Index:
    column = getattr(index, name).copy()
    column[row] = value
    return replace(index, **{name: column})


def without(index: Index, tensor: int) -> Index:
    """Return the index without the chunks of a tensor."""
    columns = ("tensor", "offsets", "lengths", "file", "start", "nbytes")
    return replace(index, **{name: getattr(index, name)[index.tensor != tensor] for name in columns})


def broken() -> dict[str, tuple[Index, str]]:
    """Indexes that break one rule each, and the text that the refusal must have."""
    good = sample_index()
    layer, norm, empty, step = (next(i for i, t in enumerate(good.tensors) if t.fqn == n) for n in NAMED)
    row = {number: int(good.first[number]) for number in (layer, norm, empty, step)}
    tensors = list(good.tensors)

    chunkless = set_column(good, "lengths", row[layer], [0, 4])

    def spec(number: int, *change: Any) -> Index:
        changed = [*tensors]
        changed[number] = changed[number]._replace(spec=TensorSpec(*change))
        return replace(good, tensors=tuple(changed))

    def last(name: str, *before: TensorEntry) -> Index:
        return replace(good, tensors=(*tensors[:-1], *before, tensors[-1]._replace(fqn=name)))

    return {
        "offset negative": (set_column(good, "offsets", row[layer], [-1, 0]), "layer.weight"),
        "length negative": (set_column(good, "lengths", row[layer], [-3, -4]), "layer.weight"),
        "box outside shape": (set_column(good, "offsets", row[layer] + 1, [4, 0]), "layer.weight"),
        "offset overflows": (set_column(good, "offsets", row[layer] + 1, [2**63 - 1, 0]), "layer.weight"),
        "nbytes wrong": (set_column(good, "nbytes", row[norm], 15), "norm.weight"),
        "start negative": (set_column(good, "start", row[norm], -4), "norm.weight"),
        "start unaligned": (set_column(good, "start", row[norm], 4097), "norm.weight"),
        "end overflows": (set_column(good, "start", row[norm], 2**63 - 8), "norm.weight"),
        "chunk twice": (set_column(good, "offsets", row[layer] + 1, [0, 0]), "layer.weight"),
        "chunks unsorted": (replace(good, offsets=_swapped(good.offsets, row[layer])), "layer.weight"),
        "empty chunk": (set_column(chunkless, "nbytes", row[layer], 0), "layer.weight"),
        "dtype unknown": (spec(norm, (4,), "float33"), "norm.weight"),
        "shape negative": (spec(norm, (-4,), "float32"), "norm.weight"),
        "shape overflows": (spec(norm, (2**62,), "float32"), "norm.weight"),
        "zero hides overflow": (spec(empty, (0, 2**62, 2), "int16"), "empty"),
        "too many dimensions": (spec(norm, (1,) * 33, "float32"), "33"),
        "more dimensions": (spec(norm, (1, 1, 4), "float32"), "norm.weight"),
        "tensors unsorted": (replace(good, tensors=tuple(tensors[::-1])), "out of order"),
        "tensor twice": (replace(good, tensors=(*tensors[:1], *tensors[:-1])), "twice"),
        "tensor without chunk": (last("z", tensors[-1]), "has none"),
        "tensor between others without chunk": (without(good, norm), "has none"),
        "ungrouped": (replace(good, tensor=good.tensor[::-1].copy()), "grouped"),
        "file unknown": (set_column(good, "file", 0, 9), "without a name"),
        "file behind the last": (set_column(good, "file", 0, len(good.files)), "without a name"),
        "file negative": (set_column(good, "file", 0, -1), "without a name"),
        "file unsafe": (replace(good, files=("../x", *good.files[1:])), "unsafe path"),
        "file twice": (replace(good, files=(good.files[0],) * 3), "twice"),
        "columns differ": (replace(good, start=good.start[:-1]), "length"),
        "name too long": (last("z" * 5000), "longer"),
        "name no Unicode": (last("\ud800"), "Unicode"),
    }


NAMED = ("layer.weight", "norm.weight", "empty", "step")


def _swapped(column: Any, row: int) -> Any:
    column = column.copy()
    column[[row, row + 1]] = column[[row + 1, row]]
    return column


def test_an_index_that_breaks_a_rule_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for case, (index, says) in broken().items():
        with pytest.raises(FormatError, match=says):
            encode_index(index)
        if case in CANNOT_BE_WRITTEN:
            continue
        with monkeypatch.context() as patch:
            patch.setattr(index_file, "check_index", lambda index: None)
            data = encode_index(index)
        with pytest.raises(FormatError, match=None if case in SAYS_OTHERWISE else says):
            decode_index(data)


# The file has no field for these mistakes, or they look like others.
CANNOT_BE_WRITTEN = {
    *("too many dimensions", "more dimensions", "zero hides overflow", "tensor without chunk", "ungrouped"),
    *("tensor twice", "file unknown", "file negative", "file twice", "columns differ", "name no Unicode"),
    *("file behind the last", "tensor between others without chunk"),
}
SAYS_OTHERWISE = {"tensors unsorted", "shape negative"}


def test_rows_of_one_name_with_different_dtypes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ("m", name, TensorSpec((4,), dtype), Box((start,), (2,)), "f", 8 + start)
        for name, dtype, start in (("a", "int8", 0), ("b", "uint8", 2))
    ]
    index = index_of(rows)
    index = replace(index, tensors=(index.tensors[0], index.tensors[1]._replace(fqn="a")))
    monkeypatch.setattr(index_file, "check_index", lambda index: None)
    data = encode_index(index)
    monkeypatch.undo()
    with pytest.raises(CorruptError, match="differ in shape or dtype"):
        decode_index(data)


def test_every_row_is_looked_at_however_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_checks, "_BLOCK_ROWS", 2)
    index = sample_index()
    for row in range(len(index.tensor)):
        nbytes = index.nbytes.copy()
        nbytes[row] += 1
        with pytest.raises(CorruptError, match=rf"do not fit its box \(row {row}\)"):
            index_checks.check_index(replace(index, nbytes=nbytes))


def test_extents_are_compared_with_the_files() -> None:
    index = sample_index()
    sizes = dict.fromkeys(index.files, 8192)
    check_extents(index, sizes)
    check_extents(index_of([]), {})
    with pytest.raises(CorruptError, match="not a file of the checkpoint"):
        check_extents(index, {path: 8192 for path in index.files[1:]})
    ends = int((index.start + index.nbytes)[index.file == 0].max())
    check_extents(index, {**sizes, index.files[0]: ends})
    with pytest.raises(CorruptError, match="outside its file"):
        check_extents(index, {**sizes, index.files[0]: ends - 1})


def test_overlapping_extents_are_refused_unless_equal() -> None:
    spec = TensorSpec((4,), "int8")
    box = Box((0,), (4,))
    tied = index_of(
        [("m", "a", spec, box, "f", 8), ("m", "b", spec, box, "f", 8), ("m", "c", spec, box, "f", 12)]
    )
    check_extents(tied, {"f": 100})
    overlapping = index_of([("m", "a", spec, box, "f", 8), ("m", "b", spec, box, "f", 11)])
    with pytest.raises(CorruptError, match="overlaps"):
        check_extents(overlapping, {"f": 100})
    inside = index_of(
        [("m", "a", TensorSpec((8,), "int8"), Box((0,), (8,)), "f", 8), ("m", "b", spec, box, "f", 8)]
    )
    with pytest.raises(CorruptError, match="overlaps"):
        check_extents(inside, {"f": 100})


@settings(max_examples=examples(400))
@given(st.data())
def test_a_changed_byte_gives_an_index_or_a_typed_error(data: st.DataObject) -> None:
    bad = bytearray(encode_index(sample_index()))
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FormatError):
        decode_index(bytes(bad))


def test_an_index_cut_short_is_refused() -> None:
    good = encode_index(sample_index())
    assert taken((good[:length] for length in range(0, len(good), 7)), decode_index, FormatError) == []
