"""New values for an immutable `jax.Array`: host memory is filled, and becomes a new array."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from reknit.errors import StateError
from reknit.integrations.jax import pytree
from reknit.plugins.format import ITEMSIZE
from reknit.plugins.framework import (
    Box,
    Tagged,
    TensorSpec,
    Unfilled,
    View,
    checked_bytes,
    numpy_dtype,
    same_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from reknit.plugins.framework import Place, World


TAG: Final = "jax.array"

KIND: Final = jax.Array
"""The class of all arrays, those of typed keys among them."""


def is_array(value: Any) -> bool:
    """Return whether this is an array of JAX."""
    return isinstance(value, jax.Array)


def require_no_trace(where: object, done: str, array: Any = None) -> None:
    """Raise `StateError` while JAX traces a function, or for an array that it has traced."""
    if isinstance(array, jax.core.Tracer) or pytree.is_tracing():
        raise StateError(
            f"{where} is to be {done} in a function that is traced by JAX: the Python code of the function "
            "runs once, and arrays have no values yet",
            remedy="call save and load outside of functions that JAX transforms (jax.jit, jax.grad, jax.vmap "
            "and the like), with the arguments and results of these",
        )


def to_tagged(array: Any, where: str) -> Tagged:
    """Return an array as plain data.

    Raises `StateError` for an array without values, with parts in other processes, or with a dtype that is
    not stored.
    """
    require_no_trace(where, "saved", array)
    whole = not array.is_deleted() and (array.is_fully_addressable or array.is_fully_replicated)
    if whole and not array.is_fully_addressable:
        array = array.addressable_data(0)
    record = record_of(array) if whole else {}
    if "keys" in record:
        array = jax.random.key_data(array)
    name = str(array.dtype)
    if not whole or name not in ITEMSIZE:
        raise StateError(
            f"{where} holds an array of {name} inside a plain value, and it is not all here",
            remedy="put the array into the state under a key of its own",
        )
    return Tagged(
        TAG,
        {
            "dtype": name,
            "shape": list(array.shape),
            "data": np.array(array, order="C").tobytes(),
            "keys": None,
            "weak": False,
            **record,
        },
    )


def record_of(array: Any) -> dict[str, Any]:
    """Return the part of `neutral.record_of` for JAX: `keys` or `weak`, and unusual `memory`."""
    if pytree.is_key_dtype(array.dtype):
        record: dict[str, Any] = {"keys": pytree.implementation(array.dtype)}
    else:
        record = {"weak": bool(array.weak_type)}
    kind = array.sharding.memory_kind
    if kind is not None and kind != _usual_memory(array.sharding):
        record["memory"] = kind
    return record


def _usual_memory(sharding: Any) -> str:
    return str(next(iter(sharding.device_set)).default_memory().kind)


def as_recorded(array: Any, record: Mapping[str, Any]) -> Any:
    """Return an array with the properties in its record besides values, shape and dtype.

    An array that is committed to memory stays there, and so does one on devices without such memory.
    """
    if record.get("keys") is not None and not pytree.is_key_dtype(array.dtype):
        array = jax.random.wrap_key_data(array, impl=str(record["keys"]))
    weak = record.get("weak")
    if weak is not None and not pytree.is_key_dtype(array.dtype) and weak != array.weak_type:
        array = pytree.weakly_typed(array, weak=bool(weak))
    kind = record.get("memory")
    if kind is None or array.committed:
        return array
    kinds = {memory.kind for device in array.sharding.device_set for memory in device.addressable_memories()}
    return jax.device_put(array, array.sharding.with_memory_kind(str(kind))) if kind in kinds else array


def placed_as(array: Any, present: Any) -> Any:
    """Return an array on the devices of another one, and cut in the same way, if the shapes are equal."""
    if array.shape != present.shape or not present.committed:
        return array
    if present.sharding.is_fully_addressable:
        return jax.device_put(array, present.sharding)
    data = host_data(array)
    made = divided(tuple(array.shape), present.sharding, array.dtype, lambda index: data[index])
    return as_recorded(made, record_of(array))


def host_data(array: Any) -> NDArray[Any]:
    """Return the values of an array that is whole in this process; for keys, those of their data."""
    return np.asarray(jax.random.key_data(array) if pytree.is_key_dtype(array.dtype) else array)


def divided(shape: tuple[int, ...], sharding: Any, dtype: Any, part: Callable[[Any], NDArray[Any]]) -> Any:
    """Return an array on the devices of a sharding; `part` returns the host memory for an index.

    For keys this is the memory of their data.  Sends no message to other processes.
    """
    if not pytree.is_key_dtype(dtype):
        return jax.make_array_from_callback(shape, sharding, lambda index: part(index or ()), dtype=dtype)
    # JAX makes keys in the default memory of each device, and refuses any other.
    array = jax.make_array_from_callback(
        shape, sharding.with_memory_kind(None), lambda index: keys(part(index or ()), dtype), dtype=dtype
    )
    return jax.device_put(array, sharding)


def keys(data: NDArray[Any], dtype: Any) -> Any:
    """Return keys on the default device, given their data.

    A function of jax.numpy would put the data on all devices of the mesh that is set.
    """
    return jax.random.wrap_key_data(jax.device_put(data), impl=pytree.implementation(dtype))


def keys_of(data: NDArray[Any], generator: str) -> Any:
    """Return typed keys of a random generator, given their data."""
    return jax.random.wrap_key_data(jax.device_put(data), impl=generator)


def from_value(value: dict[str, Any], *, given: bool) -> Any:
    """Return the array that `to_tagged` made plain, on the default device, maybe in its memory if `given`.

    Raises `KeyError`, `TypeError` or `ValueError` for a value that `to_tagged` never returns.
    """
    name, shape, data = checked_bytes(value, given=given)
    array = jax.device_put(np.frombuffer(data, numpy_dtype(name)).reshape(shape))
    return as_recorded(array, value)


def same(a: Any, b: Any) -> bool:
    """Return whether two arrays have one dtype, shape, weakness of type and kind of key, and the same bytes.

    Sends no message.  An array without visible values is the same only as itself.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_fully_addressable and b.is_fully_addressable:
        try:
            return same_value(to_tagged(a, "an array"), to_tagged(b, "an array"))
        except StateError:  # for a tracer or a deleted array
            return False
    return a.sharding == b.sharding and all(
        one.index == other.index and same_value(host_data(one.data), host_data(other.data))
        for one, other in zip(a.addressable_shards, b.addressable_shards, strict=True)
    )


