"""The files of killed saves are removed; foreign files, and those of saves that wake up, stay."""

from __future__ import annotations

import os
import shutil
import uuid
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import reknit
from reknit.engine.stored.leftovers import Leftover, leftovers, remove
from reknit.errors import StorageNotFoundError
from reknit.format import paths
from reknit.format.manifest_file import decode_manifest, encode_manifest
from reknit.storage.base import Dated
from reknit.storage.local.memory import SweptFolder
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import open_storage
from reknit.storage.wrappers.forwarding import ForwardingStorage
from tests.running.cases import one_by_one, one_by_one_in
from tests.running.examples import examples
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from pathlib import Path

    from reknit.storage.base import Storage

NOW = 1_800_000_000.0
LIMIT = NOW - 86_400
OLD, YOUNG = NOW - 2 * 86_400, NOW - 60
DEAD, OTHER = "0123abcd" + "0" * 24, "9876fedc" + "0" * 24


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, made once."""
    folder = tmp_path_factory.mktemp("made") / "step"
    reknit.save(folder, {"model": {"w": np.arange(100)}, "step": 3})
    return folder


def touch(path: Path, modified: float, data: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (modified, modified))


def copied(committed: Path, to: Path, modified: float = OLD) -> Path:
    shutil.copytree(committed, to)
    for path in to.rglob("*"):
        os.utime(path, (modified, modified))
    return to


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def found(root: Path) -> list[Leftover]:
    return leftovers(LocalStorage(root), SweptFolder(str(root)).dated(), LIMIT)


def clear(root: Path) -> list[bool]:
    storage, sweep = LocalStorage(root), SweptFolder(str(root))
    return [remove(storage, sweep, each, open_storage) for each in found(root) if each.kept is None]


# Paths of files that saves leave, those of one write id, and those of other programs.
THINGS = {
    "data": paths.data_path("model", 3, DEAD),
    "more data": paths.data_path("optimizer/state", 0, DEAD, 2),
    "values": paths.blob_path("extra", 0, DEAD, own=0),
    "index": paths.index_path(DEAD),
    "marker": paths.marker_path(17, DEAD),
    "data of another": paths.data_path("model", 0, OTHER),
    "marker of another": paths.marker_path(18, OTHER),
    "temporary": f".{uuid.uuid4().hex}.tmp",
    "sub-file": f"model/.{uuid.uuid4().hex}-3-0.tmp",
    "lock": ".manifest.json.lock.tmp",
}
TEMPORARY = {"temporary", "sub-file", "lock"}
ITEMS = {path.partition("/")[0] for path in THINGS.values() if "/" in path}
FOREIGN = (
    *("notes.txt", "model/weights.bin", ".hidden.tmp", ".session.lock.tmp", "model/.nfs0000001"),
    "model/00000.safetensors",
)


def owner(path: str, known: set[str]) -> str:
    """Return the folder of the checkpoint that a path belongs to.

    A temporary file in the folder of an item belongs to the checkpoint above, if that is in `known`.
    """
    here, _, name = path.rpartition("/")
    above = here.rpartition("/")[0]
    if name.endswith(".tmp"):
        return above if here not in known and above in known else here
    return above if here.rpartition("/")[2] in ITEMS else here


def test_temporary_files_belong_to_the_same_folder_in_whatever_order_they_are_listed() -> None:
    for order in one_by_one([1, -1]):
        old = Dated("temporary", "model/.0123-3-0.tmp", 1, OLD)
        young = Dated("temporary", ".4567.tmp", 1, YOUNG)
        held = leftovers(ProcessMemory("nothing"), [old, young][::order], LIMIT)
        assert [(each.folder, each.kept is None) for each in held] == [("", False), ("model", True)]


@settings(max_examples=examples(60))
@given(data=st.data())
def test_all_that_is_dead_goes_and_nothing_else(
    data: st.DataObject, committed: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In any mixture of checkpoints, dead saves, live ones, and files of others."""
    root, stays = tmp_path_factory.mktemp("any"), set()
    known: set[str] = set()
    """Folders with visible files of a save."""
    made: dict[str, float] = {}
    for name in data.draw(st.sets(st.sampled_from(["", "a", "b/c"]), min_size=1), "folders"):
        folder, below = root / name, f"{name}/" if name else ""
        if data.draw(st.booleans(), "committed"):
            shutil.copytree(committed, folder, dirs_exist_ok=True)
            stays |= {below + path for path in files(committed)}
            known.add(name)
        foreign = data.draw(st.sets(st.sampled_from(FOREIGN)), "foreign")
        things = data.draw(
            st.dictionaries(st.sampled_from(sorted(THINGS)), st.sampled_from([OLD, YOUNG])), "things"
        )
        for path in foreign:
            touch(folder / path, OLD)
        for thing, modified in things.items():
            touch(folder / THINGS[thing], modified)
        stays |= {below + path for path in foreign}
        known |= {name} if things.keys() - TEMPORARY else set()
        made |= {below + THINGS[thing]: modified for thing, modified in things.items()}
    owners = {path: owner(path, known) for path in made}
    alive = {owners[path] for path, modified in made.items() if modified == YOUNG}
    stays |= {path for path in made if owners[path] in alive}
    clear(root)
    assert files(root) == stays
    assert all(each.kept for each in found(root))


