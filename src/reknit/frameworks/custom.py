"""Frameworks of users: a class with three methods, and an entry point.

A class with the methods of `CustomFramework` returns the contents of a value, and puts loaded contents back.
It is registered by `register_framework`, or by the installed distribution that contains it::

    [project.entry-points."reknit.frameworks"]
    blocks = "my_package.checkpoints:Blocks"
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from msgspec import Struct

from reknit import plugins
from reknit.errors import ReknitError, StateError, UsageError, shortage
from reknit.frameworks.neutral import to_neutral
from reknit.frameworks.walk import Adapter
from reknit.frameworks.walk.walk import View
from reknit.keywords import checked_call
from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE, numpy_dtype
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from importlib.metadata import EntryPoint

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, Place, Walk

logger = logging.getLogger("reknit")

GROUP = "reknit.frameworks"
"""Name of the group of entry points that bring frameworks."""


@dataclass(frozen=True)
class Held:
    """A box of a named tensor, in this rank's memory.

    `name` is below the value's own place in the state.  Its levels are separated by ``/``; it is empty if the
    value itself is the tensor.  `shape` is that of the whole tensor, and `dtype` one of the names in
    `reknit.types.dtype.ITEMSIZE`.  The box begins at `offsets` and is as long as `lengths`; a tensor of which
    a rank has several boxes is several of these objects.  `memory` has the elements of the box.  It is a
    NumPy array or a torch tensor of that shape (any strides, any device), or an object with the buffer
    protocol or DLPack (contiguous).  It is read while a save lasts, and filled by a load.  `replicas` are the
    numbers of all ranks that hold this box with equal bytes, if the framework can determine them without
    communication.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    memory: Any
    replicas: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Value:
    """A named plain value: numbers, text, and nested dicts, lists and tuples of these."""

    name: str
    value: Any


class CustomFramework(Protocol):
    """The adapter of one kind of values that reknit does not support by itself."""

    def matches(self, value: Any) -> bool:
        """Return whether this framework is for the value.  It is called for every value in every state."""

    def holdings(self, value: Any, rank: int, size: int) -> Iterable[Held | Value]:
        """Return the parts of a value, tensors and plain values, that `rank` of `size` ranks holds.

        Sends no messages and changes nothing.  Several ranks may return the same box, with equal bytes.
        """

    def restore(self, value: Any, held: Sequence[Held], values: Mapping[str, Any]) -> None:
        """Take over the loaded contents: the memory of `held` is filled, and `values` are by name.

        Both contain the loaded results of `holdings`.  Memory that belongs to the value is already
        restored.
        """


registered_frameworks: list[CustomFramework] = []


@checked_call
def register_framework(framework: CustomFramework) -> None:
    """Register a framework for all later saves and loads of this process; the first that matches is taken.

    Raises `UsageError` if a method of `CustomFramework` is missing.
    """
    _require_methods(framework, "register_framework was called with")
    if not any(known is framework for known in registered_frameworks):
        registered_frameworks.append(framework)


@contextmanager
def registered(framework: CustomFramework) -> Iterator[None]:
    """Register a framework inside the `with` block, before all others."""
    _require_methods(framework, "registered was called with")
    registered_frameworks.insert(0, framework)
    try:
        yield
    finally:
        registered_frameworks.remove(framework)


def adapters() -> tuple[Adapter, ...]:
    """Return the adapters of custom frameworks, in the order of their registration."""
    return tuple(CustomAdapter(framework) for framework in (*registered_frameworks, *installed_frameworks()))


@cache
def installed_frameworks() -> tuple[CustomFramework, ...]:
    """Return the frameworks of installed distributions, loaded once per process."""
    return tuple(map(_loaded, plugins.installed(GROUP).values()))


