"""`jax.Array`: the boxes of this process, host memory of each, and the ranks with equal ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import numpy as np

from reknit.errors import StateError, UsageError
from reknit.integrations.jax import pytree
from reknit.integrations.jax.filling import (
    Filling,
    box_of,
    is_on_host,
    is_reduced,
    require_no_trace,
    require_reduced,
    spec_of,
    with_data,
)
from reknit.integrations.jax.pytree import JaxNodeAdapter, JaxReferenceAdapter, VariableSetter, leaves
from reknit.plugins.format import GENERATOR
from reknit.plugins.framework import Adapter, Place, View, memory_of, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from reknit.plugins.framework import Arrays, Assign, Box, Loading, Replicas, Saving, TensorSpec, World

IMPLEMENTATION: Final = GENERATOR
"""Path element of the name of a key's random generator."""


def adapters() -> tuple[Adapter, ...]:
    """Return the adapters for JAX's objects, in the order of asking."""
    return (JaxArrayAdapter(), JaxReferenceAdapter(), JaxNodeAdapter())


def libraries() -> tuple[Arrays, ...]:
    """Return the library of JAX's arrays."""
    return (JaxArrays(),)


class JaxArrays:
    """JAX's arrays, and host memory that will become such arrays."""

    library = "jax"

    def matches(self, value: Any) -> bool:
        """Return whether this is an array; `view` refuses those without values."""
        return isinstance(value, (jax.Array, Filling))

    def view(self, tensor: Any, place: Place, world: World, *, fill: bool) -> View:
        """Return the view of an array, to read it.  Raises `StateError` for a deleted or traced array.

        Only a `Filling` can be filled.
        """
        if isinstance(tensor, Filling):
            return tensor.view(world)
        if fill:
            raise StateError(
                f"{place} is a jax.Array, which cannot be changed", remedy="put it into a dict or a list"
            )
        _require_values(tensor, place, world)
        return _view(tensor, _cut_of(tensor, place, world), world)

    def opened(self, tensor: Any, place: Place, world: World, *, fill: bool) -> None:
        """Return None: an array has memory of its own."""

    def changed(self, memories: Iterable[Any]) -> None:
        """Do nothing: JAX does not count changes of memory."""

    def form(self, tensor: Any) -> TensorSpec:
        """Return shape and dtype of an array, or of the data of keys."""
        return spec_of(tensor, Place("an array"))

    def fresh(self, spec: TensorSpec, like: Any = None) -> Any:
        """Return memory that will become an array: cut and placed like `like` if the shapes are equal."""
        place, sharding = Place("a new array"), None
        if like is not None and spec_of(like, place).shape == spec.shape:
            filling = Filling.like(like, place)
            if filling.spec == spec:
                return filling
            sharding = like.sharding if like.committed else None
        return Filling(spec.shape, numpy_dtype(spec.dtype), sharding, place, weak=False)


def new_array(place: Place, spec: TensorSpec, device: Any, sharding: Any) -> Filling:
    """Return memory that will become an array on a device, or in a sharding, or on the default device.

    Raises `UsageError` for both, and `StateError` for a dtype that this JAX does not have.
    """
    if device is not None and sharding is not None:
        raise UsageError(
            f"{place} has a device and a sharding, which has devices of its own", remedy="leave one out"
        )
    if device is not None:
        sharding = jax.sharding.SingleDeviceSharding(device)
    return Filling(spec.shape, numpy_dtype(spec.dtype), sharding, place, weak=False)


def _require_values(array: Any, place: Place, world: World) -> None:
    if isinstance(array, jax.core.Tracer) or world.once("jax traces", pytree.is_tracing):
        require_no_trace(place, "saved", array)
    if array.is_deleted():
        raise StateError(
            f"{place} is a jax.Array whose memory was given away (donated) or deleted",
            remedy="save the result of the function that it was donated to",
        )


