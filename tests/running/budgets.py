"""What may the tests of each folder cost?

Seconds are an aim, on two cores; processes and servers are limits.  Raise them with the test that needs more.
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """What the tests of one folder may take."""

    seconds: int = 0
    processes: int = 0
    servers: tuple[str, ...] = ()


BUDGETS: dict[str, Budget] = {}
