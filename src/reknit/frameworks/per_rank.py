"""Values that differ between ranks: saved by coordinate, and restored on the same set of ranks only."""

from __future__ import annotations

import logging
import random
import sys
from importlib import import_module
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.errors import StateError, UsageError, known, shown
from reknit.frameworks import tree
from reknit.frameworks.neutral import from_neutral, placed_as, put_array, to_neutral
from reknit.frameworks.numbers import element, from_element, is_number, like, misfit, read_as
from reknit.frameworks.stateful import fits, hand_over, is_stateful, unlike_now
from reknit.frameworks.walk import Adapter
from reknit.frameworks.walk.own_code import SETTLED, cause, collect_position, leave, taker_of
from reknit.keywords import checked_call
from reknit.types.devices import CUDA
from reknit.types.dtype import ITEMSIZE, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, Place, World

logger = logging.getLogger("reknit")


@checked_call
class PerRank:
    """A value, or an object with `state_dict` and `load_state_dict`, that differs between ranks.

    It is saved under this rank's coordinate: its number, or its place on `mesh` by the names of the mesh's
    dimensions, or the `coordinate` given.  It is restored only if the loading ranks have the same coordinates
    as the saving ranks.  Otherwise it is left as it is, and the load report names it.  Prefer `mesh` if ranks
    share a value (all tensor-parallel ranks of a data-parallel one).  A mesh defines all coordinates, while
    with a `coordinate` every rank must have one of its own.
    """

    def __init__(self, value: Any, *, coordinate: Mapping[str, int] | None = None, mesh: Any = None) -> None:
        if coordinate is not None and mesh is not None:
            raise UsageError("a PerRank has a coordinate or a mesh, not both")
        self.value = value
        self.coordinate = None if coordinate is None else _checked(coordinate)
        if mesh is not None and not hasattr(mesh, "get_coordinate"):
            raise UsageError(f"mesh is a DeviceMesh of torch, not {shown(mesh)}")
        self.mesh = mesh

    def __repr__(self) -> str:
        what = "" if self is (value := vars(self).get("value")) else f" value: {type(value).__name__},"
        return f"<{type(self).__name__}{what} of {self._whose()}>"

    def _whose(self) -> str:
        """Return in words the coordinate of this rank, without a call of a mesh or a process group."""
        given = vars(self)  # without them until `__init__` has ended
        mesh, coordinate = given.get("mesh"), given.get("coordinate")
        if mesh is not None:
            return " ".join(f"each place on {shown(mesh)}".splitlines())
        return "each rank" if coordinate is None else f"the rank at {shown(coordinate)}"

    def place_of(self, world: World) -> dict[str, int]:
        """Return the coordinate of this rank."""
        if self.mesh is not None:
            at = self.mesh.get_coordinate()
            if at is None:
                raise StateError(
                    "this rank is not on the mesh of its PerRank", remedy="leave it out on this rank"
                )
            return dict(zip(_dim_names(self.mesh), at, strict=True))
        return {"rank": world.rank} if self.coordinate is None else dict(self.coordinate)

    def places(self, world: World) -> set[frozenset[tuple[str, int]]] | None:
        """Return the coordinates of all ranks, or None if this rank cannot determine them."""
        if self.mesh is not None:
            names, sizes = _dim_names(self.mesh), tuple(self.mesh.shape)
            return {_key(dict(zip(names, at, strict=True))) for at in product(*map(range, sizes))}
        if self.coordinate is None:
            return {_key({"rank": rank}) for rank in range(world.size)}
        return None


def _checked(coordinate: Mapping[Any, Any]) -> dict[str, int]:
    if not coordinate or not all(isinstance(k, str) and type(v) is int for k, v in coordinate.items()):
        raise UsageError(f"a coordinate is a mapping from names to integers, not {coordinate!r}")
    return dict(coordinate)


def _dim_names(mesh: Any) -> tuple[str, ...]:
    names = mesh.mesh_dim_names
    if not names:
        raise StateError(
            "the mesh of a PerRank has no dimension names", remedy="pass mesh_dim_names to init_device_mesh"
        )
    return tuple(names)


def _key(coordinate: Mapping[str, int]) -> frozenset[tuple[str, int]]:
    return frozenset(coordinate.items())


