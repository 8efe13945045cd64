"""The values in a pickle of torch: tensors as views of storages, and everything else in a neutral form."""

from __future__ import annotations

import argparse
import pathlib
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.errors import FormatError, shown
from reknit.format.foreign.safe_pickle import (
    LARGEST_KEY,
    MOST_MEMBERS,
    Global,
    PickledObject,
    Unreadable,
    UnreadError,
    Vocabulary,
)
from reknit.types.dtype import ITEMSIZE
from reknit.types.shard import MAX_NDIM, Tagged, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_NBYTES = (1 << 63) - 1

_STORAGES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
}
_UNTYPED = frozenset({"torch.storage.UntypedStorage", "torch.UntypedStorage"})
_PARAMETERS = frozenset({"torch.nn.parameter.Parameter", "torch.Tensor", "torch.nn.parameter.Buffer"})


class StorageRef(NamedTuple):
    """A storage of torch, by its key in the file: its dtype, and its size in bytes."""

    key: str
    dtype: str
    nbytes: int

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZE[self.dtype]


class TensorView(NamedTuple):
    """A tensor in a storage: its first element, and the strides of its dimensions in elements."""

    storage: StorageRef
    spec: TensorSpec
    first: int
    strides: tuple[int, ...]

    @property
    def start(self) -> int:
        """First byte in the storage."""
        return self.first * self.spec.itemsize

    @property
    def reach(self) -> int:
        """Number of elements from the first to the last, both included."""
        if not self.spec.numel:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.spec.shape, self.strides, strict=True))

    @property
    def is_dense(self) -> bool:
        """Whether its elements lie in row-major order, without holes."""
        expected = 1
        for n, stride in zip(reversed(self.spec.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != expected:
                return not self.spec.numel
            expected *= n
        return True


class Whole(NamedTuple):
    """A value that is kept as one, and not divided by its keys."""

    value: Any


def storage_of(pid: Any) -> StorageRef | Unreadable:
    """Return the storage that a persistent identifier names.  Raises `FormatError`."""
    if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage"):
        raise FormatError(f"a pickle refers to {shown(pid)}, which is not a storage of torch")
    kind, key, numel = pid[1], pid[2], pid[4]
    if isinstance(kind, Unreadable):
        return kind
    if not isinstance(kind, Global) or not isinstance(key, str) or not _is_count(numel):
        raise FormatError("a pickle has a storage without a type, a name or a size")
    if kind.name in _UNTYPED:
        dtype = "uint8"
    else:
        dtype = _STORAGES.get(kind.name.removeprefix("torch.").removesuffix("Storage"), "")
    if not dtype:
        raise FormatError(f"a pickle has a {shown(kind.name)}, a kind of storage that reknit does not have")
    return StorageRef(key, dtype, numel * ITEMSIZE[dtype])


def legacy_storage_of(pid: Any) -> StorageRef | Unreadable:
    """Return the storage that an identifier of a file without an archive names.  Raises `FormatError`."""
    if isinstance(pid, tuple) and len(pid) > 5 and pid[5] is not None:
        raise FormatError("a pickle has a view of a storage, as torch 0.3 and older wrote it")
    return storage_of(pid)


def tensor_in(storage: Any, first: Any, shape: Any, strides: Any, dtype: str | None = None) -> TensorView:
    """Return a tensor in a storage.  Raises `FormatError` if it does not lie inside."""
    if not isinstance(storage, StorageRef):
        raise FormatError("a pickle has a tensor without a storage")
    dtype = storage.dtype if dtype is None else dtype
    sides = [tuple(each) if isinstance(each, tuple | list) else (None,) for each in (shape, strides)]
    if not all(map(_is_count, (first, *sides[0], *sides[1]))) or len(sides[0]) != len(sides[1]):
        raise FormatError("a pickle has a tensor of an impossible shape")
    if len(sides[0]) > MAX_NDIM or prod(n for n in sides[0] if n) * ITEMSIZE[dtype] > MAX_NBYTES:
        raise FormatError("a pickle has a tensor with a shape that is too large")
    view = TensorView(storage, TensorSpec(sides[0], dtype), first, sides[1])
    if view.spec.numel and (first + view.reach) * view.spec.itemsize > storage.nbytes:
        raise FormatError("a pickle has a tensor that lies outside of its storage")
    return view


def _is_count(number: Any) -> bool:
    return type(number) is int and 0 <= number <= MAX_NBYTES


def dtype_of(value: Any) -> str:
    """Return the dtype that a name means.  Raises `UnreadError` for an unknown one, else `FormatError`."""
    if isinstance(value, Unreadable):
        raise UnreadError(value.why)
    name = value.name.removeprefix("torch.") if isinstance(value, Global) else ""
    if name not in ITEMSIZE:
        raise FormatError(f"a pickle has a tensor of the dtype {shown(name or value)}")
    return name


def _tensor_v2(
    storage: Any, first: Any, shape: Any, strides: Any, *rest: Any
) -> TensorView:  # of the rest: trained or not, hooks, properties
    if any(rest[2:]):
        raise FormatError(f"a pickle has a tensor with {shown(rest[2])}, which reknit does not read")
    return tensor_in(storage, first, shape, strides)


def _tensor_v3(
    storage: Any, first: Any, shape: Any, strides: Any, *rest: Any
) -> TensorView:  # of the rest: trained or not, hooks, dtype, and properties
    if len(rest) < 3 or any(rest[3:]):
        raise FormatError("a pickle has a tensor with properties that reknit does not read")
    return tensor_in(storage, first, shape, strides, dtype_of(rest[2]))


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _typed(function: Any, kind: Any, args: Any, _: Any = None) -> Any:
    known = BUILDERS.get(function.name) if isinstance(function, Global) else None
    is_parameter = isinstance(kind, Global) and kind.name in _PARAMETERS
    if known is None or not is_parameter or type(args) is not tuple or len(args) > MOST_MEMBERS:
        raise FormatError(f"a pickle has a tensor of the class {shown(getattr(kind, 'name', kind))}")
    lost = next((arg for arg in args if isinstance(arg, Unreadable)), None)
    return known(*args) if lost is None else lost


def _table(*args: Any) -> dict[Any, Any]:
    if args and not (len(args) == 1 and isinstance(args[0], Global)):
        raise FormatError("a pickle makes a table of something else than items")
    return {}


def _counter(*args: Any) -> dict[Any, Any]:
    if not args or type(args[0]) is not dict or not all(type(number) is int for number in args[0].values()):
        raise FormatError("a pickle counts something else than in integers")
    return Counter(args[0])


def _members(*args: Any) -> list[Any]:
    if len(args) == 1 and type(args[0]) is list and len(args[0]) <= 10_000:
        return args[0]
    raise FormatError("a pickle makes a container of something else than a short list")


def _set(*args: Any) -> set[Any]:
    members = _members(*args)
    if not all(type(one) is str or (type(one) is int and abs(one) < LARGEST_KEY) for one in members):
        raise FormatError("a pickle has a set of members that are neither texts nor integers")
    return set(members)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise FormatError("a pickle encodes something else than bytes")
    return text.encode("latin1")


def _bytes(*args: Any) -> bytes:
    if not args:
        return b""
    if len(args) == 1 and type(args[0]) is bytes:
        return args[0]
    return _encode(*args)


def _complex(real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise FormatError("a pickle has a complex number of something else than two numbers")
    return complex(real, imaginary)


def _size(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, tuple | list) or len(shape) > MAX_NDIM or not all(map(_is_count, shape)):
        raise FormatError("a pickle has an impossible shape")
    return tuple(shape)


def _device(kind: Any, number: Any = None) -> Tagged:
    if type(kind) is not str or not (number is None or _is_count(number)):
        raise FormatError("a pickle has an impossible device")
    return Tagged("torch.device", kind if number is None else f"{kind}:{number}")


def _path(*parts: Any) -> pathlib.PurePosixPath:
    if not all(type(part) is str for part in parts):
        raise FormatError("a pickle has a path that is not text")
    return pathlib.PurePosixPath(*parts)


def _numpy_scalar(kind: Any, data: Any) -> Any:
    dtype = _numpy_dtype(kind)
    if type(data) is not bytes or len(data) != dtype.itemsize:
        raise FormatError("a pickle has an impossible number of NumPy")
    return np.frombuffer(data, dtype)[0]


def _numpy_dtype(made: Any) -> np.dtype[Any]:
    """Return the dtype of a pickled one: numbers in either order of bytes."""
    code = (
        made.args[0] if isinstance(made, PickledObject) and made.name == "numpy.dtype" and made.args else ""
    )
    if type(code) is not str or len(code) > 4 or code[:1] not in "biufc" or not code[1:].isdigit():
        raise FormatError(f"a pickle has an array of {shown(code)}, which is not a kind of number")
    order = made.state[1] if isinstance(made.state, tuple) and len(made.state) > 1 else "="
    try:
        return np.dtype(f"{order if order in ('<', '>') else '='}{code}")
    except TypeError as error:
        raise FormatError(f"a pickle has an array of {shown(code)}") from error


def numpy_array(made: PickledObject) -> np.ndarray[Any, Any]:
    """Return the array of NumPy that a pickle holds with its bytes.  Raises `FormatError`."""
    state = made.state
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[4], bytes):
        raise FormatError("a pickle has an array of NumPy without its numbers")
    shape, dtype = _size(state[1]), _numpy_dtype(state[2])
    if prod(shape) * dtype.itemsize != len(state[4]):
        raise FormatError("a pickle has an array of NumPy with another number of bytes than its shape")
    array = np.frombuffer(state[4], dtype).reshape(shape, order="F" if state[3] else "C")
    return array.astype(dtype.newbyteorder("="))


BUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": tensor_in,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": lambda name: Global(str(name)),
    "collections.OrderedDict": _table,
    "collections.defaultdict": _table,
    "collections.Counter": _counter,
    "collections.deque": lambda *args: list(_members(*args[:1])) if args else [],
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytes,
    "builtins.bytes": _bytes,
    "builtins.set": _set,
    "builtins.frozenset": lambda *args: frozenset(_set(*args)),
    "builtins.complex": _complex,
    "pathlib.PosixPath": _path,
    "pathlib.PurePosixPath": _path,
    "pathlib._local.PosixPath": _path,
    **{f"numpy.{core}.multiarray.scalar": _numpy_scalar for core in ("core", "_core")},
}
"""The functions that a pickle of torch may call."""

_ARRAYS = frozenset(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core"))
_CLASSES = frozenset({"numpy.dtype", "argparse.Namespace", "_io.BytesIO"}) | _ARRAYS
_NAMES = frozenset(
    {
        *(f"torch.{dtype}" for dtype in ITEMSIZE),
        *(f"torch.{kind}Storage" for kind in _STORAGES),
        *_UNTYPED,
        *_PARAMETERS,
        "torch.strided",
        "torch.contiguous_format",
        "torch.preserve_format",
        "numpy.ndarray",
        *(f"builtins.{name}" for name in ("int", "float", "list", "dict", "str")),
    }
)
TORCH = Vocabulary(BUILDERS, _CLASSES, _NAMES)
"""The names that a file of torch.save may have."""


def more_words(classes: Iterable[str], vocabulary: Vocabulary = TORCH) -> Vocabulary:
    """Return a vocabulary with further classes."""
    return vocabulary._replace(classes=vocabulary.classes | frozenset(classes))


def neutral(value: Any) -> Any:
    """Return a value of a pickle in the form that reknit stores.  Raises `UnreadError` for others."""
    if isinstance(value, Unreadable):
        raise UnreadError(value.why)
    if isinstance(value, Global):
        name = value.name.removeprefix("torch.")
        return Tagged("torch.dtype", name) if name in ITEMSIZE else value.name
    if not isinstance(value, PickledObject):
        return value
    if value.name in _ARRAYS:
        return numpy_array(value)
    if value.name == "numpy.dtype":
        return _numpy_dtype(value)
    if value.name == "argparse.Namespace" and isinstance(value.state, dict):
        return argparse.Namespace(**{str(key): neutral(one) for key, one in value.state.items()})
    if value.name == "_io.BytesIO" and isinstance(value.state, tuple) and type(value.state[0]) is bytes:
        return value.state[0]
    if value.state is None and len(value.args) == 1 and type(value.args[0]) in (int, str):
        return f"{value.name}({value.args[0]!r})"  # of an enumeration
    raise UnreadError(f"a pickle has a {shown(value.name)}, which is not a value that reknit stores")
