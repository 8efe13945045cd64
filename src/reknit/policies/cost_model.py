"""How often is it best to save?  The costs of saves and failures, by the time between two saves."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, sqrt

_NEWTON_STEPS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class RunCosts:
    """The costs of saves and failures in a run, in seconds.

    A save blocks training for `stall_s`, and is committed `write_s` after it began.  Failures come at random
    moments, on average every `mttf_s`, and training continues `restart_s` after a failure.
    """

    stall_s: float
    write_s: float
    restart_s: float
    mttf_s: float

    def ettr(self, interval_s: float) -> float:
        """Return the effective training time ratio with `interval_s` of training between two saves.

        That is the share of the time that is spent on training which is never lost.  Until a failure comes,
        the k-th save is committed after ``k * (interval + stall) - stall + write``; failures are
        exponentially distributed.
        """
        rate = 1.0 / self.mttf_s
        # Beyond this, the probability that even one save is committed is 0 as a float.
        period = min(rate * (interval_s + self.stall_s), 700.0)
        kept_s = interval_s * exp(-rate * max(self.write_s - self.stall_s, 0.0)) / expm1(period)
        return kept_s / (self.mttf_s + self.restart_s)

    def best_interval_s(self) -> float:
        """Return the time between saves with the highest `ettr`, but no less than a save takes.

        Daly (2006), where Young (1974) has ``sqrt(2 * stall * mttf)``; found by Newton's method.
        """
        interval = sqrt(2.0 * self.stall_s * self.mttf_s)
        for _ in range(_NEWTON_STEPS):
            lost = -expm1(-(interval + self.stall_s) / self.mttf_s)
            if lost == 0.0:
                break
            interval -= (interval - self.mttf_s * lost) / lost
        return max(interval, self.write_s)

    def shares(self, interval_s: float) -> dict[str, float]:
        """Return the shares of the time for training that is kept, stalls, repeated work and restarts."""
        kept = self.ettr(interval_s)
        restart = self.restart_s / (self.mttf_s + self.restart_s)
        stalls = (1.0 - restart) * self.stall_s / (interval_s + self.stall_s)
        again = max(1.0 - restart - stalls - kept, 0.0)  # below by rounding only
        return {"kept": kept, "stalls": stalls, "again": again, "restarts": restart}
