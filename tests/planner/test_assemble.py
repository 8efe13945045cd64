from __future__ import annotations

import random
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.errors import CommitError
from reknit.planner import assemble as module
from reknit.planner.assemble import assemble, chunk_files, widened
from reknit.planner.columns import columns_of, merged
from reknit.types.box import Box, flat_range_boxes
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reknit.planner.columns import RankColumns
    from reknit.types.manifest import Index

Tensor = tuple[str, str, str, tuple[int, ...]]
Row = tuple[Tensor, Box, int]
"""A tensor, a box of it, and the part of the file that has it."""


def chunks(
    rank: int,
    tensors: Sequence[Tensor],
    rows: Sequence[Row],
    aliases: Iterable[tuple[str, str, str]] = (),
    parts: int = 1,
) -> RankColumns:
    """Return the receipt of a rank that holds `tensors`; its rows lie in files of item "m", one byte each."""
    ndim = max([len(box.offsets) for _, box, _ in rows], default=1) or 1
    lists = {
        "tensor": ([tensors.index(tensor) for tensor, _, _ in rows], "tensors"),
        "file": ([part for _, _, part in rows], ""),
        "start": ([1000 * rank + number for number in range(len(rows))], ""),
        "nbytes": ([box.numel for _, box, _ in rows], ""),
        "folder": ([0] * parts, "folders"),
        "part": (range(parts), ""),
    }
    for d in range(ndim):
        lists[f"offset.{d}"] = ([(*box.offsets, *[0] * ndim)[d] for _, box, _ in rows], "")
        lists[f"length.{d}"] = ([(*box.lengths, *[1] * ndim)[d] for _, box, _ in rows], "")
    tables = {"tensors": tensors, "folders": ["m"], "aliases": list(aliases)}
    return widened(columns_of(rank, tables, lists), 3)


def rows_of(index: Index) -> list[tuple[str, Box, int, int]]:
    """Return the chunks of an index: FQN, box, number of the file, start."""
    found = []
    for number, entry in enumerate(index.tensors):
        ndim = len(entry.spec.shape)
        for row in range(index.first[number], index.first[number + 1]):
            box = Box(tuple(index.offsets[row, :ndim].tolist()), tuple(index.lengths[row, :ndim].tolist()))
            found.append((entry.fqn, box, int(index.file[row]), int(index.start[row])))
    return found


