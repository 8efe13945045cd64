"""The store that a URL names, also of a checkpoint whose files are at another place."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import unquote

from reknit import plugins
from reknit.environment import fsspec_config
from reknit.errors import MissingExtraError, UnknownSchemeError, UsageError, shown
from reknit.locations import absolute, is_location, location_text
from reknit.options import Durability
from reknit.storage.base import Storage
from reknit.storage.local.store import LocalStorage
from reknit.storage.paths import check_readable
from reknit.storage.wrappers.forwarding import ForwardingStorage, RecordingStorage

if TYPE_CHECKING:
    from reknit.events.phase import Recorder


class MovedStorage(ForwardingStorage):
    """A store that also opens the place to which the files of its checkpoint have moved, and closes it."""

    def __init__(self, inner: Storage, open_at: Callable[[str], Storage]) -> None:
        super().__init__(inner)
        self._open_at = open_at
        self._places: dict[str, Storage] = {}
        self._derived: Storage | None = None
        self._opening = threading.Lock()

    def around(self, inner: Storage, path: str) -> MovedStorage:
        """Return the store below, whose files may have moved elsewhere."""
        return MovedStorage(inner, self._open_at)

    def files_at(self, place: str | None) -> Storage:
        """Return the store of a place, or the inner store."""
        if place is None:
            return self.inner
        with self._opening:
            if place not in self._places:
                self._places[place] = self._open_at(place)
            return self._places[place]

    def with_derived(self, make: Callable[[Storage], Storage]) -> Storage:
        """Return the store that `make` makes of the inner one, the same one each time."""
        with self._opening:
            if self._derived is None:
                self._derived = make(self.inner)
            return self._derived

    def close(self) -> None:
        """Close all stores."""
        if self._derived is None:
            super().close()
        else:
            self._derived.close()  # and the inner store with it
        for storage in self._places.values():
            storage.close()


Factory = Callable[[str, Durability], Storage]

ENTRY_POINTS = "reknit.storage"
_OF_OBSTORE = (3, 11)
"""The oldest Python that obstore is made for."""
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*"


def open_storage(url: str | os.PathLike[str], *, durability: Durability = "power") -> Storage:
    """Return the store at `url`: a folder's path, ``file://``, ``mem://``, or a registered scheme.

    Requests to stores over a network are repeated if the store cannot be reached, see
    `storage.wrappers.retrying`; their URLs have the option ``?retry_s=``.  A registered store is opened
    without retries.

    A URL of an unknown store raises `UnknownSchemeError` and does not become a folder of that name.  A folder
    whose name begins like a URL is given by its absolute path.
    """
    text = _text(url)
    scheme = _scheme(text)
    if scheme is None:
        return LocalStorage(_expand(text), durability=durability)
    factory = factories.get(scheme) or _of_plugins(scheme, text)
    if factory is None:
        raise _unknown(scheme, text)
    if "://" not in text and scheme != "file":
        raise UsageError(f"{text!r} is not a URL", remedy=f"write {scheme}://... with two slashes")
    return factory(text, durability)


def recorded(storage: Storage, recorder: Recorder) -> Storage:
    """Return the store with its operations recorded in the recorder's sinks; unchanged without sinks."""
    return RecordingStorage(storage, recorder) if recorder.sinks else storage


def following(storage: Storage) -> Storage:
    """Return the store of a checkpoint, with access to the place to which its files may have moved."""
    return MovedStorage(storage, open_storage)


class StoreRecipe(NamedTuple):
    """The way in which another process of this machine opens a store; `agents_can_open` is False if none can.

    `url` does not depend on the working folder.  `factory` names a factory that only this process has
    registered, for `adopt`: ``module:function``, or ``protocol=module:class`` for each protocol of fsspec in
    the URL.
    """

    url: str
    agents_can_open: bool
    factory: str | None = None

    def open(self, durability: Durability, recorder: Recorder) -> Storage:
        """Open the store, whose operations are recorded."""
        return recorded(open_storage(self.url, durability=durability), recorder)

    def copies_files(self, durability: Durability) -> bool:
        """Return whether the store can copy files of an earlier checkpoint.

        Only a store of another package is opened for that; those of this module can.
        """
        if getattr(factories.get(_scheme(self.url) or "file"), "__module__", "") == __name__:
            return True
        with closing(open_storage(self.url, durability=durability)) as storage:
            return getattr(storage, "copy_from", None) is not None


