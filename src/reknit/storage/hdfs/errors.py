"""Translate errors of the HDFS client and its servers to reknit's."""

from __future__ import annotations

import re

from reknit.errors import (
    ReknitError,
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
    shortage,
)
from reknit.storage.errors import ExistingError, existing, missing
from reknit.storage.hdfs.threads import OverdueError

_RPC = re.compile(r'RPCError\("([\w.$]+)", "(.*)', re.DOTALL)
_MISSING = re.compile(r"FileNotFoundException|LeaseExpiredException.*(?:does not exist|No lease)", re.DOTALL)
_EXISTS = re.compile(r"FileAlreadyExistsException|AlreadyBeingCreatedException")
_FULL = re.compile(r"QuotaExceeded|DiskOutOfSpace|No space left")
_DENIED = re.compile(
    r"AccessControlException|AuthorizationException|SecurityException|Permission denied|InvalidToken"
    r"|GSSAPI|SASL"
)
_PASSING = re.compile(
    r"SafeModeException|StandbyException|RetriableException|ServerTooBusy|NotReplicatedYet"
    r"|could only be (?:replicated|written)|RecoveryInProgress|LeaseExpired|ObserverRetry"
)
_BUSY = (
    "check that the NameNode is not in safe mode, and that enough DataNodes are up and have space; if the "
    "problem is temporary, try again"
)


def as_ours(action: str, url: str, error: BaseException) -> ReknitError:
    """Return the `StorageError` or `ShortageError` for an error of the client."""
    text, plain_text = str(error), plain(error)
    found = _RPC.match(text)
    if found is None and (short := shortage(error) or shortage(RuntimeError(plain_text))):
        short.sign(path=url)
        return short
    kind, remedy = _kind(error, text, from_namenode=found is not None)
    if kind is StorageNotFoundError:
        return missing(url)
    if kind is ExistingError:
        return existing(url, action)
    return kind(f"cannot {action} {url}: {plain_text}", remedy=remedy, path=url)


def of_class(action: str, url: str, name: str, message: str) -> ReknitError:
    """Return the `StorageError` for an exception of a server, by its Java class."""
    return as_ours(action, url, RuntimeError(f'RPCError("{name}", "{message}'))


def unreached(action: str, url: str, why: object) -> ReknitError:
    """Return the error of a request without an answer, or a `ShortageError` where that is the reason."""
    if isinstance(why, BaseException) and (short := shortage(why)):
        short.sign(path=url)
        return short
    return StorageUnavailableError(
        f"cannot {action} {url}: {why}",
        remedy="check the address, the network and that the NameNode is up; if the problem is temporary, try "
        "again, or allow more time with ?timeout_s= in the URL",
        path=url,
    )


def plain(error: BaseException) -> str:
    """Return the text of an error, without the stack of a server."""
    text = str(error) or type(error).__name__
    if found := _RPC.match(text):
        plain_text = found[2].removesuffix('")')
        text = f"{found[1].rpartition('.')[2]}: {plain_text}"
    return " ".join(re.split(r"\\n|\n", text)[0].split())[:400]


def _kind(error: BaseException, text: str, *, from_namenode: bool) -> tuple[type[StorageError], str]:
    if isinstance(error, FileNotFoundError) or _MISSING.search(text):
        return StorageNotFoundError, ""
    if isinstance(error, FileExistsError) or _EXISTS.search(text):
        return ExistingError, ""
    if _FULL.search(text):
        return StorageFullError, "free space: delete old checkpoints, or raise the quota"
    if isinstance(error, PermissionError) or _DENIED.search(text):
        return StoragePermissionError, (
            "check which user the process acts as (HADOOP_USER_NAME, or its Kerberos ticket: kinit, or "
            "?principal= and ?keytab= in the URL), and that user's permissions on this folder"
        )
    if _PASSING.search(text) or isinstance(error, OverdueError) or not from_namenode:
        # Any error but an answer of the NameNode comes from a connection: to it, or to a DataNode.
        return StorageUnavailableError, _BUSY
    return StorageError, "see the NameNode's message"