def box_of(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    """Return the box that an index of JAX selects; for keys, it has the dimensions of their data, too."""
    return _box(tuple([(cut.start, cut.stop) for cut in index]), shape)


@lru_cache(maxsize=4096)
def _box(cuts: tuple[tuple[int | None, int | None], ...], shape: tuple[int, ...]) -> Box:
    """Return the box of an index; the arrays of a state have few shapes, and are cut in the same way."""
    ranges = [slice(*cut).indices(length) for cut, length in zip(cuts, shape, strict=False)]
    return Box(tuple(start for start, _, _ in ranges), tuple(end - start for start, end, _ in ranges))


def with_data(box: Box, spec: TensorSpec) -> Box:
    """Return a box of keys with the dimensions of their data added, which are never cut."""
    inside = spec.shape[box.ndim :]
    return Box((*box.offsets, *(0,) * len(inside)), (*box.lengths, *inside))


def spec_of(array: Any, place: Place) -> TensorSpec:
    """Return shape and dtype of an array, or of the data of keys.

    Raises `StateError` for a dtype that is not stored.
    """
    return _spec(tuple(array.shape), array.dtype, place)


def _spec(shape: tuple[int, ...], dtype: Any, place: Place) -> TensorSpec:
    if pytree.is_key_dtype(dtype):
        return TensorSpec((*shape, *pytree.key_shape(dtype)), "uint32")
    name = np.dtype(dtype).name
    if name not in ITEMSIZE:
        raise StateError(
            f"{place} is an array of dtype {name}, which is not stored", remedy=_other_dtype(name)
        )
    return TensorSpec(shape, name)


def _other_dtype(name: str) -> str:
    """Return the remedy for a dtype that is not stored: a dtype that keeps all bits."""
    if "int" in name:
        kind = "uint8" if name.startswith("u") else "int8"
        return f"save it as .astype('{kind}'), which has all its values, and load with .astype('{name}')"
    if name.startswith("float8"):
        return f"save its bits, .view('uint8'), and load with .view('{name}'); astype would change them"
    return "save its bits, numpy.asarray(array).view('uint8'); astype would change them"


_ALIGNMENT = 64
_COPIED_NBYTES = 64 << 10
"""Up to this size a copy takes no longer than the care for memory that is kept."""


def _aligned(shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
    """Return new memory; from such an address JAX makes an array on a CPU without a copy."""
    nbytes = prod(shape) * kind.itemsize
    if nbytes <= _COPIED_NBYTES:
        return np.empty(shape, kind)
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -int(memory.__array_interface__["data"][0]) % _ALIGNMENT
    return memory[start : start + nbytes].view(kind).reshape(shape)


class Filling(Unfilled):
    """A `jax.Array` to come: host memory for each box that this process will have of it.

    `sharding` None stands for JAX's default device, and an array that is not committed to it: computations
    move such arrays to the devices of their other arguments.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: Any, sharding: Any, place: Place, *, weak: bool
    ) -> None:
        self.spec = _spec(shape, dtype, place)
        self._shape, self._dtype, self._sharding, self._weak = shape, dtype, sharding, weak
        _require_dtype(self.spec.dtype, place)
        boxes = (Box.whole(shape),) if sharding is None else _boxes(sharding, shape, place)
        tail = self.spec.shape[len(shape) :]
        kind = numpy_dtype(self.spec.dtype)
        self._memory: dict[Box, NDArray[Any]] = {box: _aligned((*box.lengths, *tail), kind) for box in boxes}
        self.arrived = False
        self._made: Any = None

    @classmethod
    def like(cls, target: Any, place: Place) -> Filling:
        """Return the successor of an array, deleted or not, or of the array that an abstract one describes.

        An abstract array cannot state that it is not committed: on the default device it counts as not
        committed.
        """
        sharding = target.sharding
        if isinstance(target, jax.Array):
            free = not target.committed
        else:
            sharding = _concrete(sharding, place)
            free = sharding is not None and sharding == jax.device_put(0).sharding
        if free:
            sharding = None
        return cls(
            tuple(target.shape), target.dtype, sharding, place, weak=getattr(target, "weak_type", False)
        )

    def view(self, world: World, *, fresh: bool = True) -> View:
        """Return the view of the memory to fill."""
        parts = tuple((with_data(box, self.spec), data) for box, data in self._memory.items())
        return View(self.spec, parts, world.alone, ("jax", id(self)), self._arrive, fresh=fresh)

    def start_from(self, array: Any) -> None:
        """Begin with the values of an array of the same form."""
        for shard in array.addressable_shards:
            box = box_of(shard.index, self._shape)
            self._memory[box][...] = host_data(shard.data)

    def filled(self) -> Any:
        """Return an array with the contents of the memory."""
        if self._made is None:
            self._made = self._new()
        return self._made

    def _new(self) -> Any:
        if self._sharding is None:
            data = self._memory[Box.whole(self._shape)]
            array = keys(data, self._dtype) if pytree.is_key_dtype(self._dtype) else jax.device_put(data)
        else:
            array = divided(
                self._shape,
                self._sharding,
                self._dtype,
                lambda index: self._memory[box_of(index, self._shape)],
            )
        array = pytree.weakly_typed(array) if self._weak else array
        return as_recorded(array, self.record)

    def _arrive(self) -> None:
        """Make the array before any is put in its place, so that an error leaves all of them as they were.

        On other devices than CPUs there may not be enough memory for old and new arrays; keys are small.
        """
        self.arrived = True
        if pytree.is_key_dtype(self._dtype) or is_on_host(self._sharding or jax.device_put(0).sharding):
            self.filled()


@lru_cache(maxsize=256)
def is_on_host(sharding: Any) -> bool:
    """Return whether all devices of a sharding are CPUs."""
    return all(device.platform == "cpu" for device in sharding.device_set)


def _boxes(sharding: Any, shape: tuple[int, ...], place: Place) -> tuple[Box, ...]:
    """Return the boxes of this process, in the order of their offsets."""
    require_reduced(sharding, place)
    try:
        return cut_boxes(sharding, shape)
    except ValueError as error:
        raise StateError(f"{place} of shape {list(shape)} cannot be cut so: {error}") from error


@lru_cache(maxsize=256)
def cut_boxes(sharding: Any, shape: tuple[int, ...]) -> tuple[Box, ...]:
    """Return the different boxes of this process, in the order of their offsets."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    return tuple(sorted({box_of(index or (), shape) for index in indices}, key=lambda box: box.offsets))


def is_reduced(sharding: Any) -> bool:
    """Return whether devices hold elements of an array, and not the terms of sums."""
    return not getattr(getattr(sharding, "spec", None), "unreduced", None)


def require_reduced(sharding: Any, place: Place) -> None:
    """Raise `StateError` for a sharding with which several devices hold the terms of an element."""
    if not is_reduced(sharding):
        raise StateError(
            f"{place} has the sharding {sharding.spec}: its elements are sums of terms on several devices",
            remedy="let jax.reshard give it a sharding without unreduced axes",
        )


def _require_dtype(name: str, place: Place) -> None:
    """Raise `StateError` for a dtype that JAX would convert to a narrower one."""
    kind = numpy_dtype(name)
    if (held := jax.dtypes.canonicalize_dtype(kind)) != kind:
        raise StateError(
            f"{place} is to be {name}, and this JAX makes {held.name} of it",
            remedy='call jax.config.update("jax_enable_x64", True), or load into a narrower type with cast',
        )


def _concrete(sharding: Any, place: Place) -> Any:
    """Return a sharding over devices, in the same kind of memory.

    A sharding over a mesh without devices takes those of the mesh that is set, or the default device.
    """
    mesh = getattr(sharding, "mesh", None)
    if not isinstance(mesh, jax.sharding.AbstractMesh):
        return sharding
    kind = sharding.memory_kind
    if mesh.empty:
        return None if kind is None else jax.device_put(0).sharding.with_memory_kind(kind)
    here = jax.sharding.get_mesh()
    if here.empty or not _is_form(mesh, here.abstract_mesh):
        raise StateError(
            f"{place} is sharded over an abstract mesh, which has no devices",
            remedy="load under jax.set_mesh, or give the target a NamedSharding on a mesh of devices",
        )
    return jax.sharding.NamedSharding(here, sharding.spec, memory_kind=kind)


def _is_form(mesh: Any, other: Any) -> bool:
    """Return whether abstract meshes have the same axes, and one kind of devices as far as both name it."""
    devices = {getattr(each, "abstract_device", None) for each in (mesh, other)} - {None}
    return mesh.shape_tuple == other.shape_tuple and mesh.axis_types == other.axis_types and len(devices) < 2