def test_where_the_manifest_cannot_be_read_everything_stays(committed: Path, tmp_path: Path) -> None:
    cases: list[bytes] = [b"", b"{}", b'{"format_version": 99}']
    for content, folder in one_by_one_in(tmp_path, cases):
        folder = copied(committed, folder / "a")
        (folder / "manifest.json").chmod(0o644)
        touch(folder / "manifest.json", OLD, content)
        touch(folder / THINGS["data"], OLD)
        touch(folder / THINGS["marker"], OLD)
        before = files(folder)
        assert {each.write_id8 for each in found(folder)} >= {DEAD[:8]}
        assert all("manifest there cannot be read" in (each.kept or "") for each in found(folder))
        clear(folder)
        assert files(folder) == before


def test_files_that_a_manifest_names_stay_whatever_their_write_id(committed: Path, tmp_path: Path) -> None:
    folder = copied(committed, tmp_path / "a")
    manifest = decode_manifest((folder / "manifest.json").read_bytes())
    borrowed = replace(manifest.files[0], path=THINGS["data"])
    touch(folder / THINGS["data"], OLD)
    touch(folder / THINGS["more data"], OLD)
    (folder / "manifest.json").chmod(0o644)
    (folder / "manifest.json").write_bytes(
        encode_manifest(replace(manifest, files=(*manifest.files, borrowed)))
    )
    assert clear(tmp_path) == [True]
    assert (folder / THINGS["data"]).exists()
    assert not (folder / THINGS["more data"]).exists()


def dead_save(tmp_path: Path, committed: Path) -> tuple[Storage, Path]:
    """A checkpoint, and a save over it whose files and marker are all there, and old."""
    folder = copied(committed, tmp_path / "a")
    for thing in ("data", "index", "marker"):
        touch(folder / THINGS[thing], OLD)
    return LocalStorage(folder), folder


def manifest_of(folder: Path, write_id: str) -> bytes:
    manifest = decode_manifest((folder / "manifest.json").read_bytes())
    return encode_manifest(replace(manifest, write_id=write_id))


def test_a_save_that_commits_after_the_look_keeps_its_files(committed: Path, tmp_path: Path) -> None:
    storage, folder = dead_save(tmp_path, committed)
    (left,) = found(tmp_path)
    storage.commit("manifest.json", manifest_of(folder, DEAD), pending=THINGS["marker"], if_absent=False)
    assert not remove(LocalStorage(tmp_path), SweptFolder(str(tmp_path)), left, open_storage)
    assert (folder / THINGS["data"]).exists()
    assert (folder / THINGS["index"]).exists()


