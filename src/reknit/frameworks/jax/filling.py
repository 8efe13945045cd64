"""New values for an immutable `jax.Array`: host memory is filled, and becomes a new array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from reknit.errors import StateError
from reknit.frameworks.jax import array_values, jax_private
from reknit.frameworks.stateful import Unfilled
from reknit.frameworks.walk.walk import View
from reknit.types.box import Box
from reknit.types.dtype import ITEMSIZE, numpy_dtype
from reknit.types.shard import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reknit.frameworks.walk.walk import Place, World


def box_of(index: Sequence[slice], shape: tuple[int, ...]) -> Box:
    """Return the box that an index of JAX selects; for keys, it has the dimensions of their data, too."""
    ranges = [cut.indices(length) for cut, length in zip(index, shape, strict=False)]
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
    if jax_private.is_key_dtype(dtype):
        return TensorSpec((*shape, *jax_private.key_shape(dtype)), "uint32")
    name = np.dtype(dtype).name
    if name not in ITEMSIZE:
        raise StateError(
            f"{place} is an array of dtype {name}, which is not stored",
            remedy=_other_dtype(name),
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
        if sharding is None:
            boxes = {Box.whole(shape)}
        else:
            boxes = {box_of(index, shape) for index in _indices(sharding, shape, place)}
        tail = self.spec.shape[len(shape) :]
        kind = numpy_dtype(self.spec.dtype)
        self._memory: dict[Box, NDArray[Any]] = {
            box: np.empty((*box.lengths, *tail), kind) for box in sorted(boxes, key=lambda box: box.offsets)
        }
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
            self._memory[box][...] = array_values.host_data(shard.data)

    def filled(self) -> Any:
        """Return an array with the contents of the memory."""
        if self._made is None:
            self._made = self._new()
        return self._made

    def _new(self) -> Any:
        if self._sharding is None:
            data = self._memory[Box.whole(self._shape)]
            array = array_values.keys(data, self._dtype) if self._is_key else jax.device_put(data)
        else:
            array = array_values.divided(
                self._shape,
                self._sharding,
                self._dtype,
                lambda index: self._memory[box_of(index, self._shape)],
            )
        array = jax_private.weakly_typed(array) if self._weak else array
        return array_values.as_recorded(array, self.record)

    @property
    def _is_key(self) -> bool:
        return jax_private.is_key_dtype(self._dtype)

    def _arrive(self) -> None:
        """Make the array before any is put in its place, so that an error leaves all of them as they were.

        On other devices than CPUs there may not be enough memory for old and new arrays; keys are small.
        """
        self.arrived = True
        if self._is_key or _is_on_host(self._sharding):
            self.filled()


def _is_on_host(sharding: Any) -> bool:
    """Return whether all devices of a sharding are CPUs, or the default device is one."""
    devices = (jax.device_put(0).sharding if sharding is None else sharding).device_set
    return all(device.platform == "cpu" for device in devices)


def _indices(sharding: Any, shape: tuple[int, ...], place: Place) -> list[tuple[slice, ...]]:
    """Return the index of each device of this process."""
    require_reduced(sharding, place)
    try:
        return [index or () for index in sharding.addressable_devices_indices_map(shape).values()]
    except ValueError as error:
        raise StateError(f"{place} of shape {list(shape)} cannot be cut so: {error}") from error


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
