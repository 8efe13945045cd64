"""A store carries out a request after its process has given up or died: no checkpoint loses a file.

Each action is repeated with another request without an answer.  Then somebody does something else at the same
place, and before or after that the store carries the request out.
"""

from __future__ import annotations

import itertools
import logging
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.comm.group import SoloGroup
from reknit.engine.memory.write import Written
from reknit.engine.stored import commit, marker, removals
from reknit.engine.stored import commit as late_commits
from reknit.engine.stored import delete as stored_delete
from reknit.engine.stored import leftovers as pending
from reknit.engine.stored.at_path import committed
from reknit.engine.stored.file_checks import whole_manifest
from reknit.engine.stored.leftovers import leftovers, remove
from reknit.engine.stored.marker import Marker, begun_in
from reknit.engine.stored.promote import Promotion, promote
from reknit.engine.stored.recognising import has_tombstone
from reknit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CommitError,
    ReknitError,
    UndecidedError,
    UsageError,
)
from reknit.events.phase import Recorder
from reknit.format.manifest_file import encode_tombstone
from reknit.format.paths import index_path
from reknit.options import CommOptions, SaveOptions
from reknit.storage.base import LONGEST_REQUEST_S
from reknit.storage.registry import open_storage, register
from reknit.storage.wrappers.forwarding import innermost
from reknit.storage.wrappers.retrying import RetryingStorage, RetryPolicy
from tests.running.examples import is_night
from tests.simulation.late_stores import BlindBucket, Killed, LateBucket, LateFolder, RepeatedBucket
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.storage.base import Storage
    from reknit.types.manifest import Manifest

KINDS: dict[str, type[LateFolder]] = {
    "bucket": LateBucket,
    "folder": LateFolder,
    "blind": BlindBucket,
    "repeating": RepeatedBucket,
}
ROOT = "{}-late://all/run"
HOT, COLD = f"{ROOT}/step_00000001", "{}-late://all/cold/step_00000001"
OLD, NEW, LATER = 1.0, 2.0, 3.0
FOR_EVER = 1000
AT_ONCE = RetryPolicy(first_s=1e-6, longest_s=1e-6)
ONE_RUN = SaveOptions(comm=CommOptions(generation=1))
DECIDING = re.compile("commit manifest|delete (?:.*/)?(?:manifest|index|m/)")


def _opened(kind: type[LateFolder], url: str) -> Storage:
    name, _, below = url.partition("://")[2].strip("/").partition("/")
    store = RetryingStorage(kind(name), AT_ONCE) if kind is RepeatedBucket else kind(name)
    return store.sub(below) if below else store


for scheme, each in KINDS.items():
    register(f"{scheme}-late", lambda url, _, kind=each: _opened(kind, url))  # type: ignore[misc]


@pytest.fixture(autouse=True)
def _no_save_begins_in_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "RETURNS_WITHIN_S", 0.0)


