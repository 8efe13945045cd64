"""The rows of an index that reach a rank, and their way there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.loading import contents
from reknit.engine.loading.contents import Reach, blocks_for, kept, names_only, rows_of, with_rows
from reknit.types.box import Box
from reknit.types.shard import TensorSpec
from reknit.types.wanted import Wanted
from tests.format.samples import index_of, indexes, same_index

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest
    from numpy.typing import NDArray

    from reknit.types.manifest import Index, TensorEntry


class Piece(NamedTuple):
    """The fields of a fill that `Reach` reads."""

    tensor: int
    box: Box


def reach_of(index: Index, wants: Sequence[tuple[int, Box]], *aliases: tuple[str, str, str, str]) -> Reach:
    fills: Any = [Piece(*want) for want in wants]
    return Reach.of(index, fills, Wanted(("model",), aliases=aliases))


def lines(index: Index) -> list[tuple[Any, ...]]:
    """Return the rows of an index, with names in the place of its own numbers."""
    return [
        (index.tensors[number][:2], chunk)
        for number in range(len(index.tensors))
        for chunk in index.chunks(number)
    ]


def received(whole: Index, tensors: Sequence[TensorEntry], blocks: Sequence[bytes], reach: Reach) -> Index:
    """Return the index that a rank builds from blocks, in which each file has its number plus ten."""
    empty = names_only(tensors)
    rows = rows_of(empty, blocks, reach)
    return with_rows(empty, rows, {number + 10: path for number, path in enumerate(whole.files)})


def numbers_of_files(index: Index) -> NDArray[np.int64]:
    return np.arange(len(index.files)) + 10


def everywhere(index: Index) -> Reach:
    """Return the reach of a rank that wants every tensor whole."""
    return reach_of(index, [(n, Box.whole(e.spec.shape)) for n, e in enumerate(index.tensors)])


@given(indexes(), st.data())
def test_a_rank_gets_just_the_rows_of_its_tensors_that_meet_its_boxes(
    index: Index, data: st.DataObject
) -> None:
    numbers = st.integers(0, max(len(index.tensors) - 1, 0))
    tensors = st.sets(numbers) if index.tensors else st.just(set[int]())
    requests = data.draw(st.lists(tensors.map(sorted), min_size=1, max_size=4))
    parts = blocks_for(index, numbers_of_files(index), [np.array(r, np.int64) for r in requests])
    for request, blocks in zip(requests, parts, strict=True):
        wants = []
        for number in request:
            shape = index.tensors[number].spec.shape
            low = [data.draw(st.integers(0, n)) for n in shape]
            size = [data.draw(st.integers(0, n - k)) for n, k in zip(shape, low, strict=True)]
            wants.append((number, Box(tuple(low), tuple(size))))
        reach = reach_of(index, wants)
        found = received(index, index.tensors, blocks, reach)
        boxes = {(index.tensors[n].item, index.tensors[n].fqn): box for n, box in wants}
        must = [(name, c) for name, c in lines(index) if name in boxes and c.box.intersect(boxes[name])]
        got = lines(found)
        assert [line for line in got if line in must] == must
        assert {name for name, _ in got} <= boxes.keys()
        assert got == lines(kept(index, reach)), "the root takes the same from its memory"


@given(indexes())
def test_who_wants_everything_gets_the_index_as_it_is(index: Index) -> None:
    everything = np.arange(len(index.tensors))
    ((blocks),) = blocks_for(index, numbers_of_files(index), [everything])
    found = received(index, index.tensors, blocks, everywhere(index))
    solid = [line for line in lines(index) if line[1].box.numel]
    assert lines(found) == solid
    assert len(found.files) == len({chunk.extent.file for _, chunk in solid})
    assert found.tensors == index.tensors
    if len(solid) == len(index.tensor):
        assert same_index(kept(index, everywhere(index)), index)


def spread(num_tensors: int, num_rows: int) -> Index:
    """Return an index of tensors of two items, each cut into rows of one element."""
    spec = TensorSpec((num_rows,), "int8")
    return index_of(
        [
            (item, f"w.{number:04d}", spec, Box((row,), (1,)), f"{item}/{row:05d}.x", number)
            for item in ("model", "optimizer")
            for number in range(num_tensors)
            for row in range(num_rows)
        ]
    )


def test_a_rank_that_knows_fewer_items_finds_its_tensors() -> None:
    index = spread(4, 3)
    request = np.array([4, 6])
    ((blocks),) = blocks_for(index, numbers_of_files(index), [request])
    part = index.of_items({"optimizer"})
    reach = reach_of(part, [(0, Box((1,), (2,))), (2, Box((0,), (1,)))])
    found = received(index, part.tensors, blocks, reach)
    assert [(name, chunk.box.offsets) for name, chunk in lines(found)] == [
        (("optimizer", "w.0000"), (1,)),
        (("optimizer", "w.0000"), (2,)),
        (("optimizer", "w.0002"), (0,)),
    ]
    assert found.files == tuple(f"optimizer/{row:05d}.x" for row in range(3))
    assert found.nbytes.tolist() == [1, 1, 1]


def test_many_different_requests_make_no_more_blocks_than_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contents, "MAX_KINDS", 5)
    index = spread(40, 3)
    requests = [np.array([number]) for number in range(80)]
    parts = blocks_for(index, numbers_of_files(index), requests)
    assert len({id(block) for part in parts for block in part}) <= 2 * 5
    for number, blocks in enumerate(parts):
        found = received(index, index.tensors, blocks, reach_of(index, [(number, Box((0,), (3,)))]))
        assert lines(found) == [line for line in lines(index) if line[0] == index.tensors[number][:2]]


def test_a_tied_tensor_is_looked_at_where_the_other_is_wanted() -> None:
    index = spread(3, 4)
    reach = reach_of(
        index,
        [(1, Box((2,), (1,)))],
        ("model", "w.0000", "model", "w.0001"),
        ("model", "w.0002", "model", "gone"),
    )
    assert [(name[1], chunk.box.offsets) for name, chunk in lines(kept(index, reach))] == [
        ("w.0000", (2,)),
        ("w.0001", (2,)),
    ]


def test_of_a_tensor_cut_a_thousand_times_a_rank_holds_what_it_wants_and_the_message_is_small() -> None:
    index = spread(20, 1000)
    ((blocks),) = blocks_for(index, numbers_of_files(index), [np.arange(40)])
    assert sum(map(len, blocks)) < len(index.tensor) // 10
    reach = reach_of(index, [(number, Box((7,), (1,))) for number in range(40)])
    found = received(index, index.tensors, blocks, reach)
    assert len(found.tensor) == 40
    assert found.files == ("model/00007.x", "optimizer/00007.x")
