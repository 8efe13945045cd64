"""Stores that fail by their URL, so that a process which only gets the URL fails where a test wants it.

``faulty://kill@7/data/step_7`` is the folder ``/data/step_7`` behind a `FaultyStorage` in which the seventh
operation kills the process; ``faulty://full@write:2,kill@put:1/data/step_7`` counts the writes and the puts.
An agent opens the store of a save again by its URL, so such a URL makes a save fail in an agent.  It may be
the agent of one rank only, since ranks may save to different URLs of one folder.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, get_args
from urllib.parse import quote, unquote

from reknit.errors import UsageError
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.testing.faulty_storage import Fault, FaultKind, FaultyStorage

if TYPE_CHECKING:
    from collections.abc import Callable

    from reknit.options import Durability

SCHEME = "faulty"
NO_FAULT = "none"
_POLL_S = 0.005
_KINDS: dict[str, FaultKind] = {kind: kind for kind in get_args(FaultKind)}


def faulty_url(path: str | os.PathLike[str], *faults: Fault, gate: str | os.PathLike[str] = "") -> str:
    """Return a URL of the folder `path` in which `faults` happen, counted in each process.

    A fault of the kind ``stall`` waits until a file `gate` exists.  `path` is absolute.  Every store that is
    opened counts from 1, so in an agent that serves many saves each save meets the faults.
    """
    text = os.fspath(path)
    if not os.path.isabs(text):
        raise UsageError(f"a faulty URL names an absolute path, not {text!r}")
    plan = ",".join(f"{fault.kind}@{_place(fault)}" for fault in faults) or NO_FAULT
    url = f"{SCHEME}://{plan}{quote(text)}"
    return f"{url}?gate={quote(os.fspath(gate))}" if gate else url


def open_faulty(url: str, durability: Durability) -> FaultyStorage:
    """Open a URL of `faulty_url`.  Raises `UsageError` for another one."""
    rest, _, gate = url.partition("://")[2].partition("?gate=")
    plan, slash, path = rest.partition("/")
    faults = [] if plan == NO_FAULT else [_fault(text, url) for text in plan.split(",")]
    if not slash:
        raise UsageError(f"{url!r} names no absolute path")
    inner = LocalStorage(unquote(slash + path), durability=durability)
    if not gate:
        return FaultyStorage(inner, plan=faults)
    return FaultyStorage(inner, plan=faults, stall=_opened(unquote(gate)))


def register_faulty() -> None:
    """Let this process, and the agents that it starts, open ``faulty://``."""
    register(SCHEME, open_faulty)


def _place(fault: Fault) -> str:
    return str(fault.at) if fault.operation is None else f"{fault.operation}:{fault.at}"


def _fault(text: str, url: str) -> Fault:
    """Return the fault that is written as ``kind@number`` or ``kind@operation:number``."""
    kind, at, place = text.partition("@")
    operation, _, number = place.rpartition(":")
    if not at or kind not in _KINDS or not number.isdecimal():
        raise UsageError(
            f"{text!r} in {url!r} is not a fault", remedy="write kind@number or kind@operation:number"
        )
    return Fault(_KINDS[kind], int(number), operation or None)


def _opened(gate: str) -> Callable[[], None]:
    """Return a function that waits until a file exists."""

    def wait() -> None:
        while not os.path.exists(gate):
            time.sleep(_POLL_S)

    return wait
