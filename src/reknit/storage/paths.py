"""The names that a store accepts, relative and never outside its root, and the options in its URL."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qsl

from reknit.errors import StorageError, UsageError
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


_LOCKED = r"(?:manifest\.json|pending\.[0-9a-f]{16}\.[0-9a-f]{8})\.lock"
_OWN_TEMPORARY = rf"\.(?:[0-9a-f]{{32}}(?:-[0-9]+-[0-9]+)?|{_LOCKED})\.tmp"


def check_path(path: str, url: str) -> str:
    """Return `path` unchanged if it names a place below the root of the store at `url`.

    Raises `StorageError` otherwise.  Every store refuses the same names, so that the files of one store fit
    into any other.
    """
    fault = _fault(path)
    if fault is None:
        return path
    raise StorageError(
        f"{path!r} is not a path below {url}: {fault}",
        remedy="use a relative path with forward slashes, such as 'model/00000.safetensors'",
        path=url,
    )


def check_readable(place: str) -> str:
    """Return the path or URL of a root unchanged.  Raises `UsageError` if it is not a text.

    Names on a disk may be any bytes, but manifests, messages and events hold texts.
    """
    if place.isascii() or _is_text(place):
        return place
    raise UsageError(
        f"{place!r} is not valid Unicode, so no checkpoint can be there",
        remedy="rename the folder, or pass a link to it that has a name in UTF-8: ln -s",
    )


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_temporary(name: str) -> bool:
    """Return whether a file name belongs to a write under way, or to a removed file that NFS still holds."""
    return name.startswith(".nfs") or (name.startswith(".") and name.endswith(".tmp"))


def is_own_temporary(name: str) -> bool:
    """Return whether a file name was made by a store of reknit for a write under way, or for a lock."""
    return name.endswith(".tmp") and re.fullmatch(_OWN_TEMPORARY, name) is not None


def kind_of(path: str) -> Literal["file", "temporary"] | None:
    """Return the kind of a path: a file, a write of reknit under way, or None for another program's write."""
    if is_own_temporary(path.rpartition("/")[2]):
        return "temporary"
    return None if any(map(is_temporary, path.split("/"))) else "file"


def _fault(path: str) -> str | None:
    if not path:
        return "it is empty"
    if path.startswith("/"):
        return "it is absolute"
    if "\0" in path:
        return "it holds a NUL"
    if "\\" in path:
        return "it holds a backslash, which separates folders on some stores"
    if not (path.isascii() or _is_text(path)):
        return "it is not valid Unicode"
    for name in path.split("/"):
        if name in ("", ".", ".."):
            return f"it holds the component {name!r}"
        if is_temporary(name):
            return f"the name {name!r} is reserved for files under way"
    return None