def _loaded(entry: EntryPoint) -> CustomFramework:
    """Return the framework of an entry point, or one that refuses the objects of a wrong entry point."""
    try:
        found = plugins.loaded(entry)
        framework = found() if isinstance(found, type) else found
        _require_methods(framework, f"{plugins.shown_entry(entry)}, which")
    except Exception as error:  # of the class, when it is called
        wrong = shortage(error) or error
        if not isinstance(wrong, ReknitError):
            wrong = UsageError(
                f"{plugins.shown_entry(entry)}, which cannot be used: {type(error).__name__}: {error}",
                remedy=plugins.remedy_for(entry),
            )
        logger.error("objects of this framework are refused: %s", wrong)  # noqa: TRY400 (it has all)
        return _Unusable(entry.value.partition(":")[0].partition(".")[0], wrong)
    return cast("CustomFramework", framework)


class _Unusable:
    """In place of a framework that cannot be used: the objects of its package are refused, and no others."""

    def __init__(self, package: str, error: ReknitError) -> None:
        self._package, self._error = package, error

    def matches(self, value: Any) -> bool:
        """Return whether the class of a value, or one that it extends, is of the package."""
        return any(kind.__module__.partition(".")[0] == self._package for kind in type(value).__mro__)

    def holdings(self, value: Any, rank: int, size: int) -> Iterable[Held | Value]:
        """Raise the error."""
        raise self._error

    def restore(self, value: Any, held: Sequence[Held], values: Mapping[str, Any]) -> None:
        """Raise the error."""
        raise self._error


def _require_methods(framework: Any, what: str) -> None:
    names = ("matches", "holdings", "restore")
    missing = [name for name in names if not callable(getattr(framework, name, None))]
    if missing or isinstance(framework, type):
        is_class = isinstance(framework, type)
        lacks = "is a class and not an object of it" if is_class else f"has no {missing[0]}"
        raise UsageError(
            f"{what} {type(framework).__name__} {lacks}",
            remedy="a framework is an object with the methods matches, holdings and restore",
        )


