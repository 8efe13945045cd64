"""Plain states: arrays become tensors, containers are split by their keys, and the rest are values."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, MutableSequence
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import StateError
from reknit.frameworks import tree
from reknit.frameworks.neutral import to_neutral
from reknit.frameworks.numbers import from_element, is_number, like, read_as
from reknit.frameworks.walk import Adapter
from reknit.frameworks.walk.own_code import SETTLED, is_loader_state, taker_of
from reknit.frameworks.walk.walk import View, first_match
from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE, is_function, numpy_dtype
from reknit.types.shard import MAPPING, TensorSpec
from reknit.types.small import REBUILT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, Place, Walk, World

    Child = tuple[Any, Any, Place]


class NumpyArrays:
    """NumPy's tensors: arrays of a dtype that reknit stores.  Others (text, dates, objects) are values."""

    library = "numpy"

    def matches(self, value: Any) -> bool:
        """Return whether this is an array of numbers."""
        return isinstance(value, np.ndarray) and ITEMSIZE.get(value.dtype.name) == value.dtype.itemsize

    def view(self, tensor: Any, place: Place, world: World, *, fill: bool) -> View:
        """Return the view of an array.

        Raises `StateError` for an array that may hold more than numbers, and for a read-only one with `fill`.
        """
        if type(tensor) not in _ARRAYS:
            if isinstance(tensor, np.ma.MaskedArray):
                raise StateError(f"{place} is a masked array", remedy="save its .data and .mask")
            raise StateError(
                f"{place} is a {type(tensor).__name__}, an array that may hold more than numbers",
                remedy="save numpy.asarray() of it, and its other contents as values of their own",
            )
        if fill and not tensor.flags.writeable:
            raise StateError(f"{place} is a read-only array", remedy="load into a copy of it")
        if fill and not tensor.flags.c_contiguous and not _is_distinct(tensor):
            raise StateError(
                f"{place} is an overlapping array: several of its elements share memory",
                remedy="load into a copy of it",
            )
        base: NDArray[Any] = tensor.view(np.ndarray)
        spec = TensorSpec(base.shape, base.dtype.name)
        settle: Callable[[], None] | None = None
        data = base
        if not base.dtype.isnative:
            data = base.astype(base.dtype.newbyteorder("="))
            settle = (lambda: np.copyto(base, data)) if fill else None
        return View(spec, ((Box.whole(base.shape), data),), world.alone, _memory(tensor, base), settle)

    def opened(self, tensor: Any, place: Place, world: World, *, fill: bool) -> None:
        """Return None: an array has memory of its own."""

    def changed(self, memories: Iterable[Any]) -> None:
        """Do nothing: NumPy does not count changes of memory."""

    def form(self, tensor: Any) -> TensorSpec:
        """Return shape and dtype of an array."""
        return TensorSpec(tensor.shape, tensor.dtype.name)

    def fresh(self, spec: TensorSpec, like: Any = None) -> Any:
        """Return a new array."""
        return np.empty(spec.shape, numpy_dtype(spec.dtype))


def _is_distinct(array: NDArray[Any]) -> bool:
    """Return whether no two elements of an array share memory."""
    from reknit.frameworks.walk import overlap  # a save needs none of it

    return overlap.is_distinct(array.shape, array.strides)


_ARRAYS = frozenset({np.ndarray, np.memmap, np.matrix})
"""Types of arrays that hold numbers alone.  A load fills such an array in place, and its type stays."""


def _memory(tensor: Any, base: NDArray[Any]) -> tuple[Any, ...]:
    if not base.size:
        return ("numpy", id(tensor))
    return (
        "numpy",
        base.__array_interface__["data"][0],
        base.shape,
        base.strides,
        base.dtype.str,
        base.dtype.name,
    )


class TensorAdapter(Adapter):
    """Tensors of any library, which are saved and filled in place."""

    def __init__(self, libraries: tuple[Any, ...]) -> None:
        self._libraries = libraries

    def matches(self, value: Any) -> bool:
        """Return whether this is a tensor of one of the libraries."""
        return any(library.matches(value) for library in self._libraries)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the tensor."""
        saving.tensor(value, place)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Fill the tensor in place."""
        loading.tensor(value, place)


