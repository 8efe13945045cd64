"""Decoders for types, which one thread at a time makes.

msgspec resolves the annotations of a type at its first use.  If two threads do that at once for types that
share a part, the process ends by a signal (seen with msgspec 0.22.0).
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_made: dict[tuple[Any, bool], Callable[[Any], Any]] = {}


_making = threading.Lock()


def _after_fork() -> None:
    global _making
    _making = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork)


@overload
def decoder(kind: type[T], *, json: bool = ...) -> Callable[[Any], T]: ...
@overload
def decoder(kind: Any, *, json: bool = ...) -> Callable[[Any], Any]: ...
def decoder(kind: Any, *, json: bool = False) -> Callable[[Any], Any]:
    """Return the function that decodes MessagePack, or JSON, as a type, with the errors of msgspec."""
    found = _made.get((kind, json))
    if found is None:
        with _making:
            made: Any = msgspec.json.Decoder(kind) if json else msgspec.msgpack.Decoder(kind)
        found = _made[kind, json] = made.decode
    return found


def converted(value: Any, kind: type[T]) -> T:
    """Return plain values as a type.  Raises `msgspec.ValidationError`."""
    with _making:
        return msgspec.convert(value, kind)