class CustomAdapter(Adapter):
    """The values of one custom framework."""

    def __init__(self, framework: CustomFramework) -> None:
        self._framework = framework

    def matches(self, value: Any) -> bool:
        """Return whether the framework matches the value."""
        return bool(self._framework.matches(value))

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the tensors and values that the framework returns for this rank."""
        tensors, values = self._read(value, place, saving)
        for tensor in tensors:
            saving.view(tensor.view(value), tensor.place, value)
        for at, one in values:
            saving.blob(to_neutral(one.value, str(at)), at)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request the tensors and values of the framework on this rank, and hand over the loaded ones."""
        tensors, values = self._read(value, place, loading)
        held: list[Held] = []
        found: dict[str, Any] = {}
        for tensor in tensors:
            if loading.takes(tensor.place):
                loading.view(tensor.view(value), tensor.place, value)
                if loading.comes(tensor.place, tensor.spec):
                    held += tensor.held
        for at, one in values:
            if loading.takes(at):
                answer = loading.value(at)
                if answer.why is None:
                    found[one.name] = answer.value
        if held:
            loading.later(lambda: self._framework.restore(value, held, found))
        elif found:  # no live memory is filled for it
            loading.early(lambda: self._framework.restore(value, held, found))

    def _read(self, value: Any, place: Place, walk: Walk) -> tuple[list[_Tensor], list[tuple[Place, Value]]]:
        """Return the tensors and values that the framework returns for this rank, checked, by name."""
        world = walk.world
        tensors: dict[str, _Tensor] = {}
        values: list[tuple[Place, Value]] = []
        for one in self._framework.holdings(value, world.rank, world.size):
            if not isinstance(one, (Held, Value)):
                raise self._wrong(place, f"returned a {type(one).__name__}", "return Held and Value objects")
            at = self._at(place, one.name)
            if isinstance(one, Value):
                values.append((at, one))
                continue
            spec, box = self._spec(one, at), Box(tuple(one.offsets), tuple(one.lengths))
            tensor = tensors.setdefault(one.name, _Tensor(at, spec, [], []))
            if tensor.spec != spec:
                raise self._wrong(
                    at, f"gave it as {tensor.spec} and as {spec}", "a name has one shape and one dtype"
                )
            tensor.held.append(one)
            tensor.parts.append((box, self._memory(one, at, fill=walk.fills)))
        return list(tensors.values()), values

    def _at(self, place: Place, name: object) -> Place:
        if not isinstance(name, str) or (name and not all(name.split("/"))):
            raise self._wrong(place, f"used the name {name!r}", "a name is text, with levels parted by one /")
        return place.child(*name.split("/")) if name else place

    def _spec(self, held: Held, at: Place) -> TensorSpec:
        """Return the spec of the whole tensor.  Raises `StateError` for a box outside of it."""
        if held.dtype not in ITEMSIZE:
            raise self._wrong(at, f"gave it the dtype {held.dtype!r}", f"use one of {', '.join(ITEMSIZE)}")
        shape = tuple(held.shape)
        box = Box(tuple(held.offsets), tuple(held.lengths))
        if not len(box.offsets) == len(box.lengths) == len(shape) or not box.fits(shape):
            raise self._wrong(
                at,
                f"put a box at {list(held.offsets)} of lengths {list(held.lengths)} into the shape "
                f"{list(shape)}",
                "a box lies inside its tensor",
            )
        return TensorSpec(shape, held.dtype)

    def _memory(self, held: Held, at: Place, *, fill: bool) -> Any:
        """Return the memory of a box as an array.  Raises `StateError` if it does not fit the box."""
        try:
            data = _array(held)
        except (TypeError, ValueError, BufferError, RuntimeError) as error:
            raise shortage(error) or self._wrong(
                at,
                f"gave memory of type {type(held.memory).__name__} that is not an array: {error}",
                "give a NumPy array, a torch tensor, or a contiguous buffer",
            ) from error
        dtype = str(data.dtype).removeprefix("torch.")
        if tuple(data.shape) != tuple(held.lengths) or dtype not in _names(held.dtype):
            raise self._wrong(
                at,
                f"gave memory of {dtype}{list(data.shape)} for a box of {held.dtype}{list(held.lengths)}",
                "memory has the elements of its box",
            )
        if not isinstance(data, np.ndarray) and (data.is_conj() or data.is_neg()):
            raise self._wrong(
                at,
                "gave a conjugate or negative view; the values of a view differ from its memory",
                "give tensor.resolve_conj().resolve_neg(), and take it over in restore",
            )
        if fill and isinstance(data, np.ndarray) and not data.flags.writeable:
            raise self._wrong(
                at, "gave memory that is read-only", "give a writable copy, and take it over in restore"
            )
        return data

    def _wrong(self, at: Place, what: str, remedy: str) -> StateError:
        return StateError(f"the framework {type(self._framework).__name__} {what} for {at}", remedy=remedy)


class _Tensor(Struct, frozen=True):
    """All boxes of one tensor, as the framework returned them, each with its memory."""

    place: Place
    spec: TensorSpec
    held: list[Held]
    parts: list[tuple[Box, Any]]

    def view(self, value: Any) -> View:
        """Return the view of the tensor."""
        key = ("custom", id(value), self.place.fqn)
        holders = tuple(held.replicas for held in self.held)
        return View(self.spec, tuple(self.parts), None, key, holders=holders)


def _names(dtype: str) -> tuple[str, ...]:
    """Return the names that arrays may use for a dtype: NumPy stores some dtypes as plain bytes."""
    return dtype, str(numpy_dtype(dtype))


def _array(held: Held) -> Any:
    """Return memory as an array, without a copy."""
    memory, torch = held.memory, sys.modules.get("torch")
    if isinstance(memory, np.ndarray):
        return memory.view(np.ndarray)
    if torch is not None and isinstance(memory, torch.Tensor):
        return memory.detach()
    if not hasattr(memory, "__dlpack__"):
        flat: Any = np.frombuffer(memory, dtype=numpy_dtype(held.dtype))
        return flat.reshape(held.lengths) if flat.size == prod(held.lengths) else flat
    return np.from_dlpack(memory) if torch is None else torch.from_dlpack(memory)
