"""A value comes back in its type and with all its bits, or is refused by name."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import types
from copy import copy
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import reknit
from reknit.engine.saving.part import encode_holdings
from reknit.errors import FormatError, StateError
from reknit.frameworks.registry import collect, wanted
from reknit.types.shard import Tagged
from tests.format import samples
from tests.frameworks.checkpoint import load, save
from tests.tables import table
from tests.values import Keeper


class Names(dict[str, Any]):
    """Settings of a trainer, read as attributes."""


class Ordered(collections.OrderedDict[str, Any]):
    pass


class Sheet(list[Any]):
    pass


class Pair(tuple[Any, ...]):
    __slots__ = ()


class Ring(collections.deque[Any]):
    pass


class Tally(collections.Counter[str]):
    pass


class Fallback(collections.defaultdict[str, Any]):
    pass


class Words(collections.UserDict[str, Any]):
    """A mapping like the BatchEncoding of transformers."""


class Meters(np.ndarray[Any, Any]):
    """An array with a unit."""


class Point(NamedTuple):
    x: Any
    y: Any


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Level(enum.IntEnum):
    LOW = 1


class Kind(str, enum.Enum):
    A = "a"


def described(layers: int) -> Any:
    """Return a module's state, which has the versions of its parts as an attribute."""
    return nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(layers))).state_dict()


def attributed(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


def swapped(*shape: int) -> Any:
    return np.arange(6).reshape(shape or 6).astype(">f4")


EXACT = [
    *(True, 3, 2**70, -0.0, 1.5, 2j, "text", b"bytes", None, bytearray(b"x")),
    *([1, (2, [3])], (), (1,), {"a": {}}, {1: 2}, {(1, 2): {3}}, {1, 2}, frozenset("ab")),
    *(torch.Size([2, 3]), torch.Size([]), torch.float16, torch.device("cpu"), [torch.Size([1]), (1,)]),
    *(collections.OrderedDict(b=1, a=[2]), collections.Counter("aab"), collections.deque([1], 2)),
    *(collections.defaultdict(list, a=[1]), collections.defaultdict(None), collections.deque()),
    *(
        np.float32(1.5),
        np.int8(-3),
        np.bool_(True),
        np.str_("é"),
        np.bytes_(b"a"),
        np.datetime64("2026-01-02"),
    ),
    *(np.timedelta64(3, "s"), np.array(["a"]), np.array("2026", "M8[s]"), np.dtype(">f4"), np.complex64(1j)),
    *(swapped(), swapped(2, 3), np.arange(3, dtype=">i8"), np.array([1j], ">c16"), np.array(2.0, ">f8")),
    *(Level.LOW, Kind.A, datetime.date(2026, 1, 2), datetime.time(1, fold=1), datetime.timedelta(1, 2, 3)),
    *(datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), datetime.datetime(2026, 1, 2, fold=1)),
    *(
        PurePosixPath("a"),
        Path("b"),
        range(3),
        slice(1, None),
        argparse.Namespace(a=(1,), b=torch.half),
        samples.Colour.RED,
    ),
    *(types.SimpleNamespace(b=torch.ones(2)), torch.arange(3), torch.zeros(2, 0), np.arange(3.0)),
    *(nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)),
    *(torch.ones(2, requires_grad=True), described(2)),
    *(attributed(collections.OrderedDict(a=1), note=[1]), attributed(collections.Counter("a"), note="x")),
]
"""Values that are to come back exactly, wherever they are."""

REFUSED = [
    *(Names(a=1), Ordered(a=1), Sheet([1]), Pair((1,)), Ring([1]), Tally("a"), Fallback(int), Words(a=1)),
    *(Text("a"), Whole(1), decimal.Decimal(1), fractions.Fraction(1), memoryview(b"a"), int),
    *(np.ma.masked_array(["a"]), np.array([None]), np.zeros(2, "i4,i4"), np.longdouble(1), Point(1, 2)),
    *(np.ones((1, 2)).view(np.matrix), np.arange(2.0).view(Meters), np.array(["a"]).view(np.char.chararray)),
    attributed(collections.OrderedDict(a=1), keys="hides a method"),
]
"""Values that are refused wherever they could come back as something else."""


QUICK = reknit.SaveOptions(durability="process", threads=1)


def same(a: Any, b: Any) -> bool:
    """Return whether two values are of one type and equal in every bit, attributes and all."""
    if isinstance(a, torch.Tensor):
        return (
            type(a) is type(b)
            and (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
            and torch.equal(a, b)
        )
    if isinstance(a, (argparse.Namespace, types.SimpleNamespace)):
        return type(a) is type(b) and same(vars(a), vars(b))
    if isinstance(a, (list, tuple, dict)) and type(a) is type(b):
        if getattr(a, "__dict__", None) != getattr(b, "__dict__", None) or len(a) != len(b):
            return False
        if isinstance(a, dict):
            return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
        return all(map(same, a, b))
    return samples.same(a, b)


def there_and_back(folder: Path, state: Any, target: Any) -> Any:
    reknit.save(folder, state, options=QUICK)
    reknit.load(folder, target)
    return target


def test_an_object_is_handed_what_it_gave(tmp_path: Path) -> None:
    target = {str(number): Keeper() for number in range(len(EXACT))}
    there_and_back(tmp_path / "c", {str(n): Keeper(value) for n, value in enumerate(EXACT)}, target)
    assert [value for n, value in enumerate(EXACT) if not same(target[str(n)].state, value)] == []


def test_tensors_of_an_object_are_loaded_alone_beside_an_array_that_is_a_value(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"k": Keeper([torch.ones(2), swapped()])}, options=QUICK)
    target, kept = Keeper([torch.zeros(2), np.zeros(6, ">f4")]), np.zeros(6, ">f4")
    reknit.load(tmp_path / "c", {"k": target}, options=reknit.LoadOptions(only=("k/deep/*",)))
    assert same(target.state, [torch.ones(2), kept])


