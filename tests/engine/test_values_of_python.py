"""Values of Python's own classes in files of other programs: read as they were, or left unread by name.

Scripts put their arguments, paths, dates and counters beside the weights.  None of them may close the file.
"""

from __future__ import annotations

import argparse
import array
import collections
import copyreg
import datetime
import decimal
import enum
import fractions
import functools
import http
import inspect
import io
import ipaddress
import itertools
import logging
import operator
import os
import pathlib
import platform
import random
import re
import signal
import socket
import statistics
import string
import time
import typing
import uuid
import zoneinfo
from collections.abc import Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import reknit
from reknit.errors import FormatError
from tests.running.cases import one_by_one_in

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3)}
UTC = datetime.timezone.utc


class Made:
    """An object whose pickle calls a function."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


class Old:
    """An object that is pickled as in protocol 1, by `copyreg._reconstructor`."""

    def __reduce__(self) -> Any:
        return object.__reduce__(self)


class Number(int):
    """A number with a class of its own, pickled as in protocol 1."""

    def __reduce__(self) -> Any:
        return copyreg._reconstructor, (Number, int, int(self))  # type: ignore[attr-defined]


class Named:
    """An object that is made with arguments by name."""

    def __new__(cls, *, depth: int = 1) -> Named:
        return object.__new__(cls)

    def __getnewargs_ex__(self) -> Any:
        return (), {"depth": 2}


class Mode(enum.IntFlag):
    """An enumeration of a script."""

    FAST = 1


READ: dict[str, Any] = {
    "arguments": argparse.Namespace(
        lr=0.1, out=pathlib.PurePosixPath("/runs"), inner=argparse.Namespace(a=[1])
    ),
    "namespace": SimpleNamespace(depth=3, more=SimpleNamespace(names=("a", None))),
    "empty namespace": SimpleNamespace(),
    "date": datetime.date(2026, 1, 2),
    "moment": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
    "local moment": datetime.datetime(2026, 1, 2, 3),
    "time": datetime.time(3, 4, 5),
    "interval": datetime.timedelta(days=-1, microseconds=3),
    "floats": {1.5, 2.5},
    "pairs": {("a", 1), ("b", 2)},
    "many": {*range(20_000)},
    "fixed": frozenset({None, True, "a"}),
    "counted": collections.Counter({"a": 1.5, "b": -2}),
    "text of NumPy": np.str_("abc"),
    "bytes of NumPy": np.bytes_(b"abc"),
    "truth of NumPy": np.bool_(True),
    "texts of NumPy": np.array(["a", "bcd"]),
    "numbers of NumPy": np.arange(4, dtype=">i2"),
    "bytes": b"a\xff",
    "table by pairs": {(1, ("a", 2.5)): 1},
    "table by numbers of NumPy": {np.int64(3): 1},
}
UNREAD: dict[str, Any] = {
    "zone": datetime.timezone(datetime.timedelta(hours=2), "X"),
    "old": Old(),
    "number": Number(3),
    "named": Named(),
    "mode": Mode.FAST,
    "in arguments": argparse.Namespace(mode=Mode.FAST),
    "in a namespace": SimpleNamespace(modes=[Mode.FAST]),
    "in a set": {Mode.FAST},
    "uuid": uuid.UUID(int=5),
    "decimal": decimal.Decimal("1.5"),
    "fraction": fractions.Fraction(1, 2),
    "zone by name": zoneinfo.ZoneInfo("UTC"),
    "address": ipaddress.ip_address("127.0.0.1"),
    "array": array.array("d", [1, 2]),
    "getter": operator.itemgetter(1),
    "logger": logging.getLogger("train"),
    "formatter": logging.Formatter(),
    "signal": signal.SIGTERM,
    "family": socket.AF_INET,
    "status": http.HTTPStatus.OK,
    "signature": inspect.signature(Named),
    "stream": io.StringIO("a"),
    "counter": itertools.count(3),
    "generator": random.Random(0),
    "machine": platform.uname(),
    "file": os.stat("/"),
    "moment of C": time.gmtime(0),
    "template": string.Template("a"),
    "distribution": statistics.NormalDist(),
    "error": ValueError("a"),
    "error of the system": FileNotFoundError(2, "a"),
    "object": object(),
    "type of None": type(None),
    "union": int | None,
    "optional": typing.Optional[int],  # noqa: UP045
    "pattern": re.compile("a"),
    "partial": functools.partial(operator.itemgetter, 1),
    "tables": collections.ChainMap({1: 2}),
    "copied table": Made(dict, {"a": 1}),
    "tuple": Made(tuple, [1]),
    "objects of NumPy": np.array([1, "a", None], dtype=object),
    "records of NumPy": np.zeros(2, dtype=[("a", "f4")]),
    "date of NumPy": np.datetime64("2026-01-02"),
    "state of NumPy": np.random.RandomState(0),
    "dtype of NumPy": np.dtype([("a", "f4")]),
    "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
    "storage": torch.ones(2).untyped_storage(),
    "table by tensors": {torch.ones(1): 1},
}


def saved(path: pathlib.Path, kind: str, odd: dict[str, Any]) -> str:
    """Save weights and values as DCP does, or torch.save with a protocol, and return the path."""
    if kind == "DCP":
        dcp.save({"model": WEIGHTS, "odd": odd}, checkpoint_id=path)
    else:
        torch.save({"model": WEIGHTS, "odd": odd}, path, pickle_protocol=int(kind))
    return str(path)


@pytest.mark.parametrize("kind", ["2", "3", "4", "5", "DCP"])
def test_each_is_read_as_it_was_or_named_and_the_tensors_open(kind: str, tmp_path: pathlib.Path) -> None:
    good, bad = (
        {name: value for name, value in values.items() if kind != "DCP" or not isinstance(value, Mapping)}
        for values in (READ, UNREAD)
    )  # DCP takes tables apart
    path = saved(tmp_path / "odd.pt", kind, {"first": 1, **good, **bad})
    with reknit.open(path) as checkpoint:
        assert checkpoint.read("model", "w").tolist() == WEIGHTS["w"].tolist()
        found = checkpoint.values["odd"]
        assert checkpoint.manifest.other is not None
        unread = {entry.fqn: entry.why for entry in checkpoint.manifest.other.unread}
    assert unread.keys() == bad.keys()
    assert found.keys() == {"first", *good}
    for name, value in good.items():
        assert type(found[name]) is type(value), name
        assert np.array_equal(found[name], value) if isinstance(value, np.ndarray) else found[name] == value
    for name, kinds in {"old": "Old", "number": "Number", "in arguments": "Mode", "in a set": "Mode"}.items():
        assert f"{__name__}.{kinds}" in unread[name]
    assert "uuid.UUID" in unread["uuid"]
    assert "builtins.ValueError" in unread["error"]


@pytest.mark.parametrize(("kind", "num"), [("2", 1), ("4", 3), ("DCP", 3)])
def test_values_of_one_class_are_named_each(kind: str, num: int, tmp_path: pathlib.Path) -> None:
    path = saved(tmp_path / "odd.pt", kind, {"first": 1} | {f"a{n}": Old() for n in range(num)})
    with reknit.open(path) as checkpoint:
        assert dict(checkpoint.values["odd"]) == {"first": 1}
        assert checkpoint.manifest.other is not None
        assert [entry.name for entry in checkpoint.manifest.other.unread] == [f"odd/a{n}" for n in range(num)]


def test_a_call_of_a_function_of_python_closes_the_file(tmp_path: pathlib.Path) -> None:
    for (call, kind), folder in one_by_one_in(
        tmp_path,
        product(
            [
                Made(os.getpid),
                Made(eval, "1"),
                Made(open, "/dev/null"),
                Made(functools.reduce, os.path.join, ["a", "b"]),
                [{"a": (Made(os.getpid),)}],
            ],
            ["2", "4", "DCP"],
        ),
    ):
        path = saved(folder / "odd.pt", kind, {"first": call})
        with pytest.raises(FormatError, match=r"odd\.pt.* cannot be opened: a pickle needs "):
            reknit.open(path)


def test_one_value_at_very_many_places_is_refused(tmp_path: pathlib.Path) -> None:
    for value in ("a" * (1 << 20), SimpleNamespace(kept=np.zeros(1 << 20, np.uint8))):
        torch.save({"model": WEIGHTS, **{f"a{n}": [value] * 99 for n in range(3)}}, tmp_path / "odd.pt")
        with pytest.raises(FormatError, match="repeats values at so many places"):
            reknit.open(tmp_path / "odd.pt")
    torch.save({"model": WEIGHTS, "a": [value] * 2}, tmp_path / "few.pt")
    reknit.open(tmp_path / "few.pt").close()
