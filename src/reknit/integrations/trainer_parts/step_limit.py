"""Which steps does a trainer with a limit keep?  The newest, and the best in the place of one of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from reknit.policies.policy import KeepPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from reknit.types.saved_step import SavedStep


@dataclass(frozen=True, slots=True)
class StepLimit(KeepPolicy):
    """Keep `count` steps: the newest, and the best by `metric`; with a `count` of 1 these may be two.

    Of equal steps the first is the best, as in trainers that replace the best step only by a better one.
    """

    count: int
    metric: str | None = None
    greater_is_better: bool = False

    reads_metrics = True

    @classmethod
    def of(cls, args: Any) -> StepLimit | None:
        """Return the policy that the arguments of a Trainer of transformers describe, or None."""
        limit, metric = args.save_total_limit, args.metric_for_best_model
        if limit is None or limit <= 0:
            return None
        name = None if metric is None else f"eval_{metric.removeprefix('eval_')}"
        return cls(limit, name, greater_is_better=bool(args.greater_is_better))

    def kept(self, steps: Sequence[SavedStep], now: float) -> AbstractSet[int]:
        """Return the numbers of the steps to keep."""
        numbers = sorted({number for each in steps if (number := each.step) is not None})
        newest = numbers[-self.count :]
        best = self._best(steps)
        if best is None or best in newest:
            return set(newest)
        return {best, *numbers[-max(1, self.count - 1) :]}

    def _best(self, steps: Sequence[SavedStep]) -> int | None:
        sign = -1.0 if self.greater_is_better else 1.0
        scores = {
            each.step: sign * score
            for each in steps
            if each.step is not None and (score := (each.metrics or {}).get(self.metric or "")) is not None
        }
        return min(scores, key=lambda number: (scores.get(number, inf), number), default=None)