class _Cut(NamedTuple):
    """The facts about all arrays of one sharding, shape and dtype.

    `numbers` are those of the `addressable_data` with the distinct `boxes` of this process.
    """

    spec: TensorSpec
    boxes: tuple[Box, ...]
    numbers: tuple[int, ...]
    holders: tuple[Replicas, ...] | None
    on_host: bool
    has_keys: bool


def _cut_of(array: Any, place: Place, world: World) -> _Cut:
    """Return the facts about an array.  Raises `StateError` for one that is not stored."""
    sharding, shape, dtype = array.sharding, array.shape, array.dtype

    def find() -> _Cut:
        require_reduced(sharding, place)
        spec = spec_of(array, place)
        numbers: dict[Box, int] = {}
        # JAX keeps the data of all devices of this process in this order.
        for number, index in enumerate(sharding.addressable_devices_indices_map(shape).values()):
            numbers.setdefault(box_of(index or (), shape), number)
        replicas = _replicas(sharding, shape, world)
        holders = None if replicas is None else tuple(replicas[box] for box in numbers)
        boxes = tuple(with_data(box, spec) for box in numbers)
        on_host, has_keys = is_on_host(sharding), pytree.is_key_dtype(dtype)
        return _Cut(spec, boxes, tuple(numbers.values()), holders, on_host, has_keys=has_keys)

    return world.once(("jax cut", sharding, shape, dtype), find)


def _view(array: Any, cut: _Cut, world: World) -> View:
    """Return the view of an array with these facts, to read it."""
    # On a CPU this is the array's own memory, elsewhere a copy.
    data = map(np.asarray, _memories(array, cut, world))
    parts = tuple(zip(cut.boxes, data, strict=True))
    return View(cut.spec, parts, world.alone, ("jax", id(array)), holders=cut.holders)


def _memories(array: Any, cut: _Cut, world: World) -> Sequence[Any]:
    """Return the data in each box of an array, each as an array of one device."""
    if cut.on_host and not cut.has_keys:
        if len(cut.numbers) == 1:
            return [array.addressable_data(cut.numbers[0])]
        data = pytree.all_data(array)
        return [data[number] for number in cut.numbers]

    def find() -> list[Any]:
        return [without_host_copy(array.addressable_data(number)) for number in cut.numbers]

    return world.once(("jax", id(array)), find, array)


def without_host_copy(data: Any) -> Any:
    """Return another array on the same memory.

    An array keeps the copy in host memory that was made of it for as long as it lives.  The new array ends
    with the save.
    """
    if pytree.is_key_dtype(data.dtype):
        data = jax.random.key_data(data)
    return jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])


def _replicas(sharding: Any, shape: tuple[int, ...], world: World) -> dict[Box, Replicas] | None:
    """Return the ranks of each box, or None if JAX cannot determine them.

    JAX counts its own processes: a process that is alone in JAX may be one of many ranks.
    """
    if sharding.is_fully_addressable or jax.process_index() != world.global_rank:
        return None

    def find() -> dict[Box, Replicas]:
        holders: dict[Box, set[int]] = {}
        for device, index in sharding.devices_indices_map(shape).items():
            holders.setdefault(box_of(index or (), shape), set()).add(device.process_index)
        return {box: world.numbers(processes) for box, processes in holders.items()}

    return world.once(("jax replicas", sharding, shape), find)


def start_copies(state: Any, world: World) -> None:
    """Start the copies of all arrays in a state to the host, so that no copy waits for another."""
    for leaf in leaves(state, set()):
        live = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and not leaf.is_deleted()
        if live and is_reduced(leaf.sharding):
            cut = _cut_of(leaf, Place("an array"), world)
            for data in () if cut.on_host else _memories(leaf, cut, world):
                data.copy_to_host_async()