def recipe(url: str | os.PathLike[str]) -> StoreRecipe:
    """Return the way in which another process opens the store at `url`, which need not exist."""
    text = _text(url)
    scheme = _scheme(text)
    if scheme is None:
        return StoreRecipe(check_readable(absolute(_expand(text))), agents_can_open=True)
    factory = factories.get(scheme)
    if getattr(factory, "__module__", "") == __name__ or scheme in plugins.STORAGE:
        return StoreRecipe(text, agents_can_open=True)
    if factory is None:
        return _recipe_of_others(scheme, text)
    reference = reference_of(factory)
    agents_can_open = reference is not None and fsspec_config() is not None
    return StoreRecipe(text, agents_can_open=agents_can_open, factory=reference if agents_can_open else None)


def adopt(url: str, factory: str) -> None:
    """Open the stores of this URL, from now on, with the `factory` of its recipe in another process."""
    for maker in factory.split():
        protocol, _, reference = maker.rpartition("=")
        module, _, name = reference.partition(":")
        made = getattr(importlib.import_module(module), name)
        if protocol:
            plugins.find(ENTRY_POINTS, plugins.ANY).adopt(protocol, made)
        else:
            factories[url.partition(":")[0].lower()] = made


def _recipe_of_others(scheme: str, url: str) -> StoreRecipe:
    """Return the recipe of a URL that a library opens for a scheme which nobody has registered here."""
    makers = plugins.find(ENTRY_POINTS, plugins.ANY).makers_of(scheme, url)
    if makers is None:
        return StoreRecipe(url, agents_can_open=True)  # an entry point opens it, or nothing
    references = [(protocol, None if maker is None else reference_of(maker)) for protocol, maker in makers]
    known = fsspec_config() is not None and all(reference is not None for _, reference in references)
    if not known and scheme not in plugins.installed(ENTRY_POINTS):
        return StoreRecipe(url, agents_can_open=False)
    named = " ".join(f"{protocol}={reference}" for protocol, reference in references)
    return StoreRecipe(url, agents_can_open=True, factory=named if known else None)


