"""The protocols of fsspec: the door to its stores, for all schemes without a store of their own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reknit.errors import MissingExtraError
from reknit.plugins.store import with_retries

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.options import Durability
    from reknit.plugins.store import Storage

_PROTOCOL = re.compile(r"[a-z]+")
"""Links of a chain that are protocols without a path; other links without slashes are paths."""


def factory_of(scheme: str) -> Callable[[str, Durability], Storage] | None:
    """Return the function that opens URLs of a protocol; None without fsspec, or for an unknown one.

    Raises `MissingExtraError` if the package that serves the protocol is not installed.
    """
    try:
        from fsspec.registry import get_filesystem_class, known_implementations, registry
    except ImportError:
        return None
    if scheme not in known_implementations and scheme not in registry:
        return None
    try:
        get_filesystem_class(scheme)
    except ImportError as error:
        raise MissingExtraError(
            f"fsspec cannot serve {scheme}://: {error}", remedy="install the missing package"
        ) from error
    from reknit.stores.fsspec import open_fsspec

    return with_retries(resumes=False)(open_fsspec)


def makers_of(scheme: str, url: str) -> list[tuple[str, type[Any] | None]] | None:
    """Return the protocols of a URL, in which ``::`` may chain several, each with its class.

    A class is None if its files are in the memory of this process.  For an unknown scheme, None is returned.
    """
    if factory_of(scheme) is None:
        return None
    from fsspec import get_filesystem_class
    from fsspec.implementations.memory import MemoryFileSystem

    makers = []
    for link in url.split("::"):
        head, slashes, _ = link.partition("://")
        protocol = head if slashes or _PROTOCOL.fullmatch(head) else "file"
        system = get_filesystem_class(protocol)
        makers.append((protocol, None if issubclass(system, MemoryFileSystem) else system))
    return makers


def adopt(protocol: str, made: type[Any]) -> None:
    """Let a class serve a protocol from now on."""
    from fsspec import register_implementation

    register_implementation(protocol, made, clobber=True)