class ContainerAdapter(Adapter):
    """Mappings, split by key, and lists and tuples with live contents, split by index.

    Named tuples are split by the names of their fields, in every case.
    """

    def matches(self, value: Any) -> bool:
        """Return whether this is a container that may be split."""
        return isinstance(value, (Mapping, list, tuple))

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the contents, or the whole container as one value."""
        if _is_value(value, saving):
            # Only the keys of a mapping are saved: its type comes from the target.
            foreign = isinstance(value, Mapping) and type(value) not in REBUILT
            saving.blob({} if foreign else to_neutral(value, str(place)), place)
            return
        _enter(value, place, saving)
        if not value:  # a class without fields keeps its place, which other programs count
            saving.blob(None, place)
        if isinstance(value, Mapping) and tree.is_numbered(value):
            saving.blob(None, place.below(MAPPING))
        united = is_united(value, saving)
        for key, inner in tree.children(value):
            saving.visit(inner, place if united else place.child(key))

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request the contents, or the whole container as one value."""
        if is_loader_state(value) and taker_of(value, place, loading, value) is SETTLED:
            return
        if _is_value(value, loading):
            want_value(value, place, loading, assign)
            return
        _enter(value, place, loading)
        inside = tree.children(value)
        places = loading.saved.children(place, [key for key, _ in inside])
        children = [(*each, at) for each, at in zip(inside, places, strict=True)]
        if not children:
            loading.leave_empty(place)
        loading.leave_nones(place, (key for key, _ in inside))
        if is_united(value, loading):
            for inner in value:
                loading.visit(inner, place, None)
        elif isinstance(value, tuple) or not _is_first(value, loading):
            if tree.is_named(value):
                children = filled_fields(children, loading)
            want_successor(children, partial(_with, value), loading, assign)
        else:
            for key, inner, at in children:
                if type(inner) in loading.kinds:
                    loading.tensor(inner, at)
                else:
                    loading.visit(inner, at, setter(value, key))


def filled_fields(children: Iterable[Child], loading: Loading) -> list[Child]:
    """Return the fields of a class, without each None that has no saved value.

    None is an empty part of a tree and needs no value; a saved value takes its place.
    """
    return [
        (key, inner, place)
        for key, inner, place in children
        if inner is not None or not loading.takes(place) or not loading.saved.lacks(place)
    ]


def want_successor(
    children: Iterable[Child], make: Callable[[dict[Any, Any]], Any], loading: Loading, assign: Assign
) -> None:
    """Request the contents of an immutable container: key, child and place of each.

    If any of them is replaced, the container is replaced, too: by the result of `make` for the new children.
    """
    fresh: dict[Any, Any] = {}

    def put(key: Any) -> Assign:
        return None if assign is None else lambda new: fresh.__setitem__(key, new)

    for key, inner, place in children:
        loading.visit(inner, place, put(key))
    loading.later(lambda: assign(make(fresh)) if assign is not None and fresh else None)


def _enter(container: Any, place: Place, walk: Walk) -> None:
    """Count a container, and refuse a kind that cannot be rebuilt with other contents."""
    walk.enter(place)
    if isinstance(container, tuple) and type(container) is not tuple and not tree.is_named(container):
        raise StateError(
            f"{place} is a {type(container).__name__}, which derives from tuple",
            remedy="make it a tuple, or a named tuple",
        )


def _is_first(container: Any, loading: Loading) -> bool:
    """Return whether this is the first place of a container; only there it may be changed in place.

    A container that the target has twice may get other contents at each place.
    """
    key = ("container", id(container))
    first = key not in loading.memo
    loading.memo[key] = container  # kept alive, so that no other object gets its id
    return first


