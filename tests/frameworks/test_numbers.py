"""Numbers that are loaded into elements of tensors: all bits are kept, or the number is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.frameworks.numbers import (
    element,
    from_element,
    is_number,
    like,
    misfit,
    number_of,
    read_as,
    whole,
)
from reknit.types.dtype import ITEMSIZE, converts, numpy_dtype
from tests.running.examples import examples
from tests.tables import table

_NUMBERS = [name for name in ITEMSIZE if converts("bool", name) and name != "bool"]
_TARGETS = (0, 0.0, 0j, np.int16(0), np.uint64(0), np.float16(0), np.float32(0), np.complex64(0))
_FLOATS = [name for name in _NUMBERS if converts("float64", name)]


@settings(max_examples=examples(200))
@given(st.sampled_from(_NUMBERS), st.one_of(st.integers(), st.floats(), st.complex_numbers()))
def test_a_number_that_fits_comes_back_with_its_value_and_its_sign(dtype: str, number: Any) -> None:
    if misfit(number, dtype) is not None:
        return
    back = number_of(element(number, dtype))
    if isinstance(number, int):
        assert back == number
    else:
        assert repr(type(number)(back)) == repr(number)  # a whole number may have become an integer


@settings(max_examples=examples(200))
@given(st.sampled_from(_NUMBERS), st.data())
def test_every_element_fits_into_its_own_dtype(dtype: str, data: st.DataObject) -> None:
    nbytes = data.draw(st.binary(min_size=ITEMSIZE[dtype], max_size=ITEMSIZE[dtype]))
    number = number_of(np.frombuffer(nbytes, numpy_dtype(dtype)))
    assert misfit(number, dtype) is None
    again = number_of(element(number, dtype))
    assert repr(again) == repr(number)


@settings(max_examples=examples(200))
@given(st.sampled_from([*ITEMSIZE]), st.sampled_from(_TARGETS), st.data())
def test_an_element_that_becomes_a_number_keeps_its_value(
    dtype: str, target: Any, data: st.DataObject
) -> None:
    wanted, why = read_as(dtype, target)
    if why is not None:
        return
    assert wanted == dtype
    nbytes = data.draw(st.binary(min_size=ITEMSIZE[dtype], max_size=ITEMSIZE[dtype]))
    array = np.frombuffer(nbytes, numpy_dtype(dtype)).reshape(())
    found = from_element(array, target)
    assert type(found) is type(target)
    number: Any = number_of(array)
    assert repr(complex(found)) == repr(complex(number))
    assert type(target) is not int or found == number


@table(
    ("number", "target", "expected"),
    [
        (np.int64(3), 0, 3),
        (np.int64(3), 0.0, 3.0),
        (300, np.int8(0), 300),
        (np.float32(3.5), 0, np.float32(3.5)),
        (np.float32(-0.0), 0, np.float32(-0.0)),
        (3.0, np.int8(0), np.int8(3)),
        (3.5, np.int8(0), 3.5),
        (0.1, np.float32(0), 0.1),
        (3, 0.0, 3),
        (True, np.int8(0), True),
        (np.timedelta64(3), 0, np.timedelta64(3)),
        (np.float32(3), None, np.float32(3)),
    ],
)
def test_a_scalar_of_numpy_becomes_the_number_that_is_there_if_no_bit_is_lost(
    number: Any, target: Any, expected: Any
) -> None:
    found = like(number, target)
    assert type(found) is type(expected)
    assert found == expected


@settings(max_examples=examples(200))
@given(st.sampled_from(_FLOATS), st.floats(allow_nan=False))
def test_a_number_is_rounded_as_a_tensor_is(dtype: str, number: float) -> None:
    assert misfit(number, dtype, cast=True) is None
    true = torch.tensor(number, dtype=torch.float64).to(getattr(torch, dtype)).double().item()
    assert repr(number_of(element(number, dtype))) == repr(true)


@table(
    ("number", "dtype", "cast", "why"),
    [
        (0.1, "float32", False, "cast=True"),
        (0.1, "float32", True, None),
        (-0.0, "float32", False, None),
        (-0.0, "float8_e4m3fnuz", False, "cast=True"),
        (math.nan, "bfloat16", False, None),
        (math.inf, "float8_e4m3fn", False, "cast=True"),
        (2**24 + 1, "float32", False, "cast=True"),
        (2**70, "float32", False, None),
        (2**70 + 1, "float32", True, "cannot hold"),
        (10**400, "float64", True, "cannot hold"),
        (10**5000, "int64", True, "cannot hold"),
        (2**31, "int32", True, "cannot hold"),
        (-1, "uint8", False, "cannot hold"),
        (3.0, "int64", False, None),
        (3.5, "int64", True, "another kind"),
        (-0.0, "int64", False, "another kind"),
        (math.inf, "int64", False, "another kind"),
        (2.0**63, "int64", True, "cannot hold"),
        (1, "bool", True, "another kind"),
        (1.0, "complex64", True, "another kind"),
        (1j, "float64", True, "another kind"),
        (complex(0.5, -0.0), "complex64", False, None),
        (complex(0.1, 0), "complex64", False, "cast=True"),
        (1.0, "complex32", True, "another kind"),
        (1, "float4_e2m1fn_x2", True, "another kind"),
        (np.float64(0.1), "float32", False, "cast=True"),
        (np.longdouble(1), "float64", True, "another kind"),
    ],
)
def test_a_number_is_refused_where_it_would_not_be_the_same(
    number: Any, dtype: str, cast: bool, why: str | None
) -> None:
    found = misfit(number, dtype, cast=cast)
    assert (found is None) if why is None else (found is not None and why in found)


def test_a_boolean_is_not_a_number_and_not_every_array_is_one() -> None:
    assert not any(map(is_number, (True, np.True_, "1", None, np.zeros(()), np.timedelta64(1))))
    assert all(map(is_number, (1, 1.0, 1j, np.float32(1), np.uint8(1))))
    arrays = (np.ones(2), np.array(True), np.zeros((0,)), np.zeros((), "V4"))
    assert [number_of(array) for array in arrays] == [None] * 4
    assert number_of(np.ones((1, 1), np.int8)) == 1


def test_an_integer_is_made_of_a_number_only_if_it_is_one() -> None:
    assert (whole(3), whole(3.0)) == (3, 3)
    assert [whole(number) for number in (3.5, -0.0, math.inf, math.nan, True, 1j)] == [None] * 6
