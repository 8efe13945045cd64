"""After an error of a save: which of its files does a rank delete, and may the root still commit?"""

from __future__ import annotations

from itertools import product
from typing import Any, cast

import pytest

from reknit.comm.group import Group, SoloGroup
from reknit.comm.tree.thread_group import thread_groups
from reknit.engine.memory.write import Written, write_bytes
from reknit.engine.messages import Assignment, RankClaims
from reknit.engine.saving.coordinator import Coordinator
from reknit.engine.saving.here import CommitTurn, commit_turn
from reknit.engine.saving.task import SaveJob
from reknit.errors import CommError, CommitError, DeadlineError, StorageError
from reknit.events.phase import Recorder
from reknit.format.manifest_file import decode_manifest
from reknit.format.paths import MANIFEST_PATH
from reknit.options import SaveOptions
from tests.engine.runs import Annals, nothing_held, save_as
from tests.running.cases import one_by_one

OTHER = "0123456789abcdef" * 2
SAID = RankClaims("", None, b"", None, [])
ABOVE = StorageError("no room on another rank")


def job_of(storage: Annals, group: Group) -> SaveJob:
    return SaveJob(
        collect=nothing_held,
        group=group,
        storage=storage,
        options=SaveOptions(),
        recorder=Recorder("save", group.rank),
        step=1,
        overwrite=True,
    )


def assigned(write_id: str) -> Assignment:
    return Assignment(write_id, b"", b"", [])


def after_writing(
    storage: Annals, rank: int, write_id: str, written: list[Written], *, sent: bool
) -> CommitTurn:
    turn = CommitTurn(job_of(storage, thread_groups(2)[rank]), Coordinator(), SAID, assigned(write_id))
    turn.written, turn.sent = written, sent
    return turn


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
        assert after_writing(storage, rank, OTHER, written, sent=sent).clean_up(error).committed is False
        assert bool(list(storage.list())) == stays


def test_files_of_what_is_committed_stay_whatever_the_error_is() -> None:
    for rank, error in one_by_one(product([0, 1], [ABOVE, CommError("no answer came"), KeyboardInterrupt()])):
        storage = Annals("receipt")
        assert save_as(storage, 1, 1) is None
        manifest = decode_manifest(storage.get(MANIFEST_PATH, limit=1 << 20))
        before = [file.path for file in storage.list()]
        written = [Written(file.path, file.nbytes, cast("Any", file.digests)) for file in manifest.files]
        assert (
            after_writing(storage, rank, manifest.write_id, written, sent=True).clean_up(error).litter
            is False
        )
        assert [file.path for file in storage.list()] == before


class Root:
    """A coordinator that refuses to commit, and counts the calls of `give_up`."""

    def __init__(self) -> None:
        self.given_up = 0

    def commit(self, *_: object) -> None:
        raise CommitError("the parts do not make a whole")

    def give_up(self) -> None:
        self.given_up += 1


def test_after_an_error_the_root_gives_up_and_no_file_is_left() -> None:
    storage, root = Annals("receipt"), Root()

    def run() -> None:
        job = job_of(storage, SoloGroup())
        with commit_turn(job, cast("Any", root), SAID, assigned(OTHER)) as commit:
            commit.written.append(write_bytes(storage, "m/00000.01234567.safetensors", b"x"))
            commit.commit(["m"], None)

    with pytest.raises(CommitError, match="do not make a whole"):
        run()
    assert root.given_up == 1
    assert list(storage.list()) == []
