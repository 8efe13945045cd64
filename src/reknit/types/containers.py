"""The containers that can be built again from their values, and how."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACES: Final = frozenset({Namespace, SimpleNamespace})
REBUILT: Final = NAMESPACES | {dict, list, tuple, deque, OrderedDict, defaultdict, Counter}
"""Types that can be built again from their values; a subclass may have further state."""


def rebuilt(value: Any, child: Callable[[Any, Any], Any]) -> Any:
    """Return a container of the same type, one of `REBUILT`, with `child(key, value)` for each value in it.

    Attributes of a mapping are copied.
    """
    kind = type(value)
    if kind in NAMESPACES:
        made = kind()
        vars(made).update({name: child(name, inner) for name, inner in vars(value).items()})
        return made
    if issubclass(kind, dict):
        pairs = {key: child(key, inner) for key, inner in value.items()}
        if kind is dict:
            return pairs
        if kind is defaultdict:
            return defaultdict(value.default_factory, pairs)
        made = kind(pairs)
        vars(made).update(vars(value))  # such as the versions that torch's modules store beside their state
        return made
    inner = [child(index, inner) for index, inner in enumerate(value)]
    return deque(inner, value.maxlen) if kind is deque else kind(inner)
