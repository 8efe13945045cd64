"""Objects that count as functions, of which a checkpoint holds nothing."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np

from reknit.types.functions import is_function
from tests.tables import table


class Callable:
    def __call__(self) -> None: ...

    def method(self) -> None: ...


@table("value", [len, lambda x: x, np.exp, np.sum, partial(len), cache(len), "".join, Callable().method])
def test_functions_of_every_kind_are_known(value: Any) -> None:
    assert is_function(value)


@table("value", [None, 1, "len", [len], int, Callable, Callable(), np.zeros(1)])
def test_classes_and_objects_are_no_functions(value: Any) -> None:
    assert not is_function(value)
