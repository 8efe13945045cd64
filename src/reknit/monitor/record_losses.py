"""Which records of a batch can a sink not take?  These alone are lost, not the whole batch."""

from __future__ import annotations

from contextlib import suppress
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import structs

from reknit.types.decoding import converted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reknit.monitor.records import Record

_Entry = TypeVar("_Entry")


class LostRecords(ValueError):
    """A sink has taken a batch but for `number` records."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(reason)
        self.number = number


def reason_of(error: BaseException) -> str:
    """Return the type and the text of an error; the error of a user's sink may raise from its own text."""
    name = type(error).__name__
    with suppress(BaseException):
        return str(error) if isinstance(error, LostRecords) else f"{name}: {error}"
    return name


def take_each(entries: Sequence[_Entry], take: Callable[[_Entry], object]) -> None:
    """Call `take` with each entry.  Raises `LostRecords` in the end if some calls have failed."""
    failed, first = 0, ""
    for entry in entries:
        try:
            take(entry)
        except Exception as error:
            failed, first = failed + 1, first or reason_of(error)
    if failed:
        raise LostRecords(failed, first)


def take_writable(records: Sequence[Record], write: Callable[[Sequence[Record]], object]) -> None:
    """Write all records, or at least those whose values can be written.

    `write` takes all or none.  Raises `LostRecords` if some were left out, and the errors of `write`.
    """
    try:
        write(records)
    except (TypeError, ValueError, OverflowError) as error:
        mended = [_mended(record) for record in records]
        writable = [record for record in mended if record is not None]
        if writable:
            write(writable)
        if lost := len(records) - len(writable):
            raise LostRecords(lost, reason_of(error)) from error


def _mended(record: Record) -> Record | None:
    """Return the record with plain numbers and text that can be encoded, or None if a value has no meaning.

    Users' phases may add numbers of numpy, and the names of files may not be text.
    """
    with suppress(msgspec.ValidationError, TypeError, ValueError, OverflowError):
        return converted(_plain(structs.asdict(record)), type(record))
    return None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value
