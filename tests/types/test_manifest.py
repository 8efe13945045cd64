from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from reknit.format.index import decode_index, encode_index
from tests.format.samples import indexes, same_index, sample_index

if TYPE_CHECKING:
    from reknit.types.manifest import Index


@given(indexes(), st.data())
def test_the_part_of_some_items_has_exactly_their_chunks_and_survives_its_file(
    index: Index, data: st.DataObject
) -> None:
    every = sorted({entry.item for entry in index.tensors})
    items = data.draw(st.sets(st.sampled_from(every))) if every else set()
    part = index.of_items(items)
    expected = [
        (entry, list(index.chunks(number)))
        for number, entry in enumerate(index.tensors)
        if entry.item in items
    ]
    assert [(entry, list(part.chunks(n))) for n, entry in enumerate(part.tensors)] == expected
    assert set(part.files) == {chunk.extent.file for _, chunks in expected for chunk in chunks}
    assert same_index(decode_index(encode_index(part)), part)


def test_the_part_of_all_items_is_the_index_itself() -> None:
    index = sample_index()
    assert index.of_items({"model", "optimizer", "no such item"}) is index
    assert index.of_items(()).files == ()
