"""Policies for `Checkpointer`: when a run saves, which steps it keeps; combined by ``|``, ``&``, ``~``.

Save policies: `every`, `at`, `first`, `last`, `continuous`, `auto`, `on_preemption`. Keep policies: `latest`,
`best`, `every`, `at`, `younger`; `without` keeps steps without some items. A plain function is a policy too:
of a `Moment` for saving, of a list of steps for keeping (it returns numbers).
"""

from reknit.policies.keep_policies import best, latest, without, younger
from reknit.policies.policy import Facts, Moment, Policy
from reknit.policies.save_policies import at, auto, continuous, every, first, last, on_preemption

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
