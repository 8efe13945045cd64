"""What did HDFS say no to?  The errors of its client and of its servers, as ours."""

from __future__ import annotations

import re

from reknit.errors import (
    StorageError,
    StorageFullError,
    StorageNotFoundError,
    StoragePermissionError,
    StorageUnavailableError,
)
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
    "see that the NameNode is out of safe mode, that enough DataNodes are up, and that they have room; "
    "another try helps where it passes"
)


class ExistingError(StorageError):
    """The name is taken."""


def as_ours(action: str, url: str, error: BaseException) -> StorageError:
    """Return the `StorageError` that says what an error of the client means."""
    text, told = str(error), plain(error)
    found = _RPC.match(text)
    kind, remedy = _kind(error, text, from_namenode=found is not None)
    if kind is StorageNotFoundError:
        return kind(f"there is no file {url}", remedy=remedy, path=url)
    if kind is ExistingError:
        return kind(f"cannot {action} {url}: it exists", remedy=remedy, path=url)
    return kind(f"cannot {action} {url}: {told}", remedy=remedy, path=url)


def of_class(action: str, url: str, name: str, message: str) -> StorageError:
    """Return the `StorageError` for an exception of a server, by its Java class."""
    return as_ours(action, url, RuntimeError(f'RPCError("{name}", "{message}'))


def unreached(action: str, url: str, why: object) -> StorageUnavailableError:
    """Return the error of who does not get an answer."""
    return StorageUnavailableError(
        f"cannot {action} {url}: {why}",
        remedy="check the address, the network and that the NameNode is up; it may be passing, so that "
        "another try helps, or more time with ?timeout_s= in the URL",
        path=url,
    )


def plain(error: BaseException) -> str:
    """Return what an error says, without the stack of a server."""
    text = str(error) or type(error).__name__
    if found := _RPC.match(text):
        told = found[2].removesuffix('")')
        text = f"{found[1].rpartition('.')[2]}: {told}"
    return " ".join(re.split(r"\\n|\n", text)[0].split())[:400]


def _kind(error: BaseException, text: str, *, from_namenode: bool) -> tuple[type[StorageError], str]:
    if isinstance(error, FileNotFoundError) or _MISSING.search(text):
        return StorageNotFoundError, "check the path"
    if isinstance(error, FileExistsError) or _EXISTS.search(text):
        return (
            ExistingError,
            "files are never written twice: use another name, or delete the old one first",
        )
    if _FULL.search(text):
        return StorageFullError, "make room: delete old checkpoints, or raise the quota"
    if isinstance(error, PermissionError) or _DENIED.search(text):
        return StoragePermissionError, (
            "check as whom the process asks (HADOOP_USER_NAME, or its Kerberos ticket: kinit, or ?principal= "
            "and ?keytab= in the URL), and what that user may do in this folder"
        )
    if _PASSING.search(text) or isinstance(error, OverdueError) or not from_namenode:
        # What is no answer of the NameNode comes from a connection: to it, or to a DataNode.
        return StorageUnavailableError, _BUSY
    return StorageError, "see what the NameNode says"
