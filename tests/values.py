"""Values of every kind that a state may hold, in every bit, and blank ones of the same kind to load into.

`filled()` and `blank()` return states with the same entries and other contents.  `observed` describes a value
to the last bit: two values are the same if their descriptions are equal.
"""

from __future__ import annotations

import datetime
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from reknit.types.dtype import ITEMSIZE, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

DTYPES = [name for name in ITEMSIZE if hasattr(torch, name)]
ROWS, COLUMNS = 5, 3
EDGES = [0.1, -0.0, math.nan, -math.inf, 5e-324, 2.0**53 + 2]


def bits(dtype: str, content: int, rows: int = ROWS) -> torch.Tensor:
    """Return a tensor of any dtype with arbitrary bits: numbers of no value and of all signs among them."""
    count = rows * COLUMNS
    data = bytearray(random.Random(f"{dtype}{content}").randbytes(count * ITEMSIZE[dtype]))
    if dtype == "bool":
        data = bytearray(byte & 1 for byte in data)
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).reshape(rows, COLUMNS)


class Keeper:
    """An object that keeps its state dict as it is."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"deep": [self.state]}

    def load_state_dict(self, state: Any) -> None:
        (self.state,) = state["deep"]


def numbers(content: int) -> dict[str, Any]:
    """Return Python's own numbers and texts, at the limits of their types."""
    if not content:
        return {key: 7 for key in numbers(1)}
    floats = {f"float{number}": value for number, value in enumerate(EDGES)}
    return floats | {
        "zero": 0,
        "large": 2**70,
        "true": True,
        "complex": complex(-0.0, math.nan),
        "text": "é\0\n",
        "empty": "",
        "bytes": bytes(range(256)),
        "none": None,
        "date": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        "dtype": torch.bfloat16,
    }


def arrays(content: int) -> dict[str, Any]:
    """Return arrays and scalars of NumPy."""
    fill = np.arange(6) + 10 * content
    names = ["bool", "int8", "uint16", "int64", "float16", "float32", "float64", "complex128", "bfloat16"]
    found: dict[str, Any] = {name: fill.astype(numpy_dtype(name)).reshape(2, 3) for name in names}
    return found | {
        "swapped": fill.astype(">f4"),
        "columns first": np.asfortranarray(fill.reshape(2, 3) / 7),
        "every second": (np.arange(12) / 7 + content)[::2],
        "no dimensions": np.array(0.1 * content),
        "no elements": np.zeros((0, 3)),
        "scalar": np.float32(0.1) if content else np.float32(3),
        "date": np.datetime64("2026-01-02") if content else np.datetime64("2000-01-01"),
    }


def containers(content: int) -> dict[str, Any]:
    """Return containers of every type, with keys that look like paths."""
    if not content:
        return {key: [] for key in containers(1)}
    return {
        "list": [1, [2.5, ("x", None)], {}],
        "tuple": (),
        "set": {1, 2},
        "counter": [Counter("aab")],
        "deque": deque([1, 2], 2),
        "ordered": [OrderedDict(b=1, a=2)],
        "default": [defaultdict(list, a=[1])],
        "a/b~c": 1,
        "": 2,
        "0": 3,
    }


def tensors(content: int) -> dict[str, Any]:
    """Return tensors of every dtype, and of every form in memory."""
    found: dict[str, Any] = {name: bits(name, content) for name in DTYPES}
    tied = bits("float32", content)
    return found | {
        "no dimensions": torch.tensor(0.1 * content, dtype=torch.float64),
        "no elements": torch.empty(0, 3),
        "transposed": bits("float64", content).t(),
        "every second": bits("float32", content, rows=8)[::2],
        "channels last": torch.full((1, 2, 3, 4), float(content)).to(memory_format=torch.channels_last),
        "conjugated": torch.complex(torch.ones(3) * content, torch.ones(3)).conj()
        if content
        else torch.zeros(3) * 1j,
        "parameter": nn.Parameter(bits("bfloat16", content)),
        "tied": [tied, tied],
    }


