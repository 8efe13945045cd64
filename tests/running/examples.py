"""How many of the cases that there are does this run have time for?"""

from hypothesis import settings

USUAL = 100
_STEPS = (0, 1, 4, 6)


def examples(number: int) -> int:
    """Return how many examples this run has time for, of as many as `number` would be good to have.

    The profile says it (``--hypothesis-profile=quick``, ``ci`` or ``nightly``).
    """
    return max(1, number * settings().max_examples // USUAL)


def partners(one: str, every: list[str]) -> list[str]:
    """Return what to try one with: itself and three others, so that each is tried with three; at night all.

    What a pair does is what its halves do; that any two halves fit is tried elsewhere, with random layouts.
    """
    if settings().max_examples > USUAL:
        return every
    at = every.index(one)
    return sorted({every[(at + step) % len(every)] for step in _STEPS}, key=every.index)