def test_a_value_of_a_rank_comes_back_as_it_was(tmp_path: Path) -> None:
    target = {"k": reknit.PerRank(None)}
    there_and_back(tmp_path / "c", {"k": reknit.PerRank(EXACT)}, target)
    found = target["k"].value
    assert [value for value, back in zip(EXACT, found, strict=True) if not same(back, value)] == []


VALUES = [value for value in EXACT if not isinstance(value, (dict, np.ndarray, torch.Tensor))]
"""The values that are not taken apart, and not filled in place."""


def test_a_value_takes_the_place_of_one_of_any_type(tmp_path: Path) -> None:
    reknit.save(tmp_path / "c", {"k": {str(n): value for n, value in enumerate(VALUES)}}, options=QUICK)
    for present in list[Any]([None, 5, (1, 2), torch.Size([7, 8]), [0], collections.deque()]):
        target: dict[str, Any] = {"k": {str(n): copy(present) for n in range(len(VALUES))}}
        reknit.load(tmp_path / "c", target)
        found = target["k"].values()
        # An integer of NumPy becomes the integer of Python that the target has.
        wanted = [int(v) if present == 5 and type(v) is np.int8 else v for v in VALUES]
        assert [value for value, back in zip(wanted, found, strict=True) if not same(back, value)] == [], (
            present
        )


def test_a_member_of_an_enumeration_that_is_not_there_is_told_with_its_module() -> None:
    checkpoint = save({"k": Keeper(5)})
    checkpoint.shared["k", "~s"] = {"deep": [Tagged("enum", ["lost.module", "Colour", "RED"])]}
    why = r"\['deep'\]\[0\] is Colour.RED of the module lost.module"
    with pytest.raises(FormatError, match=why) as caught:
        wanted({"k": Keeper()}, checkpoint.catalog(), 0, 1)
    assert caught.value.remedy == "import lost.module before loading"


def test_only_a_list_is_filled_where_a_list_is() -> None:
    """Others hold on to it; a tuple, or a mapping, is not a list."""
    kept = Sheet([0])
    target: dict[str, Any] = {"k": {"a": kept, "b": kept}}
    load(target, save({"k": {"a": [1, (2,)], "b": (1, 2)}}))
    assert target["k"]["a"] is kept
    assert kept == [1, (2,)]
    assert target["k"]["b"] == (1, 2)


def test_what_could_not_take_its_place_is_a_mismatch_before_anything_changes() -> None:
    kept = [0]
    target = types.MappingProxyType({"a": kept})
    want = wanted({"k": target}, save({"k": {"a": (1, 2)}}).catalog(), 0, 1)
    assert [name[:2] for name in want.mismatched] == [("k", "a")]
    assert "a tuple was saved" in want.mismatched[0][2]
    load({"k": target}, save({"k": {"a": [1, 2]}}))
    assert kept == [1, 2]


def encoded(state: Any) -> None:
    """Do all that a save does before anything is written."""
    encode_holdings(collect(state, 0, 1), QUICK)


@table("value", REFUSED)
def test_what_would_come_back_as_something_else_is_refused_by_name(value: Any) -> None:
    for state, place in [({"k": Keeper(value)}, "k/~s['deep'][0]"), ({"k": reknit.PerRank([value])}, "k[0]")]:
        with pytest.raises(StateError) as caught:
            encoded(state)
        assert place in caught.value.message
        assert any(word in caught.value.message for word in (type(value).__name__, "NumPy", "array"))
        assert caught.value.remedy


@table("kind", [Names, Ordered, Words, dict, collections.OrderedDict])
def test_a_mapping_in_the_state_keeps_the_type_that_the_target_has(kind: Any) -> None:
    for content, blank in [
        ({}, {}),
        ({"a": 1, "b": [1, np.ones(1)], "c": {}}, {"a": 0, "b": [0, np.zeros(1)], "c": {}}),
    ]:
        mine = kind(blank)
        encoded({"k": kind(content)})
        load({"k": mine}, save({"k": kind(content)}))
        assert type(mine) is kind
        assert repr(dict(mine)) == repr(content)


def test_arrays_that_are_filled_in_place_stay_of_their_type(tmp_path: Path) -> None:
    for source in (np.ones((2, 2)).view(np.matrix), swapped(2, 3), np.ones((2, 2))):
        target: dict[str, Any] = {"k": np.zeros_like(source)}
        mine = target["k"]
        load(target, save({"k": source}))
        assert target["k"] is mine
        assert samples.same(mine, source)


def test_containers_that_cannot_be_made_again_are_refused_where_they_are() -> None:
    for value, place in [
        (Pair((np.ones(1), 1)), "k is a Pair"),
        ({"a": [np.ones(1).view(Meters)]}, "k/a/0 is a Meters"),
    ]:
        with pytest.raises(StateError, match=place):
            collect({"k": value}, 0, 1)
        with pytest.raises(StateError, match=place):
            wanted({"k": value}, save({"k": [1]}).catalog(), 0, 1)
