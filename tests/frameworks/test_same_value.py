"""One comparison of values: numbers, arrays of every library, and containers of these."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Cut
from torch.testing._internal.two_tensor import TwoTensor

from reknit.errors import ShortageError
from reknit.frameworks.neutral import to_neutral
from reknit.frameworks.numbers import same_value
from reknit.types.dtype import ITEMSIZE
from tests.ranks import run
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable

_NAN = float("nan")


class Large:
    """An object for whose comparison there is no memory."""

    def __eq__(self, other: object) -> bool:
        raise MemoryError

    __hash__ = None  # type: ignore[assignment]


def test_a_comparison_without_memory_says_nothing_of_the_values() -> None:
    with pytest.raises(ShortageError):
        same_value(Large(), Large())


class Odd:
    """An object that refuses to be compared."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not with me")

    __hash__ = None  # type: ignore[assignment]


def _masked(mask: bool) -> Any:
    return np.ma.masked_array(np.arange(2), [mask, False])


def _two(one: torch.Tensor, other: torch.Tensor) -> Any:
    kind: Any = TwoTensor
    return kind(one, other)


def _quietly(make: Callable[[], Any]) -> Any:
    """Return a tensor of a kind that torch warns about: it is in beta, a prototype, or will be removed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def _rows(*rows: list[float]) -> Any:
    """Return a sparse tensor that lists its elements by rows."""
    return _quietly(lambda: torch.tensor(rows).to_sparse_csr())


def _quantized(scale: float) -> Any:
    """Return a quantized tensor with the same integers at any scale."""
    values = scale * torch.arange(3.0)
    return _quietly(lambda: torch.quantize_per_tensor(values, scale, 0, torch.qint8))


def _by_channel(*scales: float) -> Any:
    """Return a quantized tensor with the same integers at any scales."""
    steps, zeros = torch.tensor(scales), torch.zeros(len(scales), dtype=torch.int64)
    values = steps[:, None] * torch.arange(3.0)
    return _quietly(lambda: torch.quantize_per_channel(values, steps, zeros, 0, torch.qint8))


def _nested(*rows: list[float]) -> Any:
    """Return a tensor with rows of any lengths."""
    return _quietly(
        lambda: torch.nested.nested_tensor([torch.tensor(row, dtype=torch.float32) for row in rows])
    )


_SPARSE = torch.eye(2).to_sparse()


def values() -> list[Any]:
    """Return values of every kind, made anew."""
    return [
        *(1, float("nan"), complex(_NAN, -0.0), {"a": [1, (2, {"b": _NAN})]}, Decimal("NaN"), slice(0, None)),
        *(np.arange(3), np.array([_NAN, -0.0]), np.array([1, "a", _NAN], object), _masked(True)),
        *(np.zeros(2, [("a", "i1"), ("b", "f8")]), np.float32(_NAN), np.datetime64("NaT"), np.dtype("f4")),
        torch.tensor([_NAN, -0.0]),
        [{"a": torch.ones(2)}, torch.zeros(())],
        torch.Size([1]),
        torch.float32,
        *(torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2, dtype=torch.complex64).conj().imag),
        *(torch.empty(2, 0), torch.ones(4)[::3][:1], torch.ones(2, 3).t()),
        *(torch.tensor([[0, _NAN], [-0.0, 2]]).to_sparse(), _rows([1, _NAN], [0, 1])),
        *(_quantized(0.5), _by_channel(0.5, 0.25), _nested([1, _NAN], [-0.0])),
        *(torch.tensor([_NAN, -0.0]).to_mkldnn(), _two(torch.ones(2), torch.tensor([_NAN, -0.0]))),
        *(to_neutral({"a": torch.ones(2)}, "here"), deque([float("nan"), torch.ones(2)], 3)),
        *(SimpleNamespace(a=torch.ones(2)), Namespace(a=np.ones(2)), OrderedDict(a=torch.ones(2))),
        *(defaultdict(list, a=[torch.ones(2)]), Counter({float("nan"): 2, (1, float("nan")): 1})),
        {float("nan"), 1, "a", np.float32(_NAN), frozenset([float("nan")]), range(3)},
    ]


@table(("one", "other"), zip(values(), values(), strict=True))
def test_a_value_is_the_same_as_one_made_alike(one: Any, other: Any) -> None:
    assert same_value(one, other)
    assert not same_value(one, None)
    assert not same_value(None, one)
    assert not same_value(one, [other])


@table(
    ("a", "b"),
    [
        *((1, True), (1, 1.0), (0.0, -0.0), (0j, complex(0, -0.0)), (np.float64(1), 1.0)),
        (np.zeros(2), np.zeros(2, np.float32)),
        (np.zeros(2), -np.zeros(2)),
        (np.zeros(2), np.zeros((2, 1))),
        *((np.zeros(2), np.zeros(2, ">f8")), (np.array([1, None]), np.array([1.0, None]))),
        (np.zeros(1), np.zeros(1).view(np.matrix)),
        *((_masked(True), _masked(False)), (_masked(False), np.arange(2))),
        *(([1], [1, 2]), ({"a": 1}, {"b": 1}), ({1: 2}, {True: 2}), ({0.0: 2}, {-0.0: 2})),
        *(({(1, 2): 2}, {(True, 2): 2}), (Counter({1: 2}), Counter({1.0: 2}))),
        *(({0.0}, {-0.0}), ({_NAN, 1}, {_NAN, True}), ({1}, frozenset([1]))),
        *((frozenset([1]), frozenset([True])), (frozenset([frozenset([1])]), frozenset([frozenset([True])]))),
        *((deque([1]), deque([True])), (deque([0.0]), deque([-0.0])), (deque([1]), deque([1], 2))),
        (deque([torch.ones(2)]), deque([torch.zeros(2)])),
        *((SimpleNamespace(a=0.0), SimpleNamespace(a=-0.0)), (Namespace(a=1), Namespace(a=True))),
        *((Namespace(a=1), SimpleNamespace(a=1)), (defaultdict(int, a=1), defaultdict(bool, a=True))),
        *((slice(0, 1), slice(0, True)), (range(0, 3, 2), range(0, 4, 2))),
        *((torch.zeros(2), -torch.zeros(2)), (torch.zeros(2), torch.zeros(2, dtype=torch.float64))),
        *((torch.zeros(2), torch.zeros(1, 2)), (torch.zeros(2), np.zeros(2, np.float32))),
        *((np.zeros(2, np.float32), torch.zeros(2)), ([torch.zeros(2)], [torch.ones(2)])),
        (torch.zeros(2, device="meta"), torch.zeros(2, device="meta")),
        (torch.zeros(2).to_sparse(), torch.zeros(2)),
        (_SPARSE, 2 * _SPARSE),
        (_SPARSE, _rows([1, 0], [0, 1])),
        (_rows([0, 1], [1, 0]), _rows([1, 0], [0, 1])),
        *((_quantized(0.5), _quantized(0.25)), (_by_channel(0.5, 0.25), _by_channel(0.5, 0.125))),
        (_nested([1], [0.0, 2]), _nested([1], [-0.0, 2])),
        (_nested([1], [0.0, 2]), _nested([1, 0.0], [2])),
        (_nested([1.0]), torch.tensor([[1.0]])),
        (_two(torch.ones(2), torch.ones(2)), _two(torch.ones(2), torch.zeros(2))),
        *((torch.float32, torch.float64), (Odd(), Odd())),
        (to_neutral(torch.ones(2), "here"), to_neutral(torch.zeros(2), "here")),
    ],
)
def test_a_value_is_not_the_same_as_one_of_another_type_or_of_other_bits(a: Any, b: Any) -> None:
    assert not same_value(a, b)
    assert not same_value(b, a)
    assert same_value(a, a)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@table("name", [name for name in ITEMSIZE if hasattr(torch, name)])
def test_tensors_of_every_dtype_are_compared_by_their_bytes(name: str) -> None:
    numel, dtype = ITEMSIZE[name], getattr(torch, name)
    one, same, other = (torch.full((numel,), n, dtype=torch.uint8).view(dtype) for n in (0, 0, 1))
    assert same_value(one, same)
    assert not same_value(one, other)


def _distributed() -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(4.0)
    one, other, apart = (
        distribute_tensor(tensor, mesh, [placement])
        for tensor, placement in ((whole, Cut(0)), (whole.clone(), Cut(0)), (whole, Replicate()))
    )
    changed = distribute_tensor(whole, mesh, [Cut(0)])
    if dist.get_rank():
        changed.to_local()[0] = 7
    return [same_value(one, it) for it in (other, apart, changed, whole)]


def test_a_distributed_tensor_is_compared_by_what_each_rank_holds() -> None:
    assert run(2, _distributed) == [[True, False, True, False], [True, False, False, False]]
