"""Tables of cases that one test goes through: a test item for each of them would take longer."""

from __future__ import annotations

import inspect
import traceback
from functools import wraps
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Test = Callable[..., None]


def table(names: str | tuple[str, ...], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test with each row of a table, and report all rows that failed together.

    The arguments are those of `pytest.mark.parametrize`.  Each row has a `tmp_path` of its own.
    """
    keys = (names,) if isinstance(names, str) else names
    listed = [(row,) for row in rows] if isinstance(names, str) else list(rows)

    def of(test: Test) -> Test:
        @wraps(test)
        def each(**given: Any) -> None:
            failed = []
            for number, row in enumerate(listed):
                values = {**given, **dict(zip(keys, row, strict=True))}
                if "tmp_path" in given:
                    values["tmp_path"] = given["tmp_path"] / f"row-{number}"
                    values["tmp_path"].mkdir()
                try:
                    test(**values)
                except (Exception, pytest.fail.Exception):  # the test fails with it, after the last row
                    failed.append(f"row {number}, {brief(row)}:\n{traceback.format_exc()}")
            assert not failed, "\n".join(failed)

        signature = inspect.signature(test)
        kept = [one for name, one in signature.parameters.items() if name not in keys]
        each.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return each

    return of
