"""Rendezvous: the small store through which ranks find each other before they can connect."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from reknit.comm.backoff import doubling
from reknit.errors import CommError, DeadlineError, UsageError
from reknit.monitor.phase import Deadline

_POLLS_S = (0.005, 0.25)
_LONGEST_NAME = 160
_STALE_TRIES = 8
_VALUE = b"="
"""The beginning of the file of a value, which distinguishes an empty value from a file without a value."""


class Store(Protocol):
    """Named values that every rank of a job sees; used while a group forms, and not after.

    The rest is optional.  ``get_many(keys, timeout_s)`` returns the values of many keys in less time than one
    `get` each takes, and waits until all are there.  ``forget(prefix)`` deletes all keys with that prefix.
    ``master`` is the host of the values, for stores that have a host.  ``is_open`` is true for stores that
    any client of their server can read.
    """

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`, and replace an earlier value."""

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of `key`; wait until it is set, and raise `DeadlineError` after `timeout_s`.

        An existing value is returned even if `timeout_s` is zero.  A store that cannot be reached raises
        another `CommError`.
        """


class FolderStore:
    """A store in a folder that all hosts share: one file per key, readable by its owner only.

    It polls, since a shared folder sends no notice of a new file.  Where the framework has a store of its own
    (torch's TCPStore, the coordination service of JAX), prefer that: it is quicker and needs no folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Path(path)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = self._folder.stat().st_mode
        except OSError as error:
            raise self._failure("made", error) from error
        if mode & stat.S_IWOTH:  # with a sticky bit, too: the first process makes the file
            raise UsageError(
                f"every user of this host can write to the rendezvous folder {self._folder}, and so "
                "impersonate a rank",
                path=str(self._folder),
                remedy=f"chmod o-w {self._folder}, or pass a folder below it, which reknit creates for this "
                "user only",
            )

    def set(self, key: str, value: bytes) -> None:
        """Put `value` under `key`; a reader sees the old value or the new one, never a part."""
        try:
            handle, temporary = tempfile.mkstemp(prefix=".new-", dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_VALUE + value)
                os.replace(temporary, self._file(key))
            except BaseException:
                os.unlink(temporary)
                raise
        except OSError as error:
            raise self._failure("written", error) from error

    def get(self, key: str, timeout_s: float) -> bytes:
        """Return the value of `key`, waiting up to `timeout_s` for it; raises `DeadlineError`."""
        deadline, pauses = Deadline(timeout_s), doubling(*_POLLS_S)
        while True:
            try:
                content = self._read(key)
            except OSError as error:
                raise self._failure("read", error) from error
            if content:
                return content[len(_VALUE) :]
            if deadline.passed():
                raise DeadlineError(
                    f"no rank put {key!r} into the store within {timeout_s:g} s",
                    path=str(self._folder),
                    remedy="check that all ranks were started and see the same folder",
                )
            time.sleep(min(next(pauses), deadline.remaining()))

    def _read(self, key: str) -> bytes:
        """Return the content of the file of a key, empty without a value.

        A missing file is made.  Else an NFS client that has looked in vain would answer from its cache for up
        to a minute.  The client asks its server about a new file of that name when the folder is opened.
        """
        for _ in range(_STALE_TRIES):
            try:
                os.close(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY))
                with os.fdopen(os.open(self._file(key), os.O_RDONLY | os.O_CREAT, 0o600), "rb") as file:
                    return file.read()
            except OSError as error:
                if error.errno != errno.ESTALE:  # it was replaced while it was read
                    raise
        return b""

    def forget(self, prefix: str) -> None:
        """Delete the keys that begin with `prefix`, except very long keys, as far as possible."""
        beginning = f"key-{quote(prefix, safe='')}"
        # Remaining files are litter, and harmless.
        with suppress(OSError):
            for file in list(self._folder.iterdir()):
                if file.name.startswith(beginning):
                    with suppress(OSError):
                        file.unlink()

    def _file(self, key: str) -> Path:
        name = quote(key, safe="")
        if len(name) > _LONGEST_NAME:
            digest = hashlib.sha256(key.encode()).hexdigest()
            return self._folder / f"long-{name[: _LONGEST_NAME - 65]}-{digest}"
        return self._folder / f"key-{name}"

    def _failure(self, verb: str, error: OSError) -> CommError:
        return CommError(
            f"the rendezvous folder cannot be {verb}: {error.strerror or error}",
            path=str(self._folder),
            remedy="give a folder that every rank can write to",
        )
