"""The files that a rank deletes after an error of a save, and the files that stay for the root."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from itertools import product
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest

import reknit
from reknit.comm.group import Group, SoloGroup
from reknit.comm.tree.thread_group import thread_groups
from reknit.engine.memory.write import ByteSource, Tuner, Written, write_bytes
from reknit.engine.messages import Assignment, RankClaims
from reknit.engine.saving.coordinator import Coordinator
from reknit.engine.saving.here import EarlierSaves, Here
from reknit.errors import CommError, CommitError, DeadlineError, ReknitError, StorageError
from reknit.format.manifest_file import decode_manifest
from reknit.format.paths import MANIFEST_PATH
from reknit.options import SaveOptions
from tests.engine.held import task_at
from tests.engine.runs import Annals, save_as
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from reknit.engine.stored.commit import Fate

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray

    from reknit.engine.memory.workers import Arena

OTHER = "0123456789abcdef" * 2
SAID = RankClaims("", None, b"", None, [])
ABOVE = StorageError("no room on another rank")


def here_in(storage: Annals, group: Group, coordinator: Any = None) -> Here:
    task = task_at(storage, group, SaveOptions(), step=1, overwrite=True)
    return Here(task, EarlierSaves(coordinator or Coordinator()), tuner=Tuner(threads=1))


def fate_after(
    error: BaseException, storage: Annals, rank: int, write_id: str, *, written: list[Written], sent: bool
) -> Fate:
    """Let a rank clean up that has written these files, and may have sent the receipt, before an error."""
    here = here_in(storage, thread_groups(2)[rank])
    here.written, here.write_id, here.sent = written, write_id, sent
    return here.clean_up(error)


def test_files_stay_where_the_root_may_yet_commit_them_and_else_go() -> None:
    cases: list[tuple[BaseException, int, bool, bool]] = [
        (ABOVE, 1, True, False),
        (ABOVE, 1, False, False),
        (StorageError("no room here", phase="write"), 1, True, False),
        (CommError("no answer came"), 1, False, False),
        (CommError("no answer came"), 1, True, True),
        (DeadlineError("no answer came in time"), 1, True, True),
        (KeyboardInterrupt(), 1, True, True),
        (KeyboardInterrupt(), 1, False, False),
        (KeyboardInterrupt(), 0, True, False),
    ]
    for error, rank, sent, stays in one_by_one(cases):
        storage = Annals("receipt")
        written = [write_bytes(storage, "m/00001.01234567.safetensors", b"x")]
        assert fate_after(error, storage, rank, OTHER, written=written, sent=sent).committed is False
        assert bool(list(storage.list())) == stays


def test_files_of_what_is_committed_stay_whatever_the_error_is() -> None:
    for rank, error in one_by_one(product([0, 1], [ABOVE, CommError("no answer came"), KeyboardInterrupt()])):
        storage = Annals("receipt")
        assert save_as(storage, 1, 1) is None
        manifest = decode_manifest(storage.get(MANIFEST_PATH, limit=1 << 20))
        before = [file.path for file in storage.list()]
        written = [Written(file.path, file.nbytes, cast("Any", file.digests)) for file in manifest.files]
        fate = fate_after(error, storage, rank, manifest.write_id, written=written, sent=True)
        assert fate.litter is False
        assert [file.path for file in storage.list()] == before


class NoFiles:
    plan, items, columns = b"", ("m",), None


class Root:
    """A coordinator that refuses to commit, and counts the calls of `give_up`."""

    def __init__(self) -> None:
        self.given_up, self.gave_up = 0, threading.Event()

    def assign(self, *_: object, **__: object) -> list[Assignment]:
        return [Assignment(OTHER, b"", b"", [])]

    def commit(self, *_: object) -> None:
        raise CommitError("the parts do not make a whole")

    def give_up(self) -> None:
        self.given_up += 1
        self.gave_up.set()


def test_after_an_error_the_root_gives_up_and_no_file_is_left() -> None:
    storage, root = Annals("receipt"), Root()

    def run() -> None:
        here = here_in(storage, SoloGroup(), cast("Any", root))
        with here.rounds():
            here.hold_assign(SAID)
            here.written.append(write_bytes(storage, "m/00000.01234567.safetensors", b"x"))
            here.commit(cast("Any", NoFiles()))

    with pytest.raises(CommitError, match="do not make a whole"):
        run()
    assert root.given_up == 1
    assert list(storage.list()) == []


class Late(ByteSource):
    """A data file whose piece comes only when the root gives the save up."""

    plan, items, columns, listed = b"", ("m",), None, (("m", 0, 4),)

    def __init__(self, root: Root) -> None:
        self.begun, self.root = threading.Event(), root

    def source(self, write_id: str, timeout_s: float) -> AbstractContextManager[ByteSource]:
        return nullcontext(self)

    def piece(self, file: int, start: int, nbytes: int, arena: Arena) -> NDArray[np.uint8]:
        self.begun.set()
        assert self.root.gave_up.wait(30)
        return np.frombuffer(b"data", np.uint8)


def test_a_file_that_another_thread_still_writes_is_deleted_when_it_is_there() -> None:
    storage, root = Annals("receipt"), Root()
    here, files = here_in(storage, SoloGroup(), cast("Any", root)), cast("Any", Late(root))

    def run(pool: ThreadPoolExecutor) -> None:
        with here.rounds():
            here.hold_assign(SAID)
            writing.append(pool.submit(here.write, files))
            assert files.begun.wait(30)
            raise CommError("no answer came")

    writing: list[Future[None]] = []
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(CommError, match="no answer came"):
            run(pool)
        assert writing[0].done(), "the agent reports the end of a save when its arena is free"
    assert list(storage.list()) == []


def test_an_error_of_the_arguments_of_a_process_alone_is_about_no_rank(tmp_path: Path) -> None:
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        (str(tmp_path), {"x": 1}, {"step": -1}),
        (str(tmp_path), [1], {}),
        ("nowhere://x", {"x": 1}, {}),
    ]
    for path, state, more in one_by_one(wrong):
        with pytest.raises(ReknitError) as caught:
            reknit.save(path, state, **more)
        assert (caught.value.rank, caught.value.phase) == (None, None)