def reference_of(maker: object) -> str | None:
    """Return ``module:name`` by which another process imports the same object, None if it cannot."""
    module, name = getattr(maker, "__module__", ""), getattr(maker, "__qualname__", "")
    loaded = sys.modules.get(module)
    spec = getattr(loaded, "__spec__", None)
    if module == "__main__" or getattr(loaded, name, None) is not maker or spec is None:
        return None
    parent = sys.modules.get(module.rpartition(".")[0])
    path = getattr(parent, "__path__", None)
    found = (finder.find_spec(module, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    first = next((one for one in found if one is not None), None)
    return None if first is None or first.origin != spec.origin else f"{module}:{name}"


def _text(url: object) -> str:
    """Return a place as text.  Raises `UsageError` for anything but a place."""
    text = location_text(url) if is_location(url) else url
    if isinstance(text, str) and text:
        return check_readable(text)
    remedy = "give a path or a URL"
    if isinstance(text, bytes):
        remedy = "give a path or a URL as text: os.fsdecode makes it of bytes"
    elif hasattr(text, "read") or hasattr(text, "write"):  # as torch.save takes it
        remedy = "a checkpoint is a folder, not an open file: give its path or URL"
    elif isinstance(text, Mapping) or hasattr(text, "state_dict"):  # as torch.save takes it
        remedy = 'the path comes first, then the state: "checkpoints/step_1", {"model": model}'
    elif text is None:
        remedy += "; reknit.latest returns None where there is no checkpoint yet: check before you load"
    raise UsageError(f"a place to store is needed, not {shown(url)}", remedy=remedy)


def register(scheme: str, factory: Factory) -> None:
    """Let `factory(url, durability)` open the URLs of a scheme in this process.

    A package registers permanently with an entry point for the factory, in the group ``reknit.storage``, with
    the name of the scheme.  Raises `UsageError` when the scheme is taken.
    """
    if not re.fullmatch(_SCHEME, scheme) or scheme != scheme.lower():
        raise UsageError(f"{scheme!r} cannot be a scheme", remedy="use small letters and digits")
    if scheme in plugins.STORAGE or factories.setdefault(scheme, factory) is not factory:
        raise UsageError(f"the scheme {scheme!r} is registered already")


def _scheme(text: str) -> str | None:
    """Return the text before a colon in the first part of a path, if it could be the scheme of a store."""
    head, colon, rest = text.partition(":")
    if not colon or "/" in head:
        return None
    return head.lower() if re.fullmatch(_SCHEME, head) or rest.startswith("//") else None


def _expand(path: str) -> str:
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise UsageError(f"{path!r} names the home of an unknown user", remedy="write ./~name for a folder")
    return expanded


def _of_plugins(scheme: str, url: str) -> Factory | None:
    """Return the factory of a plug-in for a scheme, None if none has one.  Raises `UsageError`."""
    found = None if scheme == plugins.ANY else plugins.find(ENTRY_POINTS, scheme, repr(url))
    if found is None:
        return cast("Factory | None", plugins.find(ENTRY_POINTS, plugins.ANY).factory_of(scheme))
    if not callable(found):
        entry = plugins.installed(ENTRY_POINTS)[scheme]
        raise UsageError(
            f"{plugins.shown_entry(entry)}, which is {shown(found)} and not a function that opens a URL",
            remedy=plugins.remedy_for(entry),
        )
    return (
        partial(_opened_by, scheme, found)
        if scheme in plugins.installed(ENTRY_POINTS)
        else cast("Factory", found)
    )


def _opened_by(scheme: str, factory: Factory, url: str, durability: Durability) -> Storage:
    """Return the store that another distribution opens.  Raises `UsageError` for anything else."""
    storage = factory(url, durability)
    if not callable(getattr(storage, "read_into", None)):
        entry = plugins.installed(ENTRY_POINTS)[scheme]
        raise UsageError(
            f"{plugins.shown_entry(entry)}, which returned {shown(storage)} and no store for {url!r}",
            remedy=plugins.remedy_for(entry),
        )
    return storage


def _unknown(scheme: str, text: str) -> UnknownSchemeError:
    message = f"no storage is registered for {scheme!r}, as in {text!r}"
    known = ", ".join(f"{name}://" for name in sorted({*factories, *plugins.STORAGE} - {plugins.ANY}))
    return UnknownSchemeError(
        message,
        remedy=f"use a plain path, {known}, or a scheme that a package registers in the entry-point group "
        f"{ENTRY_POINTS!r}; for a folder of that name, give its absolute path",
    )


def _open_file(url: str, durability: Durability) -> Storage:
    rest = url.partition(":")[2]
    host, slash, path = rest[2:].partition("/") if rest.startswith("//") else ("", "", rest)
    if host.lower() not in ("", "localhost"):
        raise UsageError(
            f"{url!r} names the host {host!r}", remedy="a file URL has three slashes: file:///folder"
        )
    if "?" in url or "#" in url:
        raise UsageError(f"{url!r} holds '?' or '#'", remedy="write %3F and %23 in a file URL")
    path = unquote(slash + path, errors="surrogateescape")
    if not path.startswith("/"):
        raise UsageError(f"{url!r} names no absolute path", remedy="a file URL is file:///folder")
    return LocalStorage(path, durability=durability)


def _open_memory(url: str, durability: Durability) -> Storage:
    from reknit.storage.local.memory import MemoryStorage

    # There is nothing to sync, with any durability.
    name, _, below = url.partition("://")[2].strip("/").partition("/")
    if not name:
        raise UsageError(f"{url!r} names no store", remedy="write mem://name or mem://name/folder")
    storage = MemoryStorage(name)
    return storage.sub(below) if below else storage


def _open_object(url: str, durability: Durability) -> Storage:
    from reknit.storage.wrappers.retrying import with_retries

    return with_retries(resumes=False)(_open_bucket)(url, durability)


def _open_bucket(url: str, durability: Durability) -> Storage:
    # An object that exists stays, with any durability.
    try:
        from reknit.storage.object.store import open_object
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "obstore":
            raise
        extra = {"s3": "s3", "gs": "gcs", "az": "azure"}[url.partition(":")[0].lower()]
        remedy = f"pip install 'reknit[{extra}]'"
        if (version := sys.version_info[:2]) < _OF_OBSTORE:
            remedy = "run it with Python {}.{} or newer: obstore has nothing for {}.{}".format(
                *_OF_OBSTORE, *version
            )
        raise MissingExtraError(f"{url!r} needs the package obstore", remedy=remedy) from None
    return open_object(url)


factories: dict[str, Factory] = {
    "file": _open_file,
    "mem": _open_memory,
    **dict.fromkeys(("s3", "gs", "az"), _open_object),
}
