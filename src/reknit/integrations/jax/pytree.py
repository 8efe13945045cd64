"""JAX's pytree nodes, saved by the names of their children, and the private parts of JAX in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import tree_util
from jax._src import core
from jax._src.array import ArrayImpl

from reknit.errors import StateError
from reknit.plugins.framework import Adapter, filled_fields, tree, want_successor
from reknit.types.shard import BOX, MAX_DEPTH

if TYPE_CHECKING:
    from reknit.plugins.framework import Assign, Loading, Place, Saving


def is_key_dtype(dtype: Any) -> bool:
    """Return whether this is the dtype of typed keys of random generators."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def implementation(dtype: Any) -> str:
    """Return the name of the random generator for keys of a dtype."""
    # `jax.random.key_impl` accepts arrays only, and targets may be abstract.
    return str(dtype._impl.name)


def key_shape(dtype: Any) -> tuple[int, ...]:
    """Return the shape of the data of one key."""
    return tuple(dtype._impl.key_shape)


def is_tracing() -> bool:
    """Return whether JAX traces a function in this thread."""
    return not core.trace_state_clean()


def weakly_typed(array: Any, *, weak: bool = True) -> Any:
    """Return an array on the same memory, with a weak type (as Python's numbers have) or a strong one.

    The public ways to such arrays are computations, which all processes of a job would have to begin.
    """
    memory = [shard.data for shard in array.addressable_shards]
    return ArrayImpl(array.aval.update(weak_type=weak), array.sharding, memory, committed=array.committed)


def all_data(array: Any) -> list[Any]:
    """Return the `addressable_data` of an array, which are checked one by one when they are asked for."""
    data: list[Any] = array._arrays
    return data


_LEAVES = frozenset({int, float, complex, str, bytes, bool, type(None)})


def is_node(value: Any) -> bool:
    """Return whether a value is a registered node, and not a container of another library."""
    if type(value) in _LEAVES or isinstance(value, (jax.Array, list, tuple, MutableMapping, type)):
        return False
    return type(value) is not dict and not tree_util.all_leaves((value,))


class _Node(NamedTuple):
    """A node one level deep: its children by key, and the structure that rebuilds it.

    A `box` has no name of its own.
    """

    children: dict[str | int, Any]
    build: Any
    box: bool


def _opened(value: Any, place: Place) -> _Node:
    """Return the contents of a node.  Raises `StateError` if two children have one name."""
    paths, build = tree_util.tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)
    children = {_key(path[0]): inner for path, inner in paths}
    if len(children) < len(paths):
        raise StateError(
            f"{place} is a {type(value).__name__} whose children do not all have keys of their own",
            remedy="register it with jax.tree_util.register_pytree_with_keys",
        )
    # Flax wraps arrays in objects that describe their split or use, and do not appear in their names.
    box = type(value).__module__.startswith("flax.") and list(children) == ["value"]
    return _Node(children, build, box or _is_variable(value))


def _key(entry: Any) -> str | int:
    for attribute in ("name", "idx", "key"):
        if hasattr(entry, attribute):
            key: str | int = getattr(entry, attribute)
            return key
    return str(entry)


def _is_variable(value: Any) -> bool:
    """Return whether this is a variable of Flax NNX, which holds an array and can be given another one."""
    return any(
        kind.__module__.startswith("flax.nnx") and kind.__name__ == "Variable" for kind in type(value).__mro__
    )


@dataclass(frozen=True, slots=True)
class VariableSetter:
    """A function that puts an array into a variable, which may be at several places of the target."""

    variable: Any

    def __call__(self, new: Any) -> None:
        """Give the variable its new array."""
        self.variable.set_raw_value(new)


class JaxReferenceAdapter(Adapter):
    """Mutable references of JAX, and hijax variables of Flax: refused, with the form to save instead."""

    def matches(self, value: Any) -> bool:
        """Return whether this is a reference, or a variable of Flax NNX in the form of hijax."""
        kind = type(value)
        return (kind.__name__ in _REFERENCES and kind.__module__.startswith("jax.")) or (
            kind.__name__ == "HijaxVariable" and kind.__module__.startswith("flax.")
        )

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Raise `StateError`."""
        raise _refused(value, place)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Raise `StateError` if the load takes the value."""
        if loading.takes(place):
            raise _refused(value, place)


_REFERENCES = ("Ref", "MutableArray")


def _refused(value: Any, place: Place) -> StateError:
    return StateError(
        f"{place} is a {type(value).__name__}, which JAX does not take apart into arrays",
        remedy="of a model of Flax NNX, save and load state = nnx.to_pure_dict(nnx.state(model)), and call "
        "nnx.update(model, state) after the load; of a jax.Ref, save and load its array, ref[...]",
    )


class JaxNodeAdapter(Adapter):
    """Dataclasses, frozen dicts, and all other classes that are registered with JAX as nodes."""

    def matches(self, value: Any) -> bool:
        """Return whether JAX can take this value apart."""
        return is_node(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect the children."""
        node = _opened(value, place)
        if node.box and len(node.children) == 1:
            self._collect_box(node, place, saving)
            return
        if not node.children:  # it keeps its place, which other programs count
            saving.blob(None, place)
        for key, inner in node.children.items():
            saving.visit(inner, place if node.box else place.child(key))

    def _collect_box(self, node: _Node, place: Place, saving: Saving) -> None:
        """Collect the content of a box, and the keys that lead to it, which other programs write."""
        keys: list[str | int] = []
        while True:
            ((key, inner),) = node.children.items()
            keys.append(key)
            if not is_node(inner) or not (node := _opened(inner, place)).box or len(node.children) != 1:
                break
        saving.blob(keys, place.below(BOX))
        saving.visit(inner, place)

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Request the children; if one of them has to be replaced, the node is replaced, too."""
        node = _opened(value, place)
        if not node.children:
            loading.leave_empty(place)
        loading.leave_nones(place, node.children)
        inside = loading.saved.inside(place) if node.box else place
        if _is_variable(value):
            for inner in node.children.values():
                loading.visit(inner, inside, VariableSetter(value))  # it keeps its place in the model
            return

        def rebuilt(fresh: dict[str | int, Any]) -> Any:
            return tree_util.tree_unflatten(node.build, list((node.children | fresh).values()))

        places = loading.saved.children(place, list(node.children))
        children = [
            (key, inner, inside if node.box else at)
            for (key, inner), at in zip(node.children.items(), places, strict=True)
        ]
        if not isinstance(value, Mapping):
            children = filled_fields(children, loading)
        want_successor(children, rebuilt, loading, assign)


def leaves(value: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
    """Yield the leaves of nested containers and nodes, each of which is visited once (`seen`).

    Raises `StateError` if these are nested too deeply.
    """
    if type(value) in _LEAVES or id(value) in seen:
        return
    if depth > 2 * MAX_DEPTH:  # a value at one place may be as deep again
        raise tree.too_deep("the state")
    inside: Any = None
    if isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, (list, tuple)):
        inside = value
    elif is_node(value):
        inside = tree_util.tree_leaves(value, is_leaf=lambda inner: inner is not value)
    if inside is None:
        yield value
        return
    seen.add(id(value))
    for inner in inside:
        yield from leaves(inner, seen, depth + 1)