@st.composite
def worlds(draw: st.DrawFn) -> list[RankColumns]:
    """Draw ranks that together hold some tensors, each cut in boxes that are dealt to the ranks."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    size = draw(st.integers(1, 6))
    tensors: list[Tensor] = [
        ("m", f"t{n}", "uint8", tuple(rng.randrange(1, 5) for _ in range(rng.randrange(4))))
        for n in range(draw(st.integers(1, 4)))
    ]
    held: list[list[Row]] = [[] for _ in range(size)]
    for tensor in tensors:
        numel = int(np.prod(tensor[3]))
        cuts = sorted({0, numel, *(rng.randrange(numel + 1) for _ in range(3))})
        for first, end in pairwise(cuts):
            owner = held[rng.randrange(size)]
            owner += [
                (tensor, box, rng.randrange(2)) for box in flat_range_boxes(tensor[3], first, end - first)
            ]
    ranks = []
    for rank, rows in enumerate(held):
        rng.shuffle(rows)
        ranks.append(chunks(rank, rng.sample(tensors, len(tensors)), rows, parts=2))
    return ranks


def expected_rows(ranks: Sequence[RankColumns]) -> list[tuple[str, Box, int, int]]:
    """Return the rows of the index, by loops."""
    found = []
    for rank, own in enumerate(ranks):
        columns = {name: column.at(0).tolist() for name, column in own.lists.items()}
        for row, tensor in enumerate(columns["tensor"]):
            _, fqn, _, shape = own.tables["tensors"][tensor]
            box = Box(
                tuple(columns[f"offset.{d}"][row] for d in range(len(shape))),
                tuple(columns[f"length.{d}"][row] for d in range(len(shape))),
            )
            found.append((fqn, box, 2 * rank + columns["file"][row], columns["start"][row]))
    return sorted(found, key=lambda row: (row[0], row[1].offsets))


@given(worlds(), st.booleans())
def test_the_index_has_the_chunks_of_all_ranks_sorted(ranks: list[RankColumns], exact: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not exact:
            patch.setattr(module, "_EXACT", 0.0)
        index, warnings = assemble(merged(ranks))
    assert warnings == []
    assert rows_of(index) == expected_rows(ranks)
    assert (np.diff(index.tensor) >= 0).all()
    files = chunk_files(merged(ranks))
    assert files.rank.tolist() == [rank for rank in range(len(ranks)) for _ in range(2)]
    assert files.part.tolist() == [0, 1] * len(ranks)
    assert files.items == ["m"]


A: Tensor = ("m", "a", "uint8", (4,))
B: Tensor = ("m", "b", "uint8", (2, 2))


def test_a_box_that_two_ranks_wrote_is_kept_once_that_of_the_lowest() -> None:
    whole = Box((0, 0), (2, 2))
    ranks = [chunks(rank, [B], [(B, whole, 0)]) for rank in (2, 0, 1)]
    index, warnings = assemble(merged(ranks))
    assert rows_of(index) == [("b", whole, 0, 0)]
    assert warnings == ["written by more than one rank, kept once: m/b"]


def test_a_box_that_begins_where_another_does_is_an_overlap_and_no_second_copy() -> None:
    rows: list[Row] = [(A, Box((0,), (4,)), 0), (A, Box((0,), (2,)), 0)]
    with pytest.raises(CommitError, match=r"m/a uint8\[4\]: an overlap, 6 of 4"):
        assemble(merged([chunks(rank, [A], [row]) for rank, row in enumerate(rows)]))


@table(("dtype", "length"), [("int32", 4), ("uint8", 5)])
def test_ranks_that_disagree_about_a_tensor_are_named(dtype: str, length: int) -> None:
    other: Tensor = ("m", "a", dtype, (length,))
    ranks = [chunks(rank, [B, A if rank < 3 else other], []) for rank in range(5)]
    reported = rf"disagree about m/a: uint8\[4\], on rank 3 {dtype}\[{length}\]"
    with pytest.raises(CommitError, match=reported):
        assemble(merged(ranks))


def test_a_hole_and_an_overlap_name_their_tensors() -> None:
    rows: list[Row] = [(A, Box((0,), (3,)), 0), (B, Box((0, 0), (2, 2)), 0), (B, Box((1, 0), (1, 1)), 0)]
    with pytest.raises(CommitError, match=r"m/a uint8\[4\]: a hole, 3 of 4 .*m/b .*an overlap, 5 of 4"):
        assemble(merged([chunks(0, [A, B], rows)]))


def test_a_tensor_that_is_held_and_written_by_nobody_is_a_hole_whatever_its_dimensions() -> None:
    deep: Tensor = ("m", "deep", "uint8", (1, 1, 1, 1, 2))
    with pytest.raises(CommitError, match=r"m/deep .*a hole, 0 of 2"):
        assemble(merged([chunks(0, [A, deep], [(A, Box((0,), (4,)), 0)])]))


def test_the_ranks_are_named_that_wrote_a_tensor_and_those_that_have_it_made_of_others() -> None:
    inner: Tensor = ("m", "a/codes", "uint8", (2,))
    ranks = [chunks(rank, [A], [(A, Box((rank,), (1,)), 0)]) for rank in range(3)]
    ranks.append(chunks(3, [inner], [(inner, Box((0,), (2,)), 0)]))
    with pytest.raises(
        CommitError, match=r"3 of 4 .*\(by ranks 0-2\), and it is made of .* on rank 3"
    ) as caught:
        assemble(merged(ranks))
    assert caught.value.remedy is not None
    assert "shard it over fewer ranks" in caught.value.remedy


def test_a_tied_name_has_the_chunks_of_the_tensor_it_is_tied_to() -> None:
    halves: list[Row] = [(A, Box((0,), (2,)), 0), (A, Box((2,), (2,)), 0)]
    ranks = [chunks(rank, [A], [halves[rank]], [("m", "tied", "a")]) for rank in range(2)]
    index, _ = assemble(merged(ranks))
    assert [entry.fqn for entry in index.tensors] == ["a", "tied"]
    rows = rows_of(index)
    assert [row[1:] for row in rows[:2]] == [row[1:] for row in rows[2:]]


def test_a_tied_name_whose_tensor_nobody_wrote_is_named() -> None:
    rows: list[Row] = [(A, Box((0,), (4,)), 0)]
    with pytest.raises(CommitError, match=r"m/tied = gone"):
        assemble(merged([chunks(0, [A], rows, [("m", "tied", "gone")])]))
