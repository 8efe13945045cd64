"""Rendezvous: the small store in which each rank lists its host and address, so that all can connect."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar
from urllib.parse import quote

import msgspec

from reknit.comm.group import doubling
from reknit.comm.round_errors import LOOK_S, process_ended
from reknit.environment import host_name
from reknit.errors import (
    CommError,
    DeadlineError,
    ProtocolError,
    ReknitError,
    UsageError,
    from_wire,
    shortage,
)
from reknit.events.phase import Deadline
from reknit.types.small import decoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reknit.comm.group import Topology


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host() -> str:
    """Return the name of this host, which no other host has.

    It is the value of REKNIT_HOST, or else the name of the machine, the id of its boot and its network
    namespace.  So two containers of one machine are two hosts unless they share a network.
    """
    if (name := host_name()) is not None:
        return name
    parts = [socket.gethostname()]
    with suppress(OSError):  # a system without these distinguishes its hosts by name
        parts.append(_BOOT_ID.read_text(encoding="ascii").strip())
        parts.append(_namespace("net"))
    return " ".join(parts)


def reach() -> str:
    """Return the name that processes share if they reach each other's sockets in private folders.

    It holds their user and their mount namespace, which differs between containers that share a network.  It
    is empty if the system does not show these.
    """
    with suppress(OSError):
        return f"{os.geteuid()} {_namespace('mnt')}"
    return ""


def process() -> str:
    """Return the name of this process for other processes of its machine; empty if the system has none."""
    with suppress(OSError):
        boot_id = _BOOT_ID.read_text(encoding="ascii").strip()
        return f"{boot_id} {_namespace('pid')} {os.getpid()}"
    return ""


def has_ended(other: str) -> bool:
    """Return whether the process with this name has ended; False if that is not visible from here."""
    space, _, number = other.rpartition(" ")
    if not space or space != process().rpartition(" ")[0]:
        return False
    import psutil

    try:
        os.kill(int(number), 0)
        return psutil.Process(int(number)).status() == psutil.STATUS_ZOMBIE
    except ProcessLookupError:
        return True
    except (OSError, ValueError, psutil.Error):
        return False


def _namespace(kind: str) -> str:
    return str(os.stat(f"/proc/self/ns/{kind}").st_ino)


_LEFT = b"left "
"""The beginning of the message of a rank that leaves, and of no address."""


class Shape(NamedTuple):
    """The ranks of a group: the name of this run, their places in the tree, and the generation.

    `together`: all ranks are on one host, belong to one user, and see the same files, so that they can meet
    at a socket in a folder.  `processes`: the processes of the ranks below this rank on its host, by the
    names of `identity.process`.
    """

    run: str
    topology: Topology
    generation: int
    together: bool = False
    processes: Mapping[int, str] = MappingProxyType({})


class RankEntry(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The entry of a rank for rank 0: its host, the expected size, the reach of its sockets, its process."""

    host: str
    size: int
    reach: str = ""
    process: str = ""


class HostTable(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """The entry of rank 0 for all: the number of each rank's host, as packed 32-bit integers; or an error."""

    size: int = 0
    fan_out: int = 0
    generation: int = 0
    hosts: bytes = b""
    error: dict[str, Any] | None = None
    together: bool = False


_Message = TypeVar("_Message", RankEntry, HostTable)


def base(job: str) -> str:
    """Return the beginning of the keys of a job, before a slash: no other job has keys below it."""
    return f"reknit/{quote(job, safe='')}"


def host_key(job: str, run: str, rank: int) -> str:
    """Return the key of a rank's `RankEntry`."""
    return f"{base(job)}/{run}/host/{rank}"


def publish_address(store: Store, job: str, run: str, rank: int, address: str) -> None:
    """Publish the address of this rank for the ranks below."""
    store.set(_address_key(job, run, rank), address.encode())


def publish_leaving(store: Store, job: str, run: str, rank: int, error: BaseException) -> None:
    """Publish the error with which this rank leaves the rendezvous, in the place of its address."""
    with suppress(CommError):  # of a store that is gone; they find out by themselves
        store.set(_address_key(job, run, rank), _LEFT + msgspec.msgpack.encode(error_to_wire(error, rank)))


def address_of(store: Store, job: str, shape: Shape, rank: int, timeout_s: float) -> str:
    """Return the address of a rank, once it listens.

    Raises the error with which it left, if it did, `CommError` when its process has ended, `DeadlineError`.
    """
    deadline = Deadline(timeout_s)
    while True:
        try:
            value = store.get(_address_key(job, shape.run, rank), min(LOOK_S, deadline.remaining()))
            break
        except DeadlineError:
            if has_ended(decoded(store.get(host_key(job, shape.run, rank), 0), RankEntry).process):
                raise process_ended(rank) from None
            if deadline.passed():
                raise
    if not value.startswith(_LEFT):
        return value.decode(errors="replace")
    try:
        raise from_wire(decoder(dict[str, Any])(value[len(_LEFT) :]))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise garbled() from error


def _address_key(job: str, run: str, rank: int) -> str:
    return f"{base(job)}/{run}/address/{rank}"


def error_to_wire(error: BaseException, rank: int = 0) -> dict[str, Any]:
    """Return the form in which the other ranks receive an error."""
    known = error if isinstance(error, ReknitError) else shortage(error)
    left = f"rank {rank} left the rendezvous: {type(error).__name__}: {error}"
    return (known or CommError(left)).to_wire()


def decoded(value: bytes, kind: type[_Message]) -> _Message:
    """Return the entry in `value`.  Raises `ProtocolError`."""
    try:
        return decoder(kind)(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise garbled() from error


def garbled() -> ProtocolError:
    """Return the error of an entry that cannot be read."""
    return ProtocolError(
        "the store has a wrong value where ranks publish their addresses",
        remedy="run the same version of reknit on all ranks",
    )


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
