"""The values in a pickle of torch: tensors as views of storages, and everything else in a neutral form."""

from __future__ import annotations

import argparse
import datetime
import pathlib
import re
import types
from collections import Counter
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reknit.errors import FormatError, shown
from reknit.integrations.formats.pickles import (
    MOST_MEMBERS,
    Global,
    PickledObject,
    Unreadable,
    UnreadError,
    Vocabulary,
    lost_in,
)
from reknit.plugins.format import ITEMSIZE, MAX_NDIM, Tagged, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


MAX_NBYTES = (1 << 63) - 1
_CODE = re.compile(r"[biufc][0-9]{1,2}|[US][1-9][0-9]{0,6}")
"""Codes of the types of NumPy that are read: numbers, and texts and bytes of a fixed size."""


def is_count(number: Any) -> bool:
    """Return whether a value is a number of bytes or elements."""
    return type(number) is int and 0 <= number <= MAX_NBYTES


def shape_of(shape: Any) -> tuple[int, ...]:
    """Return a shape as a tuple.  Raises `FormatError` for anything else."""
    if not isinstance(shape, tuple | list) or len(shape) > MAX_NDIM or not all(map(is_count, shape)):
        raise FormatError("a pickle has an impossible shape")
    return tuple(shape)


def _numpy_scalar(kind: Any, data: Any) -> Any:
    dtype = dtype_from(kind)
    if type(data) is not bytes or len(data) != dtype.itemsize:
        raise FormatError("a pickle has an impossible value of NumPy")
    return np.frombuffer(data, dtype)[0]


def dtype_from(made: Any) -> np.dtype[Any]:
    """Return the dtype of a pickled one: numbers and texts in either order of bytes."""
    code = (
        made.args[0] if isinstance(made, PickledObject) and made.name == "numpy.dtype" and made.args else ""
    )
    if type(code) is not str or not _CODE.fullmatch(code):
        raise UnreadError(f"a pickle has data of NumPy of the type {shown(code)}, which reknit does not read")
    order = made.state[1] if isinstance(made.state, tuple) and len(made.state) > 1 else "="
    try:
        return np.dtype(f"{order if order in ('<', '>') else '='}{code}")
    except TypeError as error:
        raise FormatError(f"a pickle has data of NumPy of the type {shown(code)}") from error


def numpy_array(made: PickledObject) -> np.ndarray[Any, Any]:
    """Return the array of NumPy that a pickle holds with its bytes.  Raises `FormatError`."""
    state = made.state
    if not isinstance(state, tuple) or len(state) != 5:
        raise FormatError("a pickle has an array of NumPy without its values")
    return _array(state[4], state[2], state[1], is_fortran=bool(state[3]))


def _array(data: Any, kind: Any, shape: Any, *, is_fortran: bool) -> np.ndarray[Any, Any]:
    shape, dtype = shape_of(shape), dtype_from(kind)
    if not isinstance(data, bytes) or prod(shape) * dtype.itemsize != len(data):
        raise FormatError("a pickle has an array of NumPy with another number of bytes than its shape")
    array: np.ndarray[Any, Any] = np.frombuffer(data, dtype).reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="))


def _from_buffer(data: Any, kind: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    return _array(data, kind, shape, is_fortran=order == "F")


_CORES = ("core", "_core")
ARRAYS = frozenset(f"numpy.{core}.multiarray._reconstruct" for core in _CORES)
"""The names of the function that makes the arrays whose state has their values."""
NUMPY: dict[str, Callable[..., Any]] = {
    **{f"numpy.{core}.multiarray.scalar": _numpy_scalar for core in _CORES},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in _CORES},
}
"""The functions of NumPy that a pickle may call; protocol 5 has arrays as buffers."""


def _table(*args: Any) -> dict[Any, Any]:
    if args and not (len(args) == 1 and (args[0] is None or isinstance(args[0], Global))):
        raise UnreadError("a pickle makes a table of something else than items")
    return {}


