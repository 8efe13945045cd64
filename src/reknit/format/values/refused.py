"""Error messages for values that cannot be stored and for payloads that do not fit their type."""

from __future__ import annotations

from typing import Any

from reknit.errors import CorruptError


class RefusedError(Exception):
    """A value that the format does not store.

    `steps` is the way from the value up to the entry of the state, filled in as the refusal passes.
    """

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.remedy = remedy
        self.steps: list[str] = []

    @property
    def path(self) -> str:
        """The place of the value, from the entry of the state down."""
        return "".join(reversed(self.steps))


def fields(payload: Any, *kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the members of a payload that must be a list of exactly these types; `object` means any."""
    if type(payload) is not list or len(payload) != len(kinds):
        raise CorruptError(f"a stored value is not a list of {len(kinds)} fields")
    for member, kind in zip(payload, kinds, strict=True):
        allowed = kind if isinstance(kind, tuple) else (kind,)
        # exact, because a bool is an int to isinstance
        if object not in allowed and type(member) not in allowed:
            raise CorruptError(f"a stored value has a field of type {type(member).__name__}")
    return payload
