"""Notes in a checkpoint that reknit has not written: an error names the entry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reknit.dataloader.sample_order import EpochPosition, SampleOrder
from reknit.errors import CorruptError
from reknit.frameworks.torch import state_memory
from reknit.frameworks.walk.requests import FoundValue
from reknit.frameworks.walk.walk import Place
from tests.tables import table

VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
GOOD = EpochPosition(SampleOrder(9, 1, 2), 4, 0).record()
AT = Place("data", "loader/~position")


@given(st.dictionaries(st.sampled_from([*GOOD, "other"]), VALUES), st.booleans())
@example({"order": 3}, True)
@example({"order": {"length": 9, "more": 1}}, True)
@example({"samples": "4"}, True)
def test_the_position_of_a_loader_is_one_or_is_damage(record: dict[str, Any], begins_well: bool) -> None:
    record = (GOOD if begins_well else {}) | record
    try:
        found = EpochPosition.of_record(record, AT)
    except CorruptError as error:
        assert str(AT) in error.message  # noqa: PT017 (only some values are errors)
    else:
        assert {**found.record(), **record, "order": 0} == {**found.record(), "order": 0}


@table("record", [5, "x", [1], b"", {}])
def test_another_value_is_no_position(record: Any) -> None:
    with pytest.raises(CorruptError, match="not a position of a data loader"):
        EpochPosition.of_record(record, AT)


@given(VALUES | st.fixed_dictionaries({"orders": VALUES, "apart": VALUES}))
@example({"orders": {"a": [1, 1]}})
@example({"orders": [1]})
@example({"apart": {"a": 1}})
def test_notes_on_the_states_of_a_parameter_are_such_or_are_damage(value: Any) -> None:
    saved = SimpleNamespace(look_up=lambda _: FoundValue(value))
    loading: Any = SimpleNamespace(saved=saved, value=lambda _: None)
    try:
        notes = state_memory.saved_notes(AT, loading)
    except CorruptError as error:
        assert str(AT) in error.message  # noqa: PT017 (only some values are errors)
    else:
        assert all(sorted(order) == list(range(len(order))) for order in notes.orders.values())
        assert all(type(name) is str for name in notes.apart)