def _counter(*args: Any) -> dict[Any, Any]:
    counted = args[0] if len(args) == 1 else None if args else {}
    if type(counted) is not dict or not all(type(number) in (int, float) for number in counted.values()):
        raise UnreadError("a pickle counts something else than in numbers")
    return Counter(counted)


def _deque(*args: Any) -> list[Any]:
    """Return the members; the length that a deque is limited to is left out."""
    if args and type(args[0]) not in (list, tuple):
        raise UnreadError("a pickle makes a deque of something else than a list")
    return [*args[0]] if args else []


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise UnreadError("a pickle encodes something else than bytes")
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


def _path(*parts: Any) -> pathlib.PurePosixPath:
    if not all(type(part) is str for part in parts):
        raise FormatError("a pickle has a path that is not text")
    return pathlib.PurePosixPath(*parts)


def _time_of(kind: Callable[..., Any]) -> Callable[..., Any]:
    """Return the builder of times: the bytes of one, and the offset of its zone from UTC."""

    def build(data: Any, *zone: Any) -> Any:
        if type(data) is not bytes or not all(type(one) is datetime.timezone for one in zone):
            raise UnreadError("a pickle has a time in a zone without a fixed offset, or without its bytes")
        return kind(data, *zone)

    return build


def _interval(*parts: Any) -> datetime.timedelta:
    if not all(type(part) is int for part in parts):
        raise FormatError("a pickle has an interval that is not in whole microseconds")
    return datetime.timedelta(*parts)


def _zone(offset: Any, *name: Any) -> datetime.timezone:
    if type(offset) is not datetime.timedelta or not all(type(one) is str for one in name):
        raise FormatError("a pickle has a zone without an offset")
    return datetime.timezone(offset, *name)


PLAIN: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _table,
    "collections.defaultdict": _table,
    "collections.Counter": _counter,
    "collections.deque": _deque,
    "_codecs.encode": _encode,
    "builtins.bytearray": _bytes,
    "builtins.bytes": _bytes,
    "builtins.complex": _complex,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "pathlib.PosixPath": _path,
    "pathlib.PurePosixPath": _path,
    "pathlib._local.PosixPath": _path,
    "pathlib._local.PurePosixPath": _path,
    "datetime.date": _time_of(datetime.date),
    "datetime.datetime": _time_of(datetime.datetime),
    "datetime.time": _time_of(datetime.time),
    "datetime.timedelta": _interval,
    "datetime.timezone": _zone,
}
"""The functions and classes of Python that a pickle may call.

Sets are built of members that the machine has checked to be safe to hash.
"""


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
    if not isinstance(kind, Global) or not isinstance(key, str) or not is_count(numel):
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
    if not all(map(is_count, (first, *sides[0], *sides[1]))) or len(sides[0]) != len(sides[1]):
        raise FormatError("a pickle has a tensor of an impossible shape")
    if len(sides[0]) > MAX_NDIM or prod(n for n in sides[0] if n) * ITEMSIZE[dtype] > MAX_NBYTES:
        raise FormatError("a pickle has a tensor with a shape that is too large")
    view = TensorView(storage, TensorSpec(sides[0], dtype), first, sides[1])
    if view.spec.numel and (first + view.reach) * view.spec.itemsize > storage.nbytes:
        raise FormatError("a pickle has a tensor that lies outside of its storage")
    return view


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
        raise UnreadError(f"a pickle has a tensor with {shown(rest[2])}, which reknit does not read")
    return tensor_in(storage, first, shape, strides)


def _tensor_v3(
    storage: Any, first: Any, shape: Any, strides: Any, *rest: Any
) -> TensorView:  # of the rest: trained or not, hooks, dtype, and properties
    if len(rest) < 3 or any(rest[3:]):
        raise UnreadError("a pickle has a tensor with properties that reknit does not read")
    return tensor_in(storage, first, shape, strides, dtype_of(rest[2]))


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _typed(function: Any, kind: Any, args: Any, _: Any = None) -> Any:
    known = _REBUILDERS.get(function.name) if isinstance(function, Global) else None
    is_parameter = isinstance(kind, Global) and kind.name in _PARAMETERS
    if known is None or not is_parameter or type(args) is not tuple or len(args) > MOST_MEMBERS:
        raise FormatError(f"a pickle has a tensor of the class {shown(getattr(kind, 'name', kind))}")
    return lost_in(args) or known(*args)