def state(value: float) -> dict[str, Any]:
    return {"m": {"w": np.full(4, value)}, "o": {"w": np.full(3, value)}}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no save wait for a removal, whose process stands still here."""
    monkeypatch.setattr(removals, "_PATIENCE_S", 0.0)


class Place:
    """A store of a kind, with a checkpoint at one of two paths, or at both."""

    def __init__(self, kind: str) -> None:
        self.hot, self.cold, self.root = HOT.format(kind), COLD.format(kind), ROOT.format(kind)
        KINDS[kind].clear("all")
        KINDS[kind].requests.clear()
        self.store = open_storage(self.root.partition("/run")[0])
        self.calls = KINDS[kind]("all").calls

    def save(self, value: float, *, cold: bool = False, overwrite: bool = False) -> None:
        path = self.cold if cold else self.hot
        reknit.save(path, state(value), step=1, overwrite=overwrite, options=ONE_RUN)

    def promote(self, *, back: bool = False) -> None:
        here, there = (self.cold, self.hot) if back else (self.hot, self.cold)
        reknit.promote(here, there, overwrite=True)

    def leave_a_copy(self) -> None:
        """Copy the files, and die before the commit."""
        self.calls.expect("commit manifest", 1, dies=True)
        assert attempt(Place.promote, self)
        self.calls.end()
        self.calls.waiting.clear()

    def sweep(self) -> None:
        bucket = innermost(self.store)
        assert isinstance(bucket, LateFolder)
        for left in leftovers(self.store, bucket.dated(), float("inf")):
            if left.kept is None:
                remove(self.store, bucket, left, open_storage)

    def value(self, path: str) -> float | None:
        """Return the value in a checkpoint, None without one; a checkpoint that is not whole is an error."""
        target = {"m": state(0.0)["m"]}
        try:
            reknit.load(path, target)
        except CheckpointNotFoundError:
            return None
        assert reknit.verify(path, "data").ok
        (value,) = set(target["m"]["w"].tolist())
        return float(value)


def in_turn(*steps: Callable[[Place], object]) -> Callable[[Place], object]:
    """Return a function that does all steps."""

    def work(place: Place) -> None:
        for step in steps:
            step(place)

    return work


BEFORE: dict[str, Callable[[Place], object]] = {
    "save": lambda place: None,
    "save over": lambda place: place.save(OLD),
    "promote": lambda place: place.save(NEW),
    "promote over": in_turn(lambda place: place.save(OLD, cold=True), lambda place: place.save(NEW)),
    "drop": in_turn(lambda place: place.save(OLD), lambda place: place.promote()),
    "cool": lambda place: place.save(OLD),
    "delete": lambda place: place.save(OLD),
    "sweep a copy": in_turn(lambda place: place.save(OLD), lambda place: place.leave_a_copy()),
    "replace a copy": in_turn(lambda place: place.save(OLD), lambda place: place.promote()),
}
ACTIONS: dict[str, Callable[[Place], object]] = {
    "save": lambda place: place.save(NEW),
    "save over": lambda place: place.save(NEW, overwrite=True),
    "promote": lambda place: place.promote(),
    "promote over": lambda place: place.promote(),
    "drop": lambda place: reknit.delete(place.hot, items=["o"]),
    "cool": lambda place: reknit.cool(place.hot, place.cold),
    "delete": lambda place: reknit.delete(place.hot),
    "sweep a copy": lambda place: place.sweep(),
    "replace a copy": lambda place: place.save(NEW, cold=True, overwrite=True),
}
AFTERWARDS: dict[str, Callable[[Place], object]] = {
    "nothing": lambda place: None,
    "save": lambda place: place.save(LATER),
    "save over": lambda place: place.save(LATER, overwrite=True),
    "sweep": lambda place: place.sweep(),
    "fence": lambda place: reknit.latest(place.root, pending="fence"),
    "delete": lambda place: reknit.delete(place.hot),
    "promote": lambda place: place.promote(),
    "promote back": lambda place: place.promote(back=True),
    "sweep, promote": in_turn(lambda place: place.sweep(), lambda place: place.promote()),
    "save copy, promote": in_turn(
        lambda place: place.save(LATER, cold=True, overwrite=True), lambda place: place.promote()
    ),
    "sweep, save": in_turn(lambda place: place.sweep(), lambda place: place.save(LATER)),
    "save, delete": in_turn(lambda place: place.save(LATER), lambda place: reknit.delete(place.hot)),
    "sweep, save, delete": in_turn(
        lambda place: place.sweep(), lambda place: place.save(LATER), lambda place: reknit.delete(place.hot)
    ),
}
AGAIN = ["save", "promote", "promote back", "save copy, promote"]
"""Ways to put files of the same names there."""
ONLY_FILES = "cool", "save copy, promote"
"""The copy that is replaced has the only files by then."""


_PREPARED: dict[tuple[str, str], tuple[dict[str, memoryview], dict[str, float | None]]] = {}


def prepared(kind: str, action: str) -> tuple[Place, dict[str, float | None]]:
    """Return a place where an action can begin, and the values of its checkpoints."""
    place, tree = Place(kind), ProcessMemory.trees["all"]
    if (kind, action) not in _PREPARED:
        BEFORE[action](place)
        before = {path: place.value(path) for path in (place.hot, place.cold)}
        _PREPARED[kind, action] = dict(tree.files), before
    files, before = _PREPARED[kind, action]
    tree.files.update(files)
    return place, before


def attempt(work: Callable[[Place], object], place: Place) -> BaseException | None:
    try:
        work(place)
    except (ReknitError, Killed) as error:
        return error
    return None


def requests_of(kind: str, action: str) -> list[int]:
    """Return the numbers of the requests of an action: all at night, else the deciding ones."""
    place, _ = prepared(kind, action)
    place.calls.end()
    ACTIONS[action](place)
    return [number for number, label in enumerate(place.calls.sent, 1) if is_night() or DECIDING.match(label)]


def situations(kind: str, action: str) -> Iterator[tuple[int, int, str, bool]]:
    """Yield a request, the length of the silence (0: the process dies), the next action, and the order."""
    ways = list(itertools.product((0, 1, 2, FOR_EVER), (False, True)))
    for number, (turn, then) in itertools.product(requests_of(kind, action), enumerate(AFTERWARDS)):
        if (action, then) == ONLY_FILES:
            continue
        if is_night():
            some = ways
        elif "copy" in action:
            some = [(1, False)] if "promote" in then else []
        else:
            some = [ways[(number + turn) % len(ways)]]
        for silence, at_once in some:
            yield number, silence, then, at_once


def happens(kind: str, action: str, number: int, silence: int, then: str, at_once: bool) -> None:
    """Let it happen, and judge it."""
    place, before = prepared(kind, action)
    place.calls.expect(number, silence or 1, dies=silence == 0)
    error = attempt(ACTIONS[action], place)
    place.calls.end()
    if at_once:
        place.calls.release()
        place.value(place.hot)
    other = attempt(AFTERWARDS[then], place)
    between = place.value(place.hot)
    place.calls.release()
    after = {path: place.value(path) for path in (place.hot, place.cold)}
    if before[place.hot] is not None and "delete" not in (action, *then.split(", ")):
        assert after[place.hot] is not None, "a checkpoint is lost that nobody removed"
    if before[place.cold] is not None:
        assert after[place.cold] is not None, "a copy is lost that nobody removed"
    if other is None and then in ("save", "save over", "sweep, save") and kind != "blind":
        assert after[place.hot] == LATER, "an acknowledged save is replaced"
    if error is None and action.startswith("save") and then in ("nothing", "sweep", "fence"):
        assert after[place.hot] == NEW, "an acknowledged save is lost"
    if action.startswith("save") and not isinstance(error, (UndecidedError, Killed)) and kind != "blind":
        assert between == after[place.hot], "a save that was said to have failed appears"


@pytest.mark.parametrize("action", ACTIONS)
def test_whatever_request_of_a_bucket_is_carried_out_late_no_checkpoint_loses_a_file(
    action: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for situation in situations("bucket", action):
        happens("bucket", action, *situation)


@pytest.mark.parametrize("action", ["save over", "drop", "cool"])
def test_nor_where_a_marker_is_renamed_late(action: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    for situation in situations("folder", action):
        happens("folder", action, *situation)


@pytest.mark.parametrize("action", ["save", "save over"])
def test_nor_without_conditional_writes_though_an_older_save_may_come_back(
    action: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for number, silence, then, at_once in situations("blind", action):
        if then not in ("save, delete", "sweep, save, delete"):  # files of the older one go with the second
            happens("blind", action, number, silence, then, at_once)


@pytest.mark.parametrize("action", ["drop", "cool", "delete", "sweep a copy", "replace a copy"])
def test_nor_where_a_request_was_repeated_and_only_the_second_one_was_answered(
    action: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    for number, then in itertools.product(requests_of("repeating", action), AGAIN):
        if (action, then) != ONLY_FILES:
            happens("repeating", action, number, 1, then, at_once=False)


# Single situations.


def unanswered(place: Place, *, overwrite: bool, silence: int) -> ReknitError:
    """Return the error of a save whose commit gets no answer, and some requests after it."""
    place.calls.expect("commit manifest", silence)
    with pytest.raises(ReknitError) as caught:
        place.save(NEW, overwrite=overwrite)
    place.calls.end()
    return caught.value


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_whose_commit_may_still_land_says_so_and_keeps_its_files_and_its_marker(
    overwrite: bool,
) -> None:
    place = Place("bucket")
    if overwrite:
        place.save(OLD)
    error = unanswered(place, overwrite=overwrite, silence=2)
    assert isinstance(error, UndecidedError)
    assert "may still carry it out" in error.message
    assert "may still appear" in (error.remedy or "")
    assert place.value(place.hot) == (OLD if overwrite else None)
    assert begun_in(open_storage(place.hot))
    place.calls.release()
    assert place.value(place.hot) == NEW


def test_a_save_whose_commit_is_ruled_out_leaves_a_tombstone_and_no_file() -> None:
    place = Place("bucket")
    error = unanswered(place, overwrite=False, silence=1)
    assert not isinstance(error, UndecidedError)
    assert [listed.path for listed in open_storage(place.hot).list()] == ["manifest.json"]
    assert has_tombstone(open_storage(place.hot))
    place.calls.release()
    assert place.value(place.hot) is None
    assert reknit.latest(place.root) is None
    assert reknit.steps(place.root) == []
    assert reknit.latest(place.hot) is None  # nor is it a checkpoint whose steps somebody looks for
    with pytest.raises(CheckpointNotFoundError):
        reknit.delete(place.hot)
    with pytest.raises(CheckpointNotFoundError):
        reknit.verify(place.hot)
    place.sweep()
    place.save(LATER)
    assert place.value(place.hot) == LATER
    assert reknit.latest(place.root) == open_storage(place.hot).url


def test_a_manifest_that_was_changed_to_rule_out_a_late_one_is_the_same_checkpoint() -> None:
    place = Place("bucket")
    place.save(OLD)
    before, sizes = reknit.steps(place.root), set()
    for _ in range(3):
        unanswered(place, overwrite=True, silence=1)
        sizes.add(open_storage(place.hot).size("manifest.json"))
    place.calls.release()
    assert place.value(place.hot) == OLD
    assert reknit.steps(place.root) == before
    assert len(sizes) == 1  # one change takes the place of the one before


def test_no_save_begins_where_the_manifest_may_still_be_deleted() -> None:
    place = Place("bucket")
    place.save(OLD)
    place.calls.expect("delete manifest", 1)
    with pytest.raises(ReknitError, match="no answer"):
        reknit.delete(place.hot)
    place.calls.end()
    with pytest.raises(CommitError, match="a file of this save may still be deleted") as caught:
        place.save(LATER, overwrite=True)
    note = str(caught.value.remedy).partition("delete ")[2].split()[0]
    place.calls.release()
    assert place.value(place.hot) is None
    open_storage(place.hot).delete(note.removeprefix(f"{open_storage(place.hot).url}/"))  # as the remedy says
    place.save(LATER)
    assert place.value(place.hot) == LATER


def test_a_promotion_does_not_commit_a_file_whose_name_it_has_deleted_without_an_answer() -> None:
    place = Place("repeating")
    place.save(OLD)
    place.leave_a_copy()
    cold = open_storage(place.cold)
    (part,) = (listed.path for listed in cold.list() if listed.path.startswith("m/"))
    cold.put(part, b"a part", if_absent=False)
    place.calls.expect("delete m/", 1)
    with pytest.raises(CommitError, match="a file of this save may still be deleted"):
        place.promote()
    place.calls.end()
    assert len(place.calls.waiting) == 1
    place.calls.release()
    assert place.value(place.cold) is None


def test_a_copy_does_not_come_back_where_a_file_of_the_removed_one_was_deleted_without_an_answer() -> None:
    place = Place("repeating")
    place.save(OLD)
    place.promote()
    place.calls.expect("delete m/", 1)
    reknit.delete(place.hot)
    place.calls.end()
    assert len(place.calls.waiting) == 1
    with pytest.raises(CommitError, match="a file of this save may still be deleted"):
        place.promote(back=True)
    place.calls.release()
    assert (place.value(place.hot), place.value(place.cold)) == (None, OLD)


def test_a_removal_whose_every_request_was_answered_is_in_nobodys_way() -> None:
    place = Place("repeating")
    place.save(OLD)
    place.calls.expect("put ", 1)  # a repeated write, of a note, deletes nothing
    reknit.delete(place.hot)
    assert len(place.calls.waiting) == 1
    place.calls.end()
    place.save(LATER)
    assert place.value(place.hot) == LATER


def test_a_removal_says_that_a_request_of_it_may_still_be_carried_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = Place("repeating")
    place.save(OLD)
    place.calls.expect("delete manifest", 1)
    reknit.delete(place.hot)
    place.calls.end()
    assert "may still carry one out" in caplog.text
    with pytest.raises(CommitError, match="a file of this save may still be deleted"):
        place.save(LATER)
    place.calls.release()
    with pytest.raises(UsageError, match="are being deleted, or were without an answer"):
        place.sweep()


def test_a_save_that_was_fenced_off_never_commits_though_its_request_was_sent() -> None:
    place = Place("bucket")
    place.calls.expect("commit manifest", 1, dies=True)
    with pytest.raises(Killed):
        place.save(NEW)
    place.calls.end()
    assert reknit.latest(place.root, pending="fence") is None
    place.calls.release()
    assert reknit.latest(place.root) is None


def test_a_checkpoint_that_was_saved_over_a_tombstone_leaves_one_when_it_is_removed() -> None:
    place = Place("bucket")
    unanswered(place, overwrite=False, silence=1)
    place.save(LATER)
    reknit.delete(place.hot)
    place.calls.release()
    assert place.value(place.hot) is None
    assert has_tombstone(open_storage(place.hot))


def test_a_save_over_a_tombstone_does_not_replace_what_another_commits_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place("bucket")
    unanswered(place, overwrite=False, silence=1)
    place.save(LATER, cold=True)

    def other_commits(storage: Storage) -> bool:
        there = open_storage(place.cold)
        for path in [each.path for each in there.list()]:
            storage.put(path, there.get(path, limit=1 << 20), if_absent=False)
        return True

    monkeypatch.setattr(commit, "has_tombstone", other_commits)
    with pytest.raises(CheckpointExistsError, match="another save committed"):
        place.save(NEW)
    assert place.value(place.hot) == LATER


def test_a_save_over_a_tombstone_that_is_fenced_off_at_that_moment_does_not_commit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place("bucket")
    unanswered(place, overwrite=False, silence=1)

    def other_fences(storage: Storage) -> bool:
        for each in begun_in(storage):
            each.folder.delete(each.path)
        return has_tombstone(storage)

    monkeypatch.setattr(commit, "has_tombstone", other_fences)
    monkeypatch.setattr(marker, "_ALONE_S", 0.0)
    with pytest.raises(CommitError, match="nothing is committed"):
        place.save(NEW)
    assert place.value(place.hot) is None


def test_a_tombstone_that_was_copied_to_a_store_without_conditions_is_replaced_as_well() -> None:
    place = Place("blind")
    open_storage(place.hot).put("manifest.json", encode_tombstone(), if_absent=True)
    place.save(LATER)
    assert place.value(place.hot) == LATER


def test_a_commit_that_is_made_again_refuses_the_commit_of_a_save_that_began_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, other = Place("bucket"), Marker(0, "b" * 32)
    first, index = list[bytes](), index_path(other.write_id)
    hot, settled = open_storage(place.hot), late_commits.settled

    def other_begins(storage: Storage, mine: Marker, *, refused: bool) -> bool | None:
        place.calls.release()  # the commit, of which no answer came
        first.append(hot.get("manifest.json", limit=1 << 20))
        for path in (index, other.path):
            hot.put(path, b"", if_absent=True)
        return settled(storage, mine, refused=refused)

    monkeypatch.setattr(commit, "settled", other_begins)
    place.calls.expect("commit manifest", 1)
    place.save(NEW)
    assert hot.get("manifest.json", limit=1 << 20) != first[0], "the other may have seen the first one"
    assert hot.size(index) == 0, "its removal would show that the other was not sent"
    assert place.value(place.hot) == NEW


def test_what_replaces_a_checkpoint_that_is_to_be_removed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place("bucket")
    place.save(OLD)
    unanswered(place, overwrite=True, silence=2)
    for each in begun_in(open_storage(place.hot)):
        each.folder.delete(each.path)

    def entomb_late(storage: Storage, manifest: Manifest | None) -> bool:
        place.calls.release()
        return late_commits.entomb(storage, manifest)

    monkeypatch.setattr(stored_delete, "entomb", entomb_late)
    with pytest.raises(UsageError, match="was replaced while"):
        reknit.delete(place.hot)
    assert place.value(place.hot) == NEW
    place.save(LATER, overwrite=True)  # no note of the removal is in the way
    assert place.value(place.hot) == LATER


def test_a_copy_that_may_still_be_committed_stays_when_its_original_is_removed() -> None:
    place = Place("bucket")
    place.save(OLD)
    place.calls.expect("commit manifest", 2)
    with pytest.raises(UndecidedError):
        reknit.cool(place.hot, place.cold)
    place.calls.expect("commit manifest", 1)  # nor can it be ruled out
    reknit.delete(place.hot)
    place.calls.end()
    assert place.value(place.hot) is None
    place.calls.release()
    assert place.value(place.cold) == OLD


def test_a_committed_copy_goes_with_its_original_also_without_conditional_writes() -> None:
    place = Place("blind")
    place.save(OLD)
    reknit.cool(place.hot, place.cold)
    reknit.delete(place.hot)
    assert list(place.store.list()) == []


@pytest.mark.parametrize("age_s", [LONGEST_REQUEST_S - 1, LONGEST_REQUEST_S])
def test_a_part_of_a_copy_goes_without_conditional_writes_once_its_request_is_over(
    age_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place("blind")
    place.save(OLD)
    place.calls.expect("commit manifest", 2)
    with pytest.raises(UndecidedError):
        reknit.cool(place.hot, place.cold)
    place.calls.end()
    monkeypatch.setattr(BlindBucket, "age_s", lambda _, path: age_s, raising=False)
    reknit.delete(place.hot)
    assert bool(list(open_storage(place.cold).list())) == (age_s < LONGEST_REQUEST_S)


def test_files_that_may_still_be_deleted_are_not_copied_again() -> None:
    place = Place("bucket")
    place.save(OLD)
    place.calls.expect("delete m/", 1)
    with pytest.raises(ReknitError, match="no answer"):
        reknit.cool(place.hot, place.cold)  # it has moved, and its files go
    place.calls.end()
    with pytest.raises(CommitError, match="a file of this save may still be deleted"):
        place.promote(back=True)
    place.calls.release()
    assert place.value(place.hot) == OLD  # from where it has moved to
    place.save(LATER, overwrite=True)
    assert place.value(place.hot) == LATER


def test_the_index_of_a_promotion_that_failed_is_not_copied_again_while_it_may_still_be_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place("bucket")
    place.save(OLD)
    hot, cold = open_storage(place.hot), open_storage(place.cold)
    manifest = whole_manifest(hot, committed(hot))
    own = [
        Written(file.path, file.nbytes, np.array(file.digests, np.uint64))
        for file in manifest.files
        if file != manifest.index
    ]

    def with_all_ranks() -> None:
        job = Promotion(hot, cold, True, SaveOptions(), Recorder("promote"))
        promote(job, SoloGroup(), 1, manifest.write_id, own)

    def fails(*_: object, **__: object) -> bool:
        place.calls.expect("delete index", 1)
        raise UsageError("the run is over")

    with monkeypatch.context() as patched:
        patched.setattr(commit, "check_absent", fails)
        with pytest.raises(UsageError, match="the run is over"):
            with_all_ranks()
    place.calls.end()
    assert place.calls.waiting
    with pytest.raises(CommitError, match="a file of this save may still be deleted"):
        with_all_ranks()
    place.calls.release()
    assert place.value(place.cold) is None
