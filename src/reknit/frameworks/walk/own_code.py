"""Errors for exceptions of an object's own code: they name the object and the cause."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reknit.errors import ReknitError, StateError, shortage

if TYPE_CHECKING:
    from reknit.frameworks.walk.walk import Place

_MEND = "correct the code that raised it (the exception is the cause of this error), or leave the object out"


def failed_save(error: Exception, value: Any, place: Place) -> ReknitError:
    """Return the error for a value whose own code raised an exception while the value was collected."""
    return shortage(error) or StateError(
        f"{place} ({type(value).__name__}) could not be saved: {cause(error)}", remedy=_MEND
    )


def failed_search(error: Exception, value: Any, place: Place) -> ReknitError:
    """Return the error for a target whose own code raised an exception before anything was read."""
    return shortage(error) or StateError(
        f"{place} ({type(value).__name__}) could not be looked at, and nothing was changed: {cause(error)}",
        remedy=_MEND,
    )


def cause(error: Exception) -> str:
    """Return type and text of an exception."""
    return f"{type(error).__name__}: {error}"
