"""The errors of reknit, grouped by the action of a handler.

::

    ReknitError                        catch this to catch everything
    ├── UsageError (ValueError)        the call is wrong: correct the code
    │   ├── StateError                 `state` holds something that cannot be saved or filled
    │   ├── KeywordError (TypeError)   the call has no such keyword
    │   ├── UnknownSchemeError         no storage is registered for this URL
    │   └── MissingExtraError          an optional dependency is not installed
    ├── CheckpointNotFoundError        there is no committed checkpoint here
    ├── CheckpointExistsError          there is one already, and overwrite=False
    ├── FormatError                    the bytes do not conform to the format
    │   ├── VersionError               written by a newer reknit
    │   └── CorruptError               damaged: flipped, truncated, missing or swapped
    ├── MismatchError                  checkpoint and target do not fit; nothing was changed
    │   └── DroppedError               an item was requested that was removed to save space
    ├── CommitError                    the ranks' parts do not make a whole; nothing was committed
    │   ├── FencedError                a newer run of the job, or a later save, is in its place
    │   ├── AgentError                 the process that writes in the background ended, or gave up
    │   └── SkippedError               skipped, since earlier saves were still being written
    ├── StorageError                   the store refused or failed
    │   ├── StorageNotFoundError
    │   ├── StorageFullError
    │   ├── StoragePermissionError
    │   └── StorageUnavailableError    it could not be reached, or was overloaded: try again
    │       └── UndecidedError         it gave no answer to a commit, and may still carry it out
    ├── ShortageError                  this process has too little memory, threads or open files
    └── CommError                      ranks could not reach each other
        ├── DeadlineError (TimeoutError)
        ├── GroupClosedError           a rank left on purpose
        └── ProtocolError              ranks are not doing the same thing

Every error has a message, a place (`rank`, `phase`, `path`), which `with phase(...)` adds, and a remedy.
`to_wire` and `from_wire` send it to the other ranks, with its type.  `typed` converts foreign errors.
"""

from __future__ import annotations

import errno
import re
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SECRETS = (  # each repeat has a limit: a text may have thousands of beginnings of a URL
    r"""(?i)(://[^\s/?#@:'"]{0,256}:)(?!\d*(?:[/?#'"\s]|$))[^\s@'"]{0,4096}(?:@[^\s@/?#'"]{0,256}){0,8}(?=@)"""
    r"""|(https?://)[^\s/?#@:'"]{1,4096}(?=@)"""
    r"""|([?&](?:[\w-]{0,64}(?:token|passw|secret|signature|credential|key)[\w-]{0,64}|sig)=)[^&\s'"]+"""
)
_MOST_COMPARED = 10_000  # names, so that an error does not take seconds


class ReknitError(Exception):
    """Base of every error that reknit raises on purpose.

    `remedy` is an action for the reader; `rank`, `phase` and `path` are the place of the
    error, and are filled in as it passes code that has them.
    """

    def __init__(
        self,
        message: str,
        *,
        remedy: str | None = None,
        rank: int | None = None,
        phase: str | None = None,
        path: str | None = None,
    ) -> None:
        self.message = without_secrets(readable(message))
        super().__init__(self.message)
        self.remedy = None if remedy is None else without_secrets(readable(remedy))
        self.rank = rank
        self.phase = phase
        self.path = path

    def sign(self, *, rank: int | None = None, phase: str | None = None, path: str | None = None) -> None:
        """Fill in the parts of the place that are still unknown; the innermost signature wins."""
        self.rank = rank if self.rank is None else self.rank
        self.phase = phase if self.phase is None else self.phase
        self.path = path if self.path is None else self.path

    def __str__(self) -> str:
        place = None if self.path is None else without_secrets(readable(str(self.path)))
        places = [
            f"rank {self.rank}" if self.rank is not None else None,
            f"phase {self.phase}" if self.phase is not None else None,
            place if place is not None and place not in self.message else None,
        ]
        where = ", ".join(part for part in places if part)
        text = f"{self.message} [{where}]" if where else self.message
        return f"{text}\n  -> {self.remedy}" if self.remedy else text

    def to_wire(self) -> dict[str, Any]:
        """Return plain data that `from_wire` turns back into an equal error on another rank."""
        return {
            "type": type(self).__name__,
            "message": self.message,
            "remedy": self.remedy,
            "rank": self.rank,
            "phase": self.phase,
            "path": None if self.path is None else readable(str(self.path)),
        }


