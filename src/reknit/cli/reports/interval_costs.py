"""The cost of intervals between saves, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.policies.policy import DAY_S, HOUR_S

if TYPE_CHECKING:
    from reknit.policies.cost_model import RunCosts

HEADS = ("SAVE EVERY", "KEPT (ETTR)", "STALLS", "DONE AGAIN", "RESTARTS", "LOST A DAY")
_AROUND = (0.1, 0.3, 1.0, 3.0, 10.0)


def rows_around(costs: RunCosts, interval_s: float | None = None) -> list[dict[str, float]]:
    """Return the costs of intervals around the best one, and of `interval_s`, as shares of the time."""
    best_s = costs.best_interval_s()
    intervals = {max(best_s * factor, costs.write_s) for factor in _AROUND}
    if interval_s is not None:
        intervals.add(interval_s)
    return [{"interval_s": each} | costs.shares(each) for each in sorted(intervals)]


def cells(row: dict[str, float]) -> tuple[str, ...]:
    """Return a row as it is printed, below `HEADS`."""
    lost_s = (1.0 - row["kept"]) * DAY_S
    shares = (f"{row[name]:.2%}" for name in ("kept", "stalls", "again", "restarts"))
    return duration(row["interval_s"]), *shares, duration(lost_s)


def duration(seconds: float) -> str:
    """Return a time in the unit that fits, such as ``3.1 h``."""
    for unit, name in ((DAY_S, "d"), (HOUR_S, "h"), (60.0, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"
