"""Options of a store in the query part of its URL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from reknit.errors import UsageError
from reknit.options import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def url_options(url: str, query: str, convert: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Return the options that a query gives, by field; a key ``x_mib`` stands for the field ``x_nbytes``.

    `convert` makes values of their text, by key.  Raises `UsageError`.
    """
    remedy = f"keys of reknit are {', '.join(convert)}, retry_s"
    found: dict[str, Any] = {}
    for key, text in parse_qsl(query, keep_blank_values=True):
        if key not in convert:
            raise UsageError(f"{url!r} has the unknown option {key!r}", remedy=remedy)
        try:
            found[key.replace("_mib", "_nbytes")] = convert[key](text)
        except (ValueError, KeyError) as error:
            raise UsageError(f"{url!r}: {text!r} is no value of {key}", remedy=remedy) from error
    return found


def mebibytes(text: str) -> int:
    """Return the bytes of so many MiB."""
    return int(text) * MIB


def require(ok: bool, message: str) -> None:
    """Raise `UsageError` with the message unless `ok`."""
    if not ok:
        raise UsageError(message)
