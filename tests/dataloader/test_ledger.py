"""No sample is lost or repeated in any course of a job from its first sample to its last."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from reknit.frameworks.registry import collect
from tests.dataloader.corpora import Ledger, loader, token_set
from tests.frameworks.checkpoint import Checkpoint, assemble, load
from tests.running.examples import examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.dataloader import TokenLoader, TokenSet


class Layout(NamedTuple):
    """A job's layout: ranks that read different data, ranks that read the same, workers of each."""

    dp: int
    tp: int
    workers: int


class Phase(NamedTuple):
    """Part of a run: train, save after some batches, train on, and crash."""

    layout: Layout
    num_batches: int
    lost_batches: int
    save_every: int | None


layouts = st.builds(Layout, st.integers(1, 8), st.integers(1, 2), st.sampled_from([0, 2, 4]))
phases = st.builds(Phase, layouts, st.integers(0, 6), st.integers(0, 3), st.sampled_from([None, 1, 2, 3]))


@st.composite
def corpora(draw: st.DrawFn) -> list[TokenSet]:
    """Token sets with more or fewer samples than partitions, and partitions than readers."""
    return [
        token_set(
            name,
            draw(st.integers(0, 60)),
            draw(st.integers(1, 12)),
            draw(st.sampled_from([0.5, 1.0, 3.0])),
            longest=draw(st.sampled_from([5, 30, 70])),
        )
        for name in draw(st.sampled_from([["web"], ["web", "code"], ["web", "code", "books"]]))
    ]


def readers(sets: Sequence[TokenSet], layout: Layout, **more: Any) -> list[list[TokenLoader]]:
    """Return the loaders of a job: by data-parallel rank, and by replica."""
    return [
        [
            loader(sets, rank, layout.dp, replica, num_workers=layout.workers, **more)
            for replica in range(layout.tp)
        ]
        for rank in range(layout.dp)
    ]


def train(job: list[list[TokenLoader]], num_batches: int | None, ledger: Ledger) -> None:
    """Take batches on all ranks, all that are left if None; replicas must get the same."""
    for replicas in job:
        seen = [Ledger() for _ in replicas]
        for one, entries in zip(replicas, seen, strict=True):
            entries.enter(islice(one, num_batches))
        assert all(entries.consumed == seen[0].consumed for entries in seen)
        for source, entries_of in seen[0].consumed.items():
            ledger.consumed.setdefault(source, []).extend(entries_of)


def saved(job: list[list[TokenLoader]]) -> Checkpoint:
    ranks = [one for replicas in job for one in replicas]
    return assemble([collect({"loader": one}, n, len(ranks)) for n, one in enumerate(ranks)])


def resumed(job: list[list[TokenLoader]], checkpoint: Checkpoint) -> None:
    ranks = [one for replicas in job for one in replicas]
    for n, one in enumerate(ranks):
        load({"loader": one}, checkpoint, n, len(ranks))


def uninterrupted(sets: Sequence[TokenSet], epochs: int) -> Ledger:
    ledger = Ledger()
    train(readers(sets, Layout(1, 1, 0), epochs=epochs), None, ledger)
    return ledger


def run(sets: Sequence[TokenSet], story: Sequence[Phase], epochs: int, last: Layout) -> Ledger:
    """Go through all phases, then to the end of the data; return the samples that the weights have seen."""
    ledger, checkpoint = Ledger(), None
    for layout, num_batches, lost_batches, save_every in story:
        job = readers(sets, layout, epochs=epochs, save_every=save_every)
        if checkpoint is not None:
            resumed(job, checkpoint)
        train(job, num_batches, ledger)
        checkpoint = saved(job)
        train(job, lost_batches, ledger.copy())  # after the save, and gone with the crash
    job = readers(sets, last, epochs=epochs)
    if checkpoint is not None:
        resumed(job, checkpoint)
    train(job, None, ledger)
    return ledger


@settings(max_examples=examples(60))
@given(corpora(), st.lists(phases, min_size=1, max_size=6), st.integers(1, 2), layouts)
def test_every_sample_is_consumed_once_and_in_the_order_of_its_source(
    sets: list[TokenSet], story: list[Phase], epochs: int, last: Layout
) -> None:
    assert run(sets, story, epochs, last).consumed == uninterrupted(sets, epochs).consumed
