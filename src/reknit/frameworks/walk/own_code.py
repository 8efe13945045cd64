"""Errors for exceptions of an object's own code: they name the object and the cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.errors import ReknitError, StateError, shortage

if TYPE_CHECKING:
    from reknit.frameworks.walk.walk import Place

_MEND = "correct the code that raised it (the exception is the cause of this error), or leave the object out"
_WRAP = (
    "wrap an object that has a state (for a data loader, torchdata's StatefulDataLoader), or leave it out "
    "and save its position as a number; reknit.integrations.accelerate does that for prepared loaders"
)
_STATE = ("state_dict", "load_state_dict")
_DEPTH = 3


def failed_save(error: Exception, value: Any, place: Place) -> ReknitError:
    """Return the error for a value whose own code raised an exception while the value was collected."""
    return shortage(error) or StateError(
        f"{place} ({type(value).__name__}) could not be saved: {cause(error, value)}",
        remedy=_MEND if _stateless(error, value) is None else _WRAP,
    )


def failed_search(error: Exception, value: Any, place: Place) -> ReknitError:
    """Return the error for a target whose own code raised an exception before anything was read."""
    return shortage(error) or StateError(
        f"{place} ({type(value).__name__}) could not be looked at, and nothing was changed: "
        f"{cause(error, value)}",
        remedy=_MEND if _stateless(error, value) is None else _WRAP,
    )


def cause(error: Exception, value: Any = None) -> str:
    """Return type and text of an exception, and the object within `value` that lacks a state, if one does."""
    text = f"{type(error).__name__}: {error}"
    if (inner := _stateless(error, value)) is None:
        return text
    return f"it passes on the state of a {type(inner).__name__}, which has none ({text})"


def _stateless(error: Exception, value: Any) -> Any:
    """Return the object whose state a wrapper passes on, although it has none; None for other errors.

    A wrapper asks it for `state_dict`, or passes on the request for an attribute of its own, which is set
    only if there is a state.
    """
    inner = getattr(error, "obj", None) if isinstance(error, AttributeError) else None
    if inner is None or any(hasattr(type(inner), name) for name in _STATE):
        return None
    if error.name in _STATE:  # type: ignore[attr-defined]
        return inner
    holders = [value]
    for _ in range(_DEPTH):
        for holder in holders:
            held = _attributes(holder)
            if hasattr(type(holder), "__getattr__") and any(each is inner for each in held):
                return inner
        holders = [each for holder in holders for each in _attributes(holder)]
    return None


def _attributes(value: Any) -> list[Any]:
    return list(getattr(value, "__dict__", {}).values())