@checked_call
class RngState(PerRank):
    """The random generators of this process: Python's, NumPy's global one, torch's, and those of devices.

    The generators of devices are that of the current device, and those of all other devices that have had
    tensors of this process, from its first use of a device.  The current device's state is restored on the
    current device, and the others' on devices of the same numbers.  The load report names each device whose
    state is not restored or was not saved.  `devices=False` leaves all of them out, and `cuda=False` those of
    CUDA.
    """

    def __init__(
        self,
        *,
        coordinate: Mapping[str, int] | None = None,
        mesh: Any = None,
        devices: bool = True,
        cuda: bool = True,
    ) -> None:
        super().__init__(self, coordinate=coordinate, mesh=mesh)
        for name, value in (("devices", devices), ("cuda", cuda)):
            if not isinstance(value, bool):
                raise UsageError(f"{name} is True or False, not {shown(value)}")
        self._devices, self._cuda = devices, cuda

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the generators."""
        kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": [str(kind), np.asarray(keys), int(position), int(has_gauss), float(cached)],
        }
        if "torch" in sys.modules:
            state |= _of_torch().states(self._takes)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators, and log a warning for the devices without a saved state of their own."""
        if left := self._restore(state):
            logger.warning("%s", left)

    def _restore(self, state: Mapping[str, Any]) -> str:
        """Set the generators, and return in words the generators that are left unchanged."""
        version, words, cached = state["python"]
        random.setstate((version, tuple(words), cached))
        np.random.set_state(tuple(state["numpy"]))
        if "torch" not in state:
            return ""
        restored = _of_torch().assign(state, self._takes)
        _of_torch().put(state, restored)
        return str(restored.left)

    def _refused(self, state: Any) -> tuple[str | None, str]:
        """Return the reason why generators cannot take a state, or None, and the generators left unchanged.

        The attempt does not use the generators of this process.
        """
        left = ""
        try:
            version, words, cached = state["python"]
            random.Random().setstate((version, tuple(words), cached))
            np.random.RandomState().set_state(tuple(state["numpy"]))
            if "torch" in state:
                restored = _of_torch().assign(state, self._takes)
                _of_torch().require_fitting(state, restored)
                left = restored.left
        except Exception as error:
            if made := known(error):
                raise made from error
            return f"the saved value is not a state of random generators: {cause(error)}", ""
        return None, left

    def _takes(self, kind: str) -> bool:
        """Return whether the generators of a kind of device are included."""
        return self._devices and (self._cuda or kind != CUDA)


class PerRankAdapter(Adapter):
    """Values that are declared to differ between ranks."""

    def matches(self, value: Any) -> bool:
        """Return whether the user declared this value."""
        return isinstance(value, PerRank)

    def collect(self, value: PerRank, place: Place, saving: Saving) -> None:
        """Collect the value as a whole, with its tensors, under this rank's coordinate."""
        state = value.value.state_dict() if is_stateful(value.value) else value.value
        saving.blob(to_neutral(state, str(place)), place, value.place_of(saving.world))
        collect_position(value.value, state, place, saving)

    def wanted(self, value: PerRank, place: Place, loading: Loading, assign: Assign) -> None:
        """Request the value if the ranks have the same coordinates as the saving ranks."""
        if not loading.takes(place):
            return
        mine = value.place_of(loading.world)
        saved = [
            dict(other)
            for other in loading.catalog.coordinates.get(place.item, ())
            if other.keys() == mine.keys()
        ]
        places = value.places(loading.world)
        same = {_key(other) for other in saved} == places
        if places is None:
            same = mine in saved and len(saved) == loading.world.size
        own = loading.saved.own(place.item, mine) if same else {}
        # Nothing else in this load takes it, so it is in memory once.
        state = from_neutral(own[place.fqn], given=True) if place.fqn in own else None
        taker = taker_of(value.value, place, loading, state)
        if taker is SETTLED:
            return
        if place.fqn in own:
            loading.taken_back.append((place.item, place.fqn))
            if fits(taker, state, place, loading):
                self._want(value, taker, state, place, loading)
        elif not same and _was_saved(place, loading):
            leave(value.value, place, _left(value, len(saved), loading), loading)
        else:
            loading.report_missing(place, "the checkpoint does not have it")

    def _want(self, value: PerRank, taker: Any, state: Any, place: Place, loading: Loading) -> None:
        if why := unlike_now(taker, state, place, loading):
            loading.report_mismatched(place, why)
            return
        if isinstance(value, RngState):
            why, left = value._refused(state)
            if why is not None:
                loading.report_mismatched(place, why)
                return
            if left:
                loading.note(place, left)

            def restore() -> None:
                value._restore(state)

            loading.later(restore)  # last, since other objects may draw random numbers while they are loaded
        elif is_stateful(taker):
            hand_over(taker, lambda: taker.load_state_dict(state), loading)
        else:
            made, why = _fitted(state, value.value, cast=loading.catalog.terms.cast)
            if why is not None:
                loading.report_mismatched(place, why)
                return
            loading.later(lambda: _refill(value, placed_as(made, value.value)))