def objects(content: int) -> dict[str, Any]:
    """Return objects with a state dict, which hold the other kinds."""
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0**content)
    for _ in range(3 * content):
        optimizer.step()
        scheduler.step()
    kinds = [numbers, arrays, containers, tensors]
    held = {kind.__name__: Keeper(kind(1) if content else None) for kind in kinds}
    return held | {"scheduler": scheduler, "scaler": scaler}


def optimizers(content: int) -> dict[str, Any]:
    """Return optimizers whose options are numbers and tensors, with states of any bits."""
    rates: dict[str, Any] = {
        "number": 0.1 * content,
        "float32": torch.tensor(0.1 * content),
        "float64": torch.tensor(0.1 * content, dtype=torch.float64),
    }
    found: dict[str, Any] = {}
    for name, rate in rates.items():
        parameters = nn.ParameterList(nn.Parameter(bits(dtype, content)) for dtype in ("float32", "bfloat16"))
        optimizer = torch.optim.Adam(parameters.parameters(), lr=rate, betas=(0.9, 0.95 + content / 100))
        if content:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            for parameter, state in optimizer.state.items():
                state["exp_avg"].copy_(bits(str(parameter.dtype).removeprefix("torch."), 3))
        found[name] = optimizer
        found[f"{name} parameters"] = parameters
    return found


KINDS: list[Callable[[int], dict[str, Any]]] = [numbers, arrays, containers, tensors, objects, optimizers]


def filled() -> dict[str, Any]:
    """Return a state with values of every kind."""
    return {kind.__name__: kind(1) for kind in KINDS}


def blank() -> dict[str, Any]:
    """Return a state with the entries of `filled()`, and other contents."""
    return {kind.__name__: kind(0) for kind in KINDS}


def observed(value: Any) -> Any:
    """Return a description of a value as tuples and texts, which is equal only for equal bits."""
    kind = type(value).__name__
    if isinstance(value, DTensor):
        return kind, value.placements, tuple(value.shape), observed(value.to_local())
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg()
        if "float4" in str(value.dtype):
            plain = plain.view(torch.uint8)  # torch 2.8 copies only their bytes
        dense = plain.clone(memory_format=torch.contiguous_format)
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
        return kind, str(value.dtype), tuple(value.shape), value.requires_grad, data
    if isinstance(value, (np.ndarray, np.generic)):
        return kind, value.dtype.str, value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, (float, complex)):
        parts = (value.real, value.imag)
        return kind, struct.pack("<2d", *parts)
    if isinstance(value, dict):
        pairs: Iterable[Any] = value.items()
        return kind, tuple((repr(key), observed(inner)) for key, inner in pairs)
    if isinstance(value, (set, frozenset)):
        return kind, tuple(sorted(map(repr, value)))
    if isinstance(value, (list, tuple, deque)):
        return kind, getattr(value, "maxlen", None), tuple(observed(inner) for inner in value)
    if isinstance(value, torch.optim.Optimizer):
        return kind, tuple(sorted((path, observed(leaf)) for path, leaf in leaves(value.state_dict())))
    if callable(getattr(value, "state_dict", None)):
        return kind, observed(value.state_dict())
    return kind, repr(value)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested containers, each with its path."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{path}/{key}")
    else:
        yield path, value


def differing(a: Any, b: Any, path: str = "") -> list[str]:
    """Return the paths of the innermost values that are not the same in two states."""
    if observed(a) == observed(b):
        return []
    if type(a) is type(b) and isinstance(a, dict) and a.keys() == b.keys():
        return [line for key in a for line in differing(a[key], b[key], f"{path}/{key}")]
    if type(a) is type(b) and isinstance(a, (list, tuple)) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [line for number, (x, y) in pairs for line in differing(x, y, f"{path}/{number}")]
    return [path]