def _device(kind: Any, number: Any = None) -> Tagged:
    if type(kind) is not str or len(kind) > MOST_MEMBERS or not (number is None or is_count(number)):
        raise FormatError("a pickle has an impossible device")
    return Tagged("torch.device", kind if number is None else f"{kind}:{number}")


def _layout(name: Any) -> Global:
    if type(name) is not str:
        raise FormatError("a pickle has a layout without a name")
    return Global(name)


_REBUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": tensor_in,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
}
BUILDERS: dict[str, Callable[..., Any]] = {
    **_REBUILDERS,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch.Size": shape_of,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    **PLAIN,
    **NUMPY,
}
"""The functions that a pickle of torch may call."""

_NAMESPACES = {"argparse.Namespace": argparse.Namespace, "types.SimpleNamespace": types.SimpleNamespace}
_CLASSES = frozenset({"numpy.dtype", "_io.BytesIO", *_NAMESPACES}) | ARRAYS
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


def attributes_of(value: Any) -> dict[Any, Any] | None:
    """Return the attributes of a pickled namespace, None for any other value."""
    if not isinstance(value, PickledObject) or value.name not in _NAMESPACES or value.args:
        return None
    state = {} if value.state is None else value.state
    return state if type(state) is dict and all(type(key) is str for key in state) else None


def namespace_of(value: PickledObject, attributes: dict[str, Any]) -> Any:
    """Return the namespace of the class of a pickled one, with these attributes."""
    made = _NAMESPACES[value.name]()
    vars(made).update(attributes)
    return made


def neutral(value: Any) -> Any:
    """Return a value of a pickle in the form that reknit stores.  Raises `UnreadError` for others."""
    if isinstance(value, Unreadable):
        raise UnreadError(value.why)
    if isinstance(value, Global):
        name = value.name.removeprefix("torch.")
        return Tagged("torch.dtype", name) if name in ITEMSIZE else value.name
    if isinstance(value, StorageRef):
        raise UnreadError("a pickle has a storage of torch outside of a tensor")
    if not isinstance(value, PickledObject):
        return value
    if value.name in ARRAYS:
        return numpy_array(value)
    if value.name == "numpy.dtype":
        return dtype_from(value)
    if value.name == "_io.BytesIO" and isinstance(value.state, tuple) and type(value.state[0]) is bytes:
        return value.state[0]
    if value.state is None and len(value.args) == 1 and type(value.args[0]) in (int, str):
        return f"{value.name}({value.args[0]!r})"  # of an enumeration
    raise UnreadError(f"a pickle has a {shown(value.name)}, which is not a value that reknit stores")


def neutral_keys(table: dict[Any, Any]) -> dict[Any, Any]:
    """Return a table with texts in place of keys that are names, such as dtypes, or tuples of names.

    Raises `UnreadError` for a key that needs another package, `FormatError` if two keys have one text.
    """
    if not any(isinstance(key, tuple | Tagged | Unreadable) for key in table):
        return table
    made = {_neutral_key(key): value for key, value in table.items()}
    if len(made) < len(table):
        raise FormatError("a pickle has a table in which a name and its text are keys")
    return made


def _neutral_key(key: Any) -> Any:
    """Return a key with names as texts; a tuple of names is written as torch prints it."""
    return _text(key) if _is_named(key) else key


def _is_named(key: Any) -> bool:
    """Return whether a key is a name, or has one among its members.  Raises `UnreadError`."""
    if isinstance(key, Unreadable):
        raise UnreadError(key.why)
    return isinstance(key, Global | Tagged) or (type(key) is tuple and any([*map(_is_named, key)]))


def _text(key: Any) -> str:
    if type(key) is tuple:
        return f"({', '.join(map(_text, key))})"
    return key.name if isinstance(key, Global) else str(key.value) if isinstance(key, Tagged) else repr(key)