def _with(container: Any, fresh: dict[Any, Any]) -> Any:
    """Return a copy of a container with some children replaced."""
    if isinstance(container, tuple):
        return tree.retuple(container, [fresh.get(key, inner) for key, inner in tree.children(container)])
    changed = copy(container)
    for key, inner in fresh.items():
        changed[key] = inner
    return changed


def setter(container: Any, key: Any) -> Assign:
    """Return a function that puts another value into a container, or None if it is immutable."""
    if isinstance(container, (dict, list, MutableMapping, MutableSequence)):  # the usual ones first, by type
        return lambda new: container.__setitem__(key, new)
    return None


def _is_value(value: Any, walk: Walk) -> bool:
    """Return whether a container is saved as one value: an empty mapping, a sequence of plain data."""
    if isinstance(value, Mapping):
        return not value
    return not tree.any_leaf(value, lambda leaf: tree.is_named(leaf) or is_live(leaf, walk))


def is_live(value: Any, walk: Walk) -> bool:
    """Return whether a value is more than plain data: a tensor, a module, an object with a state."""
    return not isinstance(first_match(walk.adapters, value), (ContainerAdapter, ValueAdapter))


def is_united(value: Any, walk: Walk) -> bool:
    """Return whether a sequence has the parts of one object (pipeline stages, their optimizers)."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    first, *others = (first_match(walk.adapters, inner) for inner in value)
    return first.unites and all(adapter is first for adapter in others)


class ValueAdapter(Adapter):
    """All other values: the checkpoint's blob codec encodes them, or refuses them by name."""

    def matches(self, value: Any) -> bool:
        """Return True: this adapter is the last one."""
        return True

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the value."""
        saving.blob(to_neutral(value, str(place)), place)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request the value."""
        want_value(value, place, loading, assign)


def want_value(target: Any, place: Place, loading: Loading, assign: Assign) -> None:
    """Request a value that takes the place of `target`, or that fills it if it is mutable."""
    if not loading.takes(place):
        return
    if assign is None and not tree.refillable(target):
        raise StateError(
            f"{place} is a {type(target).__name__} in a container that cannot be changed",
            remedy="put it into a dict or a list",
        )
    if isinstance(target, (Mapping, list, tuple)) and not target and loading.saved.is_divided(place):
        return  # its saved contents belong to other ranks
    spec = loading.saved.spec(place)
    single = is_number(target) or isinstance(target, (bool, np.bool_))
    if single and assign is not None and spec is not None and not spec.shape:
        _want_element(target, spec.dtype, place, loading, assign)
        return
    found = loading.value(place)
    if found.why is not None:
        return
    if is_function(target):
        if found.value is None:
            loading.note(place, "it is a function, for which a checkpoint holds only None: it stays")
        else:
            kind = type(found.value).__name__
            loading.report_mismatched(place, f"it is of type {kind} in the checkpoint and a function here")
    elif assign is None and not tree.refits(target, found.value):
        loading.report_mismatched(
            place,
            f"a {type(found.value).__name__} was saved, which the {type(target).__name__} here cannot become "
            "in a container that cannot be changed",
        )
    else:
        loading.later(lambda: _put(target, like(found.value, target), assign))


def _want_element(
    target: Any, dtype: str, place: Place, loading: Loading, assign: Callable[[Any], None]
) -> None:
    """Request a number that was saved as a tensor without dimensions; it gets the type of the target."""
    dtype, why = read_as(dtype, target, cast=loading.catalog.terms.cast)
    if why is not None:
        loading.report_mismatched(place, why)
        return
    array, arrived = np.empty((), numpy_dtype(dtype)), list[bool]()
    view = View(
        TensorSpec((), dtype),
        ((Box.whole(()), array),),
        loading.world.alone,
        ("number", id(array)),
        lambda: arrived.append(True),
        fresh=True,
    )
    loading.view(view, place, array)
    loading.later(lambda: assign(from_element(array, target)) if arrived else None)


def _put(target: Any, value: Any, assign: Assign) -> None:
    filled = tree.refill(target, value)
    if filled is not target and assign is not None:
        assign(filled)
