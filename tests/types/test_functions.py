"""Objects that count as functions, of which a checkpoint holds nothing."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from reknit.types.dtype import is_function


class Callable:
    def __call__(self) -> None: ...

    def method(self) -> None: ...


def test_functions_of_every_kind_are_known() -> None:
    functions = [len, lambda x: x, np.exp, np.sum, partial(len), cache(len), "".join, Callable().method]
    assert [one for one in functions if not is_function(one)] == []


def test_classes_and_objects_are_no_functions() -> None:
    others: list[Any] = [None, 1, "len", [len], int, Callable, Callable(), np.zeros(1)]
    assert list(filter(is_function, others)) == []