class UsageError(ReknitError, ValueError):
    """The call is wrong: mend the calling code."""


class StateError(UsageError):
    """`state` holds something that cannot be saved or filled."""


class KeywordError(UsageError, TypeError):
    """The call has no such keyword, or the options no such option."""


class UnknownSchemeError(UsageError):
    """No storage is registered for the scheme of this URL."""


class MissingExtraError(UsageError):
    """An optional dependency is needed here and not installed."""


class CheckpointNotFoundError(ReknitError):
    """There is no committed checkpoint at this path."""


class CheckpointExistsError(ReknitError):
    """There is a committed checkpoint at this path, and `overwrite` is false."""


class FormatError(ReknitError):
    """The bytes do not conform to the format."""


class VersionError(FormatError):
    """The checkpoint has a format version that this reknit cannot read."""


class CorruptError(FormatError):
    """The checkpoint is damaged: bytes are flipped, truncated, missing or swapped."""


class MismatchError(ReknitError):
    """Checkpoint and target do not fit together; nothing was changed."""


class DroppedError(MismatchError):
    """An item was requested that was removed from the checkpoint after the save."""


class CommitError(ReknitError):
    """The parts that the ranks wrote do not make a whole; nothing was committed."""


class FencedError(CommitError):
    """A newer run of this job, or a later save to the same path, has replaced this one.

    This save committed nothing, and must not: the newer save counts.  A process that was replaced should end.
    """


class AgentError(CommitError):
    """The process that writes in the background ended, or could not be started; nothing was committed."""


class SkippedError(CommitError):
    """This save was skipped on request, since earlier ones were still being written (`when_busy`)."""


class StorageError(ReknitError):
    """The store refused or failed."""


class StorageNotFoundError(StorageError):
    """The store has nothing under this name."""


class StorageFullError(StorageError):
    """The store has no room left."""


class StoragePermissionError(StorageError):
    """The store does not allow this."""


class StorageUnavailableError(StorageError):
    """The store could not be reached, or was overloaded; it may or may not have carried out the request."""


class UndecidedError(StorageUnavailableError):
    """The store gave no answer to a commit, and may still carry it out: its files stay."""


class ShortageError(ReknitError):
    """This process has too little memory, threads or open files; the checkpoint may be sound: try again."""


class CommError(ReknitError):
    """Ranks could not reach each other."""


class DeadlineError(CommError, TimeoutError):
    """Something that had to happen did not happen in time."""


class GroupClosedError(CommError):
    """A rank has left the group on purpose, so that further rounds are impossible."""


class ProtocolError(CommError):
    """Ranks are not doing the same thing at the same time."""


def readable(text: str) -> str:
    """Return a text that every message and file can hold: names on a disk may be bytes that no text has."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode(errors="backslashreplace").decode()
    return text


def without_secrets(text: str) -> str:
    """Return a text for people, without the passwords and tokens of the URLs in it."""
    return re.sub(_SECRETS, r"\1\2\3***", text) if "://" in text else text


def shown(value: Any) -> str:
    """Return a short text for a user's value, for an error message; never raises."""
    try:
        return f"{without_secrets(repr(value)):.100}"
    except Exception:  # a class may raise anything from its own repr, and so does a huge int
        return f"<{type(value).__name__}>"


def printable(value: object) -> str:
    """Return a value as one line; names from a checkpoint or a server must not steer the terminal."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join([c if c.isprintable() else c.encode("unicode_escape").decode() for c in text])


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return at most three of `names` that resemble `name`, the most similar first, for a remedy."""
    from difflib import get_close_matches  # imported only after a wrong name

    by_lower = {each.lower(): each for each in islice(names, _MOST_COMPARED)}
    return [by_lower[each] for each in get_close_matches(name.lower(), by_lower, 3)]


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """Return a question with the most similar of `names`, or None if none is similar."""
    near = nearest(name, names)
    return f"did you mean {near[0]!r}?" if near else None


