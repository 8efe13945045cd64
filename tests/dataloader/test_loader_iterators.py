"""A load reaches the next iterator of a loader of torchdata, and is refused while one is in use."""

from __future__ import annotations

import multiprocessing
from itertools import islice, product
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

from torchdata.nodes import IterableWrapper
from torchdata.nodes import Loader as NodesLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import reknit
from reknit.dataloader.positions import has_iterator
from reknit.errors import MismatchError
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore")  # torchdata calls deprecated functions of torch
multiprocessing.set_forkserver_preload(["torchdata.stateful_dataloader"])

NUMBERS = list(range(12))
LOADERS: dict[str, Callable[[], Any]] = {
    "nodes": lambda: NodesLoader(IterableWrapper(NUMBERS)),
    "a loader": lambda: StatefulDataLoader(NUMBERS, batch_size=None),
    "workers": lambda: StatefulDataLoader(
        NUMBERS, batch_size=None, num_workers=1, multiprocessing_context="forkserver"
    ),
}


class Case(NamedTuple):
    """A checkpoint after four numbers, how a loader is made, and how it stands in a state."""

    path: Path
    make: Callable[[], Any]
    held: Callable[[Any], Any]

    def load_into(self, loader: Any) -> None:
        reknit.load(self.path, {"loader": self.held(loader)})

    def require_going_on(self, loader: Any) -> None:
        """Check that a loader goes on after four numbers, and so does one loaded from its next save."""
        reknit.save(self.path.parent / "next", {"loader": self.held(loader)})
        again = self.make()
        reknit.load(self.path.parent / "next", {"loader": self.held(again)})
        assert [[int(each) for each in islice(one, 2)] for one in (loader, again)] == [NUMBERS[4:6]] * 2


def case_of(kind: str, own: bool, folder: Path) -> Case:
    make, held = LOADERS[kind], reknit.PerRank if own else lambda loader: loader
    loader = make()
    assert [int(each) for each in islice(loader, 4)] == NUMBERS[:4]
    reknit.save(folder / "saved", {"loader": held(loader)})
    return Case(folder / "saved", make, held)


each_loader = table(("kind", "own"), product(("nodes", "a loader"), (False, True)))


@each_loader
def test_a_loader_whose_state_was_read_before_goes_on_from_the_load(
    kind: str, own: bool, tmp_path: Path
) -> None:
    case = case_of(kind, own, tmp_path)
    loader = case.make()
    loader.state_dict()
    case.load_into(loader)
    case.require_going_on(loader)


@each_loader
def test_a_loader_that_had_begun_goes_on_from_the_load(kind: str, own: bool, tmp_path: Path) -> None:
    case = case_of(kind, own, tmp_path)
    loader = case.make()
    assert len(list(islice(loader, 7))) == 7
    case.load_into(loader)
    case.require_going_on(loader)


@each_loader
def test_a_load_that_an_iterator_in_use_would_not_notice_is_refused(
    kind: str, own: bool, tmp_path: Path
) -> None:
    case = case_of(kind, own, tmp_path)
    loader = case.make()
    iterator = iter(loader)
    assert int(next(iterator)) == 0
    with pytest.raises(MismatchError, match="an iterator of it is in use") as caught:
        case.load_into(loader)
    assert "del" in str(caught.value.remedy)
    assert int(next(iterator)) == 1
    del iterator, caught
    case.load_into(loader)
    case.require_going_on(loader)
    for number in (again := case.make()):
        assert int(number) == 0
        with pytest.raises(MismatchError, match="begin the loop"):
            case.load_into(again)
        break


def test_a_loader_with_workers_does_not_hold_its_iterator_itself() -> None:
    loader = LOADERS["workers"]()
    iterator = iter(loader)
    assert int(next(iterator)) == 0
    assert has_iterator(loader)
    del iterator
    assert not has_iterator(loader)
    assert len(list(loader._iterator)) == 11  # at their end, workers need no time to stop


def test_an_iterator_that_is_at_its_end_does_not_count(tmp_path: Path) -> None:
    loader = LOADERS["a loader"]()
    reknit.save(tmp_path / "saved", {"loader": loader})
    iterator = iter(loader)
    assert len(list(iterator)) == 12
    reknit.load(tmp_path / "saved", {"loader": loader})
    assert [int(each) for each in loader] == NUMBERS