class Waking(ForwardingStorage):
    """A store in which a save that was presumed dead commits right before some operation, if it can."""

    def __init__(self, inner: Storage, folder: Path, before: int) -> None:
        super().__init__(inner)
        self.folder, self.before, self.count, self.woke = folder, before, 0, False

    def around(self, inner: Storage, path: str) -> Storage:
        below = Waking(inner, self.folder, self.before)
        below.step = self.step  # type: ignore[method-assign]
        return below

    def step(self) -> None:
        self.count += 1
        if self.count == self.before:
            try:
                LocalStorage(self.folder).commit(
                    "manifest.json", manifest_of(self.folder, DEAD), pending=THINGS["marker"], if_absent=False
                )
            except StorageNotFoundError:
                return
            self.woke = True

    def delete(self, path: str) -> None:
        self.step()
        super().delete(path)

    def get(self, path: str, *, limit: int) -> bytes:
        self.step()
        return super().get(path, limit=limit)

    def list(self, prefix: str = ""):  # type: ignore[no-untyped-def]
        self.step()
        return super().list(prefix)


def test_a_save_may_wake_up_at_any_moment(committed: Path, tmp_path: Path) -> None:
    """It commits with all its files, or not at all."""
    for before, folder in one_by_one_in(tmp_path, range(1, 8)):
        _, folder = dead_save(folder, committed)
        (left,) = found(folder)
        storage = Waking(LocalStorage(folder), folder, before)
        removed = remove(storage, SweptFolder(str(folder)), left, open_storage)
        assert removed is not storage.woke
        present = {THINGS["data"], THINGS["index"]} & files(folder)
        assert len(present) == (2 if storage.woke else 0)
        assert storage.woke == (before == 1)


def test_an_upload_of_a_committed_save_is_left_over_and_its_files_are_not(
    committed: Path, tmp_path: Path
) -> None:
    """A client that asked twice for an upload, since the first answer was lost, finishes one."""
    copied(committed, tmp_path / "a")
    manifest = decode_manifest((tmp_path / "a/manifest.json").read_bytes())
    held = list(SweptFolder(str(tmp_path)).dated())
    upload = Dated("upload", f"a/{manifest.files[0].path}", 5, OLD, "7")
    (left,) = leftovers(LocalStorage(tmp_path), [*held, upload], LIMIT)
    assert left.found == (upload,)
    assert left.kept is None
    (left,) = leftovers(LocalStorage(tmp_path), [*held, upload._replace(modified=YOUNG)], LIMIT)
    assert left.kept is not None


def test_links_are_not_followed(committed: Path, tmp_path: Path) -> None:
    """A sweep follows neither links out of the folder nor links within it."""
    touch(tmp_path / "elsewhere" / THINGS["data"], OLD)
    root = tmp_path / "root"
    root.mkdir()
    (root / "out").symlink_to(tmp_path / "elsewhere")
    (root / "up").symlink_to(root)
    (root / THINGS["index"]).symlink_to(tmp_path / "elsewhere" / THINGS["data"])
    os.utime(root / THINGS["index"], (OLD, OLD), follow_symlinks=False)
    (left,) = found(root)
    assert [each.path for each in left.found] == [THINGS["index"]]
    assert clear(root) == [True]
    assert sorted(os.listdir(root)) == ["out", "up"]
    assert (tmp_path / "elsewhere" / THINGS["data"]).exists()


def test_files_beside_a_manifest_that_is_a_link_stay(committed: Path, tmp_path: Path) -> None:
    for target, folder in one_by_one_in(tmp_path, ["aside.json", "nothing"]):
        folder = copied(committed, folder / "a")
        (folder / "manifest.json").rename(folder / "aside.json")
        (folder / "manifest.json").symlink_to(folder / target)
        touch(folder / THINGS["marker"], OLD)
        for path in folder.rglob("*"):
            os.utime(path, (OLD, OLD), follow_symlinks=False)
        clear(folder)
        assert files(folder) >= files(committed) - {"manifest.json"}