class UnchangingArrays:
    """The barrier of constant memory: JAX does not reuse memory that an array still refers to."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []

    def stands(self) -> bool:
        """Return True: there is nothing to wait for."""
        return True

    def memory(self) -> Iterable[tuple[Any, int, int]]:
        """Return memory, first byte and size of each array."""
        return [(*memory_of(array), array.nbytes) for array in self.arrays]

    def hold(self, wait: Callable[[], object]) -> None:
        """Let nobody wait."""

    def distrust(self) -> None:
        """Stand for this save only, anyway."""


class JaxArrayAdapter(Adapter):
    """JAX's arrays, and abstract ones (`jax.ShapeDtypeStruct`) as targets."""

    def matches(self, value: Any) -> bool:
        """Return whether this is an array, or an abstract array."""
        return isinstance(value, (jax.Array, jax.ShapeDtypeStruct))

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the array, and for keys the name of their random generator."""
        if isinstance(value, jax.ShapeDtypeStruct):
            raise StateError(
                f"{place} is a jax.ShapeDtypeStruct, which has no values",
                remedy="save arrays; abstract ones are for loading",
            )
        world = saving.world
        _require_values(value, place, world)
        cut = _cut_of(value, place, world)
        if not cut.on_host:
            world.once("jax copies", lambda: start_copies(saving.state, world))
        first = len(saving.shards)
        saving.view(_view(value, cut, world), place, value)
        unchanging = world.once("jax arrays", UnchangingArrays)
        unchanging.arrays += [shard.memory for shard in saving.shards[first:]]
        saving.barriers.append(unchanging)
        if cut.has_keys:
            saving.blob(pytree.implementation(value.dtype), place.below(IMPLEMENTATION))

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request a successor of the array, and put it in its place."""
        if not loading.takes(place):
            return
        require_no_trace(place, "loaded", value)
        if assign is None:
            raise StateError(
                f"{place} is a {type(value).__name__} in a container that cannot be changed",
                remedy="put it into a dict or a list",
            )
        if not _fits_implementation(value, place, loading):
            return
        _leave_out_options(place, loading)

        def fill() -> tuple[View, Filling]:
            filling = Filling.like(value, place)
            holds = isinstance(value, jax.Array) and not value.is_deleted() and loading.may_resize(place)
            if holds:
                filling.start_from(value)
            loading.later(lambda: assign(filling.filled()) if filling.arrived else None)
            return filling.view(loading.world, fresh=not holds), filling

        if isinstance(assign, VariableSetter):
            tie = ("jax variable", id(assign.variable))
            view, filling = loading.world.once(tie, fill, assign.variable)
        else:
            view, filling = fill()
        loading.view(view, place, filling)


def _leave_out_options(place: Place, loading: Loading) -> None:
    """Leave out the options that torch stores beside the states of an optimizer, if these are states of one.

    Transformations of JAX hold them as functions and settings, which do not belong to a tree of arrays.
    """
    parts = place.fqn.split("/")
    key = ("jax options", place.item, *parts[:-3])
    if len(parts) < 3 or parts[-3] != "state" or key in loading.memo:
        return
    loading.memo[key] = place
    prefixes = tuple("/".join([*parts[:-3], part, ""]) for part in ("param_groups", "empty_groups"))
    for fqn, value in loading.catalog.blobs.get(place.item, {}).items():
        if fqn.startswith(prefixes) and isinstance(value, Mapping):
            at = Place(place.item).below(fqn)
            loading.leave_out(at, "options of a torch optimizer, which have no place in a tree of arrays")


def _fits_implementation(value: Any, place: Place, loading: Loading) -> bool:
    """Return whether saved keys fit the random generator of the target, as far as both are recorded."""
    record = place.below(IMPLEMENTATION)
    if loading.saved.look_up(record).why is not None:
        return True
    saved = loading.value(record).value
    if not pytree.is_key_dtype(value.dtype):
        loading.note(place, f"keys of {saved} are restored as plain numbers, their data")
        return True
    mine = pytree.implementation(value.dtype)
    if saved is not None and saved != mine:
        loading.report_mismatched(place, f"it holds keys of {saved} in the checkpoint and of {mine} here")
        return False
    return True
