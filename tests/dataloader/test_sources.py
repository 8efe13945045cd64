"""Sources with a state of their own, of every kind, cut at every value, on more, as many and fewer ranks."""

from __future__ import annotations

from functools import partial
from itertools import islice, product
from typing import TYPE_CHECKING, Any

import pytest

from reknit.dataloader import ReaderPlace, SourceLoader
from reknit.errors import StateError, UsageError
from reknit.frameworks.registry import collect
from reknit.frameworks.stateful import Kept
from tests.dataloader.source_kinds import KINDS, SIZES, VALUES, Counted, installed, numbers
from tests.frameworks.checkpoint import assemble, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.frameworks.checkpoint import Checkpoint


def of_sources(open_source: Any, place: ReaderPlace) -> Any:
    return SourceLoader(open_source, len(SIZES), place=place, sizes=SIZES)


def of_torchdata(open_source: Any, place: ReaderPlace) -> Any:
    torchdata = installed("torchdata.stateful_dataloader")
    from reknit.dataloader.torchdata import ShardedDataLoader, SourceDataset

    dataset = SourceDataset(open_source, len(SIZES), place=place, sizes=SIZES)
    return ShardedDataLoader(torchdata.StatefulDataLoader(dataset, batch_size=None, collate_fn=_itself))


def _itself(value: Any) -> Any:
    return value


LOADERS = of_sources, of_torchdata


def plain(value: Any) -> int:
    return int(value["n"] if isinstance(value, dict) else value)


class Job:
    """Some ranks that read, and the values that they gave."""

    def __init__(
        self, make: Callable[[ReaderPlace], Any], size: int, checkpoint: Checkpoint | None = None
    ) -> None:
        self.ranks = [make(ReaderPlace(rank, size)) for rank in range(size)]
        if checkpoint is not None:
            for rank, one in enumerate(self.ranks):
                load({"data": one}, checkpoint, rank, size)

    def read(self, steps: int = 100) -> list[int]:
        """Take `steps` values on each rank, or all that remain, without a `for`."""
        return [plain(value) for one in self.ranks for value in _taken(one, steps)]

    def saved(self) -> Checkpoint:
        return assemble(
            [collect({"data": one}, rank, len(self.ranks)) for rank, one in enumerate(self.ranks)]
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_every_cut_of_every_kind_of_source_gives_each_value_once_on_any_ranks(kind: str) -> None:
    for of_kind, cut, size in product(LOADERS, range(len(VALUES) + 2), (1, 2, 3)):
        make = partial(of_kind, KINDS[kind])
        job = Job(make, 2)
        before = job.read(cut)
        checkpoint = job.saved()
        assert sorted(before + job.read()) == VALUES, "a save changes nothing for the job that goes on"
        unread = Job(make, 3, checkpoint)
        some = Job(make, size, unread.saved())
        seen = before + some.read(1)
        rest = Job(make, 2, some.saved())
        seen += rest.read()
        for source in range(len(SIZES)):
            assert of(source, seen) == numbers(source), (cut, size)
        assert sorted(plain(value) for one in rest.ranks for value in one) == VALUES, "the next pass"


@pytest.mark.filterwarnings("ignore")
def test_ranks_in_different_passes_are_resharded_without_loss_or_repetition() -> None:
    for of_kind, cut, size in product(LOADERS, range(12), (1, 2, 3)):
        make = partial(of_kind, Counted)
        job = Job(make, 2)
        seen = [value for one in job.ranks for value in islice(_cycle(one), cut)]
        job = Job(make, size, job.saved())
        for _ in range(3):
            seen += [plain(value) for one in job.ranks for value in one]
        for source, length in enumerate(SIZES):
            values = of(source, seen)
            assert values == numbers(source) * (len(values) // max(length, 1)), (cut, size)
            assert len(values) >= 3 * length


@pytest.mark.filterwarnings("ignore")
def test_a_node_that_was_read_before_begins_anew() -> None:
    nodes = installed("torchdata.nodes")
    made = {n: nodes.IterableWrapper(numbers(n)) for n in range(len(SIZES))}
    one = SourceLoader(made.__getitem__, len(SIZES))
    assert [sorted(one), sorted(one)] == [VALUES, VALUES]


@pytest.mark.filterwarnings("ignore")
def test_a_node_loader_in_the_state_does_at_its_end_what_torchdata_does() -> None:
    nodes = installed("torchdata.nodes")
    for restart in (True, False):
        job = [
            nodes.Loader(nodes.IterableWrapper(numbers(0)), restart_on_stop_iteration=restart)
            for _ in range(3)
        ]
        assert list(islice(job[0], SIZES[0])) == numbers(0)
        kept = Kept()
        load({"data": kept}, assemble([collect({"data": job[0]}, 0, 1)]))
        job[1].load_state_dict(kept.values)
        job[2].load_state_dict(job[0].state_dict())
        assert list(job[1]) == list(job[2]) == (numbers(0) if restart else [])


def test_an_error_of_the_value_after_a_save_comes_when_that_value_is_taken() -> None:
    class Failing(Counted):
        def __iter__(self) -> Iterator[int]:
            yield from islice(super().__iter__(), 2)
            raise OSError("this sample is damaged")

    one = SourceLoader(Failing, 1)
    seen = [next(one), next(one)]
    checkpoint = assemble([collect({"data": one}, 0, 1)])
    with pytest.raises(OSError, match="damaged"):
        next(one)
    whole = SourceLoader(Counted, 1)
    load({"data": whole}, checkpoint, 0, 1)
    assert seen + list(whole) == numbers(0)


class Resettable:
    """A source whose state cannot be given back: its `reset` takes none."""

    def __iter__(self) -> Iterator[int]:
        return iter(numbers(0))

    def state_dict(self) -> dict[str, int]:
        return {}

    def reset(self) -> None:
        """Begin anew."""


def test_sources_without_a_resumable_state_are_refused() -> None:
    for source in (numbers(0), Resettable()):
        made: Callable[[int], Any] = partial(lambda source, n: source, source)
        one = SourceLoader(made, 1)
        next(one)
        with pytest.raises(UsageError, match="has no resumable state"):
            one.sharded_state()


def of(source: int, seen: Sequence[int]) -> list[int]:
    return [value for value in seen if value // 100 == source]


def _taken(loader: Any, steps: int) -> Iterator[Any]:
    """Take values without a `for`, which would begin the next pass at the end."""
    while steps and (value := next(loader, None)) is not None:
        yield value
        steps -= 1


def _cycle(loader: Any) -> Iterator[int]:
    """Yield the values of one pass after the other."""
    while True:
        before = len(VALUES)
        for value in loader:
            yield plain(value)
            before = 0
        if before:
            return


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_a_source_that_does_not_take_its_state_is_named_with_what_helps() -> None:
    torchdata = installed("torchdata.stateful_dataloader")

    def opened(num_workers: int) -> SourceLoader:
        def source(n: int) -> Any:
            return torchdata.StatefulDataLoader(numbers(n), batch_size=None, num_workers=num_workers)

        return SourceLoader(source, 1)

    one, other = opened(0), opened(2)
    next(one)
    load({"data": other}, assemble([collect({"data": one}, 0, 1)]))
    with pytest.raises(StateError, match=r"source 0, a StatefulDataLoader, .*: AssertionError") as caught:
        next(other)
    assert "same num_workers" in (caught.value.remedy or "")