def _subclasses(cls: type[ReknitError]) -> dict[str, type[ReknitError]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found.update(_subclasses(sub))
    return found


def from_wire(data: dict[str, Any]) -> ReknitError:
    """Rebuild an error that another rank sent; an unknown type becomes a plain `ReknitError`."""
    cls = _subclasses(ReknitError).get(str(data.get("type")), ReknitError)
    fields = {name: data.get(name) for name in ("remedy", "rank", "phase", "path")}
    return cls(str(data.get("message")), **fields)


def typed(error: BaseException) -> ReknitError:
    """Return the error itself, or a `ReknitError` with a foreign error as its cause."""
    if isinstance(error, ReknitError):
        return error
    made = known(error) or ReknitError(f"{type(error).__name__}: {error}")
    made.__cause__ = error
    return made


_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ETOOMANYREFS})
_NO_MEMORY = frozenset({errno.ENOMEM, errno.ENOBUFS})
_SAYS_FILES = "Too many open files"
_SAYS_THREADS = ("start new thread", "launch worker thread", "Resource temporarily unavailable")
_SAYS_END = ("interpreter shutdown", "after shutdown")
_NO_ROOM = (
    *("out of memory", "not enough memory", "allocate memory", "bad_alloc", "failed to map segment"),
    *("without exception set", "without setting an exception"),
)
_SAYS_DEVICE = "(CUDA|HIP|XPU|NPU) (driver )?error: "
DEVICE_REMEDY = "an earlier kernel may be the cause; start a process whose device has failed again"
_SAYING = (MemoryError, OSError, RuntimeError, ImportError, SystemError)


def shortage(error: BaseException) -> ShortageError | None:
    """Return a `ShortageError` for a foreign error that means a shortage, or None.

    Code that converts foreign errors calls this first: systems, interpreters and libraries have many errors
    for a shortage, and none of them is a fault of a checkpoint.
    """
    if isinstance(error, ShortageError):
        return error
    if not isinstance(error, _SAYING) or isinstance(error, ReknitError):
        return None
    code = error.errno if isinstance(error, OSError) else None
    words = str(error) or type(error).__name__
    if code in _NO_FILES or _SAYS_FILES in words:
        return ShortageError(
            f"no further file can be opened: {words}",
            remedy="let this process have more open files (`ulimit -n`), or close some",
        )
    if any(map(words.__contains__, _SAYS_THREADS)):
        return ShortageError(
            f"no further thread or process can be started: {words}",
            remedy="allow more (`ulimit -u`, the limit of the container), or more memory, which each takes",
        )
    if isinstance(error, RuntimeError) and says_end(error):
        return ShortageError(
            f"this process is about to end, and Python starts nothing more in it: {words}",
            remedy="make this call before the program ends, such as in a `finally` block: functions of "
            "`atexit` are too late for it",
        )
    # The first is torch's own, which it has for devices only, and the second one of the driver.
    if type(error).__name__ == "OutOfMemoryError" or (_of_device(error) and "out of memory" in words):
        return ShortageError(
            f"a device has too little memory: {words}",
            remedy="free memory of the device first; tensors that are contiguous, and of the dtype that is "
            "saved or wanted, take no more of it",
        )
    if isinstance(error, MemoryError) or code in _NO_MEMORY or any(map(words.lower().__contains__, _NO_ROOM)):
        return ShortageError(
            f"there is too little memory: {words}",
            remedy="let this process have more (`ulimit -v`, limits of its container, other programs), or "
            "let it take less: fewer `threads`, less `inflight_nbytes`, smaller parts of the state",
        )
    return None


def says_end(error: BaseException) -> bool:
    """Return whether Python refuses to start something because the interpreter is about to end."""
    return any(part in str(error) for part in _SAYS_END)


def known(error: BaseException) -> ReknitError | None:
    """Return a typed error for a foreign error that means a shortage, or a failed device, or None.

    After a kernel has failed, each later call to the driver of its device raises the error of that kernel.
    """
    if (short := shortage(error)) is not None:
        return short
    return ReknitError(f"a device has failed: {error}", remedy=DEVICE_REMEDY) if _of_device(error) else None


def _of_device(error: BaseException) -> bool:
    """Return whether the driver of a device has raised an error, which torch has a type for since 2.8."""
    if not isinstance(error, RuntimeError) or isinstance(error, ReknitError):
        return False
    return type(error).__name__ == "AcceleratorError" or re.match(_SAYS_DEVICE, str(error)) is not None


@contextmanager
def typed_known() -> Iterator[None]:
    """Raise a typed error for a foreign error that is `known`; other errors are not changed."""
    try:
        yield
    except _SAYING as error:
        if isinstance(error, ReknitError) or (made := known(error)) is None:
            raise
        raise made from error