def _fitted(state: Any, present: Any, *, cast: bool) -> tuple[Any, str | None]:
    """Return a saved number in the form of the present scalar tensor, or a saved scalar tensor as a number.

    Returns as well the reason why it cannot become one, or None.  Other values are returned unchanged.
    """
    saved, here = _element_dtype(state), _element_dtype(present)
    if here is not None and isinstance(state, (bool, np.bool_)):
        return state, f"it is a boolean in the checkpoint and a tensor of {here} here"
    if saved is not None and isinstance(present, (bool, np.bool_)):
        return state, f"it is a tensor of {saved} in the checkpoint and a boolean here"
    if here is not None and is_number(state):
        why = misfit(state, here, cast=cast)
        return (state, why) if why is not None else (_as_tensor(element(state, here), present), None)
    if saved is not None and is_number(present):
        wanted, why = read_as(saved, present, cast=cast)
        if why is not None:
            return state, why
        array = state if isinstance(state, np.ndarray) else element(state.item(), saved)
        return from_element(array.astype(numpy_dtype(wanted)), present), None
    return like(state, present), None


def _element_dtype(value: Any) -> str | None:
    """Return the dtype of a tensor without dimensions of NumPy or torch; None for anything else."""
    torch = sys.modules.get("torch")
    if not isinstance(value, np.ndarray if torch is None else (np.ndarray, torch.Tensor)) or value.shape:
        return None
    name = _form(value)[1]
    return name if name in ITEMSIZE else None


def _as_tensor(array: NDArray[Any], present: Any) -> Any:
    """Return a new tensor of the library of the present one."""
    if isinstance(present, np.ndarray):
        return array
    torch = sys.modules["torch"]
    made = torch.empty((), dtype=present.dtype)
    put_array(array, made)
    return made


def _was_saved(place: Place, loading: Loading) -> bool:
    """Return whether some rank saved its own value here.

    This checks one rank for each kind of coordinate.
    """
    first = {
        frozenset(coordinate): dict(coordinate)
        for coordinate in reversed(loading.catalog.coordinates.get(place.item, ()))
    }
    return any(place.fqn in loading.saved.own(place.item, coordinate) for coordinate in first.values())


def _left(value: PerRank, num_saved: int, loading: Loading) -> str:
    what = "random states" if isinstance(value, RngState) else "values"
    saved = f"{num_saved} ranks" if num_saved else "ranks with other coordinates"
    size = loading.world.size
    here = "1 rank" if size == 1 else f"{size} ranks"
    return f"{what} of {saved} cannot be restored on {here}: each rank keeps its present value"


def _of_torch() -> Any:
    """Return the module for torch's generators, which imports torch."""
    return import_module("reknit.frameworks.torch.generators")


def _refill(value: PerRank, state: Any) -> None:
    """Put a saved value into the user's present value if that can hold it, else in its place."""
    present = value.value
    if not _holds(present, state):
        value.value = tree.refill(present, state)
    elif isinstance(state, np.ndarray):
        put_array(state, present)  # also a tensor that ranks saved as their own before it was declared
    else:
        sys.modules["torch"].Tensor.copy_(present.detach(), state)


def _holds(present: Any, state: Any) -> bool:
    """Return whether an array or a tensor can hold a saved value; a cast could lose bits of it."""
    torch = sys.modules.get("torch")
    tensor: Any = () if torch is None else torch.Tensor
    fills = isinstance(present, tensor) or (isinstance(present, np.ndarray) and isinstance(state, np.ndarray))
    fits = fills and isinstance(state, (np.ndarray, tensor)) and _form(present) == _form(state)
    from reknit.frameworks.walk.overlap import may_fill  # a save needs none of it

    return fits and may_fill(present)


def _form(array: Any) -> tuple[tuple[int, ...], str]:
    return tuple(array.shape), str(array.dtype).removeprefix("torch.")
