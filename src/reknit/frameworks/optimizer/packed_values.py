"""Values in states of optimizers in a form for checkpoints: dicts with any keys, and plain objects."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from reknit.errors import StateError
from reknit.frameworks import tree

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

_PAIRS = "~pairs"
"""Key of the list of keys and values of a dict."""

_KIND, _ATTRIBUTES = "~class", "attributes"
"""Keys of the module and name of a class, and of the attributes of an object."""

_FORMS = ({_PAIRS}, {_KIND, _ATTRIBUTES})
"""Keys of the dicts that stand for other values; a user's dict with these keys is saved as pairs."""

_SPECIAL = frozenset(
    {"__new__", "__init_subclass__", "__del__", "__slots__", "__getstate__", "__setstate__"}
    | {"__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__", "__setattr__"}
)
"""Members of a class whose objects may be more than their attributes."""

_HEAP_TYPE = 1 << 9
"""Flag of a class that was made by Python code."""


def packages(optimizer: Any) -> frozenset[str]:
    """Return the packages that an optimizer is made of, besides torch: their objects may be in its states."""
    found = {one.__module__.partition(".")[0] for one in type(optimizer).__mro__}
    return frozenset(found - {"torch", "builtins", "typing", "abc"})


def packed(value: Any, own: AbstractSet[str]) -> Any:
    """Return a value with lists in the place of dicts with keys other than texts and integers.

    A plain object of the packages `own` becomes a dict of its attributes.
    """

    def pack(_: tree.Path, leaf: Any) -> Any:
        if type(leaf) is dict and (leaf.keys() in _FORMS or not all(_is_usual(key) for key in leaf)):
            return {_PAIRS: [[key, packed(one, own)] for key, one in leaf.items()]}
        if own and _is_plain(kind := type(leaf), own):
            named = [kind.__module__, kind.__qualname__]
            return {_KIND: named, _ATTRIBUTES: packed(dict(vars(leaf)), own)}
        return tree.DESCEND

    return tree.map_leaves(value, pack)


def unpacked(value: Any, own: AbstractSet[str]) -> Any:
    """Return the value that `packed` changed.  Runs no code of a class.

    Raises `StateError` for an object of a class that is not in the packages `own`, or not plain.
    """

    def unpack(_: tree.Path, leaf: Any) -> Any:
        if type(leaf) is not dict:
            return tree.DESCEND
        if leaf.keys() == {_PAIRS}:
            try:
                return {key: unpacked(one, own) for key, one in leaf[_PAIRS]}
            except (TypeError, ValueError) as error:
                raise StateError(f"its value has pairs that are not those of a dict: {error}") from error
        if leaf.keys() == {_KIND, _ATTRIBUTES}:
            made: Any = object.__new__(_class(leaf[_KIND], own))
            attributes = unpacked(leaf[_ATTRIBUTES], own)
            if not isinstance(attributes, dict) or not all(isinstance(key, str) for key in attributes):
                raise StateError("its value has an object whose attributes have no names")
            vars(made).update(attributes)
            return made
        return tree.DESCEND

    return tree.map_leaves(value, unpack)


def _is_usual(key: Any) -> bool:
    return isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool))


def _is_plain(kind: type, own: AbstractSet[str]) -> bool:
    """Return whether objects of a class are their attributes, and can be made again from its name."""
    if kind.__module__.partition(".")[0] not in own or _found(kind.__module__, kind.__qualname__) is not kind:
        return False
    return all(one.__flags__ & _HEAP_TYPE and not _SPECIAL & vars(one).keys() for one in kind.__mro__[:-1])


def _found(module: str, name: str) -> Any:
    """Return the object of this name in a module that is imported, or None."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _class(named: Any, own: AbstractSet[str]) -> type:
    module, name = map(str, named) if isinstance(named, list) and len(named) == 2 else ("?", "?")
    found = _found(module, name)
    if not isinstance(found, type) or not _is_plain(found, own):
        raise StateError(
            f"its value has an object of the class {module}.{name}, which is not a plain class of "
            f"{', '.join(sorted(own)) or 'the optimizer'} here",
            remedy="install the version of the optimizer's package that saved it",
        )
    return found
