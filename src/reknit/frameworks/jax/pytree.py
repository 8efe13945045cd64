"""JAX's pytree nodes: saved by the names of their children, and rebuilt around new ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import tree_util

from reknit.errors import StateError
from reknit.frameworks.plain import filled_fields, want_successor
from reknit.frameworks.tree import too_deep
from reknit.frameworks.walk.adapter import Adapter
from reknit.types.shard import MAX_DEPTH

if TYPE_CHECKING:
    from reknit.frameworks.walk.load_walk import Loading
    from reknit.frameworks.walk.save_walk import Saving
    from reknit.frameworks.walk.walk import Assign, Place

_LEAVES = frozenset({int, float, complex, str, bytes, bool, type(None)})


def is_node(value: Any) -> bool:
    """Tell whether a value is a registered node that no other library's containers are."""
    if type(value) in _LEAVES or isinstance(value, (jax.Array, list, tuple, MutableMapping, type)):
        return False
    return type(value) is not dict and not tree_util.all_leaves((value,))


class _Node(NamedTuple):
    """A node one level deep: the children by key, and what rebuilds it.  A `box` has no name of its own."""

    children: dict[str | int, Any]
    build: Any
    box: bool


def _opened(value: Any, place: Place) -> _Node:
    """Return what is in a node.  Raises `StateError` where two children have one name."""
    paths, build = tree_util.tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)
    children = {_key(path[0]): inner for path, inner in paths}
    if len(children) < len(paths):
        raise StateError(
            f"{place} is a {type(value).__name__} whose children do not all have keys of their own",
            remedy="register it with jax.tree_util.register_pytree_with_keys",
        )
    # Flax wraps arrays in objects that say how they are split or used, and are no part of their names.
    box = type(value).__module__.startswith("flax.") and list(children) == ["value"]
    return _Node(children, build, box or _is_variable(value))


def _key(entry: Any) -> str | int:
    for attribute in ("name", "idx", "key"):
        if hasattr(entry, attribute):
            key: str | int = getattr(entry, attribute)
            return key
    return str(entry)


def _is_variable(value: Any) -> bool:
    """Tell whether this is a variable of Flax NNX, which holds an array and can be given another one."""
    return any(
        kind.__module__.startswith("flax.nnx") and kind.__name__ == "Variable" for kind in type(value).__mro__
    )


@dataclass(frozen=True, slots=True)
class Into:
    """Puts an array into a variable, which may be in the target at several places."""

    variable: Any

    def __call__(self, new: Any) -> None:
        """Give the variable its new array."""
        self.variable.set_raw_value(new)


class JaxNodeAdapter(Adapter):
    """Dataclasses, frozen dicts, and whatever else JAX has been told how to take apart."""

    def matches(self, value: Any) -> bool:
        """Tell whether JAX can take this apart."""
        return is_node(value)

    def collect(self, value: Any, place: Place, saving: Saving) -> None:
        """Collect what is inside."""
        node = _opened(value, place)
        for key, inner in node.children.items():
            saving.visit(inner, place if node.box else place.child(key))

    def wanted(self, value: Any, place: Place, loading: Loading, assign: Assign) -> None:
        """Ask for what is inside; if anything in it has to be replaced, so has the node."""
        node = _opened(value, place)
        loading.leave_nones(place, node.children)
        if _is_variable(value):
            for inner in node.children.values():
                loading.visit(inner, place, Into(value))  # it keeps its place in the model
            return

        def rebuilt(fresh: dict[str | int, Any]) -> Any:
            return tree_util.tree_unflatten(node.build, list((node.children | fresh).values()))

        children = [(k, inner, place if node.box else place.child(k)) for k, inner in node.children.items()]
        if not isinstance(value, Mapping):
            children = filled_fields(children, loading)
        want_successor(children, rebuilt, loading, assign)


def leaves(value: Any, seen: set[int], depth: int = 0) -> Iterator[Any]:
    """Yield what is in nested containers and nodes, each of which is looked into once, as `seen` knows.

    Raises `StateError` where these are too deep.
    """
    if type(value) in _LEAVES or id(value) in seen:
        return
    if depth > 2 * MAX_DEPTH:  # what is at one place may be as deep again
        raise too_deep("the state")
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
