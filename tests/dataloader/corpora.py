"""Token sets for tests, and operations on them: every sample differs from every other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from reknit.dataloader import Batch, ReaderPlace, TokenLoader, TokenSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

BUDGET = 32


def rows(num_samples: int, longest: int, seed: int) -> list[NDArray[np.int64]]:
    """Return samples of random lengths, some empty, some longer than a batch."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 30_000, size=n) for n in rng.integers(0, longest + 1, size=num_samples)]


def failing(num_samples: int) -> Sequence[Any]:
    """Return samples of which the last cannot be read."""

    class Failing(list[Any]):
        def __getitem__(self, number: Any) -> Any:
            if number == num_samples - 1:
                raise OSError("this sample is damaged")
            return super().__getitem__(number)

    return Failing(rows(num_samples, 8, 0))


def token_set(
    name: str, num_samples: int, partitions: int, ratio: float = 1.0, longest: int = 40
) -> TokenSet:
    arguments = {"num_samples": num_samples, "longest": longest, "seed": len(name) + num_samples}
    return TokenSet(name=name, open=rows, arguments=arguments, ratio=ratio, num_partitions=partitions)


def loader(
    sets: Sequence[TokenSet], rank: int = 0, size: int = 1, replica: int = 0, **more: Any
) -> TokenLoader:
    options: dict[str, Any] = {"token_budget": BUDGET, "in_process": True, **more}
    return TokenLoader(sets, place=ReaderPlace(rank, size, replica), **options)


def equal(one: Sequence[Batch], other: Sequence[Batch]) -> bool:
    """Return whether batches are the same, bit for bit."""
    return len(one) == len(other) and all(
        np.array_equal(a, b) and a.dtype == b.dtype
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


class Ledger:
    """The consumed items, by source, in order: (epoch, position, part) and the tokens themselves."""

    def __init__(self) -> None:
        self.consumed: dict[int, list[tuple[int, int, int, bytes]]] = {}

    def enter(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            for n, (_, source, epoch, position, _, part) in enumerate(batch.samples.tolist()):
                piece = batch.tokens[batch.bounds[n] : batch.bounds[n + 1]].tobytes()
                self.consumed.setdefault(source, []).append((epoch, position, part, piece))

    def copy(self) -> Ledger:
        other = Ledger()
        other.consumed = {source: list(entries) for source, entries in self.consumed.items()}
        return other
