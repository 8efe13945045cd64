"""When a run saves, and which steps it keeps: values for `Checkpointer`, combined by ``|``, ``&``, ``~``.

Save policies: `every`, `at`, `first`, `last`, `continuous`, `auto`, `on_preemption`.
Keep policies: `latest`, `best`, `every`, `at`, `younger`; `without` keeps steps without some items.
A plain function does too: of a `Moment` for saving, of a list of steps for keeping (it returns step numbers).
"""

from reknit.policies.intervals import at, every, last
from reknit.policies.keep_policies import best, latest, without, younger
from reknit.policies.policy import Facts, Moment, Policy
from reknit.policies.save_policies import auto, continuous, first, on_preemption

__all__ = [
    "Facts",
    "Moment",
    "Policy",
    "at",
    "auto",
    "best",
    "continuous",
    "every",
    "first",
    "last",
    "latest",
    "on_preemption",
    "without",
    "younger",
]
