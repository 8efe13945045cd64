"""Options of a store in the query part of its URL."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from reknit.errors import UsageError
from reknit.options import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

_KINDS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
}
"""Conversions from text, by the type of the field; all other fields are texts."""


def url_options(url: str, query: str, options: type[Any], **special: Callable[[str], Any]) -> dict[str, Any]:
    """Return the options in a query, by field; a key ``x_mib`` stands for the field ``x_nbytes``.

    Their values have the types of the fields; `special` has conversions from text for some keys.  Raises
    `UsageError`.
    """
    convert: dict[str, Callable[[str], Any]] = {}
    for field in fields(options):
        key = field.name.replace("_nbytes", "_mib")
        made = _KINDS.get(str(field.type).partition(" | ")[0], str)
        convert[key] = special.get(key, made if key == field.name else mebibytes)
    remedy = f"keys of reknit are {', '.join(convert)}, retry_s"
    found: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in convert:
            raise UsageError(f"{url!r} has the unknown option {key!r}", remedy=remedy)
        try:
            found[key.replace("_mib", "_nbytes")] = convert[key](text)
        except (ValueError, KeyError) as error:
            raise UsageError(f"{url!r}: {text!r} is not a value of {key}", remedy=remedy) from error
    return found


def mebibytes(text: str) -> int:
    """Return the bytes of so many MiB."""
    return int(text) * MIB


def require(ok: object, message: str) -> None:
    """Raise `UsageError` with the message unless `ok`."""
    if not ok:
        raise UsageError(message)
