"""The promises on NFS, between two hosts that mount one export.

Runs in the machine of scripts/servers.d/nfs.py, for tests/storage/test_nfs.py and tests/nightly/nfs.py.
A mount is a host: it has its own caches and its own connection to the server, whichever process uses it.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import reknit
from reknit.comm.meeting.rendezvous import FolderStore
from reknit.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    DeadlineError,
    StorageError,
    StorageFullError,
    StorageNotFoundError,
)
from reknit.options import MIB
from reknit.storage.local import store as local
from reknit.storage.local.store import LocalStorage
from reknit.testing.storage_suite import StorageSuite, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reknit.storage.base import Storage, Writer

VIEWS = Path(os.environ["VIEWS"])
ROOT = Path(__file__).parents[2]


class Hosts:
    """A new folder of the export, as the hosts a and b see it, and on the disk of the server."""

    def __init__(self, version: str) -> None:
        name = uuid.uuid4().hex[:8]
        self.version = version
        self.server = Path(os.environ["DISK"], name)
        self.server.mkdir()
        self.a, self.b, self.soft = (VIEWS / f"{host}-{version}" / name for host in ("a", "b", "soft"))


@pytest.fixture(params=["v3", "v4"])
def hosts(request: pytest.FixtureRequest) -> Hosts:
    return Hosts(request.param)


def state(value: int, nbytes: int = MIB) -> dict[str, Any]:
    return {
        "model": {"w": np.full(nbytes, value, np.uint8), "b": np.full((3, 5), value)},
        "own": {"value": value},
    }


def loaded(path: Path, nbytes: int = MIB) -> int:
    """Load a state, and return the one value that it holds."""
    target = state(0, nbytes)
    reknit.load(path, target)
    values = {int(target["own"]["value"]), *np.unique(target["model"]["w"]), *np.unique(target["model"]["b"])}
    assert len(values) == 1, values
    return int(values.pop())


class OnNfs(StorageSuite):
    """One host uses the store; `other` looks at its files, and puts some there."""

    version: ClassVar[str]
    other: ClassVar[str]

    def make(self, tmp_path: Path) -> Storage:
        self._hosts = Hosts(self.version)
        return LocalStorage(self._hosts.a / "not made yet" / "root")

    def _there(self, storage: Storage, path: str) -> Path:
        return Path(storage.url.replace(f"/a-{self.version}/", f"/{self.other}-{self.version}/"), path)

    def raw_read(self, storage: Storage, path: str) -> bytes:
        file = self._there(storage, path)
        for _ in range(8):
            os.listdir(file.parent)  # or NFS 4.2 goes on reading a file that another one has replaced
            try:
                return file.read_bytes()
            except OSError as error:
                if error.errno not in (errno.ESTALE, errno.ENOENT):
                    raise
        return file.read_bytes()

    def raw_write(self, storage: Storage, path: str, data: bytes) -> None:
        target = self._there(storage, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


class TestNfs3(OnNfs):
    """Uses one host, since NFS 3 cannot distinguish changes by two hosts to a folder at the same time."""

    version = "v3"
    other = "a"


class TestNfs4(OnNfs):
    version = "v4"
    other = "b"


@pytest.mark.parametrize("times", range(3))
def test_what_one_host_saves_another_loads_at_once(hosts: Hosts, times: int) -> None:
    """The other host has looked in vain before, for the checkpoint and for the folder."""
    for value in range(1, 4):
        path = f"run/step-{value}"
        with pytest.raises(CheckpointNotFoundError):
            loaded(hosts.b / path)
        assert not (hosts.b / path / "manifest").exists()
        reknit.save(hosts.a / path, state(value))
        assert loaded(hosts.b / path) == value
        assert str(reknit.latest(hosts.b / "run")).endswith(f"step-{value}")


def test_a_name_that_was_looked_for_in_vain_is_found_as_soon_as_it_is_there(hosts: Hosts) -> None:
    """Every operation looks, first in a missing folder, then in an existing one."""
    ours, others = LocalStorage(hosts.b), LocalStorage(hosts.a)
    looks: dict[str, Callable[[str], object]] = {
        "get": lambda path: ours.get(path, limit=10),
        "size": ours.size,
        "read": lambda path: ours.read_into(path, 0, [memoryview(bytearray(3))]),
    }
    for name, look in looks.items():
        for path in (f"{name}/deep/x", f"{name}/deep/y"):
            with pytest.raises(StorageNotFoundError):
                look(path)
            time.sleep(0.1)  # longer than one tick of the file times on the server
            others.put(path, b"abc", if_absent=True)
            look(path)


def test_a_file_that_another_host_replaces_is_read_anew(hosts: Hosts) -> None:
    ours, others = LocalStorage(hosts.b), LocalStorage(hosts.a)
    for k in range(100):
        data = b"%03d" % k
        others.put("pending", b"", if_absent=True)
        others.commit("x", data, pending="pending", if_absent=False)
        for _ in range(2):
            assert ours.get("x", limit=10) == data


def test_a_reader_sees_the_old_or_the_new_while_another_host_overwrites(hosts: Hosts) -> None:
    """The reader never sees a mixture, nor the old content after the new one."""
    reknit.save(hosts.a / "c", state(1))
    seen: list[int] = []
    failed: list[BaseException] = []
    over = threading.Event()

    def read() -> None:
        try:
            while not over.is_set():
                seen.append(loaded(hosts.b / "c"))
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for value in range(2, 12):
        reknit.save(hosts.a / "c", state(value), overwrite=True)
    over.set()
    reader.join()
    assert failed == []
    assert seen
    assert seen == sorted(seen)
    assert loaded(hosts.b / "c") == 11


def test_of_two_hosts_that_put_or_commit_at_once_one_is_first(hosts: Hosts) -> None:
    stores = [LocalStorage(hosts.a), LocalStorage(hosts.b)]
    for kind in ("put", "commit"):
        for round_ in range(15):
            line = threading.Barrier(2)
            won: list[bool | None] = [None, None]

            def go(k: int, kind: str = kind, round_: int = round_, line: Any = line, won: Any = won) -> None:
                path = f"{kind}-{round_}"
                if kind == "put":
                    line.wait(60)
                    won[k] = stores[k].put(path, b"%d" % k, if_absent=True)
                else:
                    stores[k].put(f"pending.{k}", b"", if_absent=False)
                    line.wait(60)
                    won[k] = stores[k].commit(path, b"%d" % k, pending=f"pending.{k}", if_absent=True)

            threads = [threading.Thread(target=go, args=(k,)) for k in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(map(bool, won)) == [False, True]
            for store in stores:
                assert store.get(f"{kind}-{round_}", limit=10) == b"%d" % won.index(True)


def test_a_commit_whose_marker_another_host_removed_changes_nothing(hosts: Hosts) -> None:
    ours, others = LocalStorage(hosts.b), LocalStorage(hosts.a)
    for if_absent in (True, False):
        pending = f"pending.{if_absent}"  # each save has a marker of its own name
        ours.put(pending, b"", if_absent=True)
        others.delete(pending)
        with pytest.raises(StorageNotFoundError, match="pending"):
            ours.commit("manifest", b"older", pending=pending, if_absent=if_absent)
        assert not (hosts.server / "manifest").exists()


def test_a_host_does_not_save_over_what_another_has_just_saved(hosts: Hosts) -> None:
    with pytest.raises(CheckpointNotFoundError):
        loaded(hosts.b / "c")
    reknit.save(hosts.a / "c", state(1))
    with pytest.raises(CheckpointExistsError):
        reknit.save(hosts.b / "c", state(2))
    assert loaded(hosts.a / "c") == 1


def until_nothing_is_kept(folder: Path) -> None:
    """Wait until the client has removed the files that it kept while they were open."""
    for _ in range(200):
        if not any(".nfs" in name for _, _, names in os.walk(folder) for name in names):
            return
        time.sleep(0.05)
    raise AssertionError(f"files are kept in {folder}")


def test_files_that_are_deleted_while_they_are_read_are_not_seen(hosts: Hosts) -> None:
    """The client keeps them as .nfsXXXX until they are closed."""
    reader, cleaner = LocalStorage(hosts.a), LocalStorage(hosts.a)
    for path in ("run/c/x", "run/c/y"):
        reader.put(path, bytes(10), if_absent=True)
        reader.read_into(path, 0, [memoryview(bytearray(10))])
    cleaner.delete("run/c/x")
    assert any(name.startswith(".nfs") for name in os.listdir(hosts.a / "run/c"))
    for store in (reader, cleaner, LocalStorage(hosts.b)):
        assert listed(store) == {"run/c/y": 10}
    cleaner.delete("run/c/y")
    assert listed(cleaner) == {}
    reader.close()
    until_nothing_is_kept(hosts.a)
    reader.put("run/c/x", b"new", if_absent=True)
    assert LocalStorage(hosts.b).get("run/c/x", limit=10) == b"new"


def test_a_checkpoint_that_is_being_loaded_from_can_be_replaced_and_saved_again(hosts: Hosts) -> None:
    """Its files stay as .nfsXXXX in its folder, and are ignored."""
    storage = LocalStorage(hosts.a / "c")
    reknit.save(hosts.a / "c", state(1))
    for path, nbytes in listed(storage).items():
        storage.read_into(path, 0, [memoryview(bytearray(min(nbytes, 4)))])
    reknit.save(hosts.a / "c", state(2), overwrite=True)
    assert any(".nfs" in name for _, _, names in os.walk(hosts.a / "c") for name in names)
    for host in (hosts.a, hosts.b):
        assert loaded(host / "c") == 2
        assert reknit.verify(host / "c").ok
    storage.close()
    until_nothing_is_kept(hosts.a)


@pytest.fixture(params=["v3", "v4"])
def small(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return a folder of an export that has room for 80 MiB or so."""
    folder = VIEWS / f"small-{request.param}" / uuid.uuid4().hex[:8]
    folder.mkdir()
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert os.statvfs(os.environ["SMALL"]).f_bavail * 1024 > 60 * MIB


def test_what_does_not_fit_is_refused_before_the_first_byte(small: Path) -> None:
    reknit.save(small / "old", state(1))
    before = listed(LocalStorage(small))
    with pytest.raises(StorageFullError, match="free"):
        reknit.save(small / "new", state(2, 200 * MIB))
    assert listed(LocalStorage(small)) == before
    assert loaded(small / "old") == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_disk_that_fills_up_while_a_save_writes_is_a_typed_error(
    small: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    """The client has taken the bytes already when the server has no room for them."""
    reknit.save(small / "old", state(1))
    before = listed(LocalStorage(small))
    monkeypatch.setattr(local, "reserve", lambda *_: None)  # the look that others are quicker than
    with pytest.raises(StorageFullError) as caught:
        reknit.save(small / ("old" if overwrite else "new"), state(2, 120 * MIB), overwrite=overwrite)
    assert str(small) in str(caught.value.path)
    assert listed(LocalStorage(small)) == before
    assert loaded(small / "old") == 1
    reknit.save(small / "new", state(3))
    assert loaded(small / "new") == 3


def fill(writer: Writer, mib: int) -> None:
    for k in range(mib):
        writer.write(k * MIB, memoryview(bytes(MIB)))
    writer.finish()


def test_a_file_whose_end_did_not_fit_is_not_finished(small: Path) -> None:
    """Writes go through the page cache, where only the sync or the close returns the error."""
    monkeyed = LocalStorage(small, durability="process")
    writer = monkeyed.create("x", 30 * MIB)
    room = os.statvfs(small)
    filler = Path(os.environ["SMALL"], "filler")
    with open(filler, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize - 10 * MIB)
    try:
        with pytest.raises(StorageFullError):
            fill(writer, 30)
        writer.abort()
        assert listed(monkeyed) == {}
    finally:
        filler.unlink()


def serve(threads: int) -> None:
    subprocess.run(["rpc.nfsd", "--grace-time", "10", "--lease-time", "10", str(threads)], check=True)


@contextmanager
def server_away() -> Iterator[None]:
    """Stop the server, and start it again."""
    serve(0)
    try:
        yield
    finally:
        serve(4)
        # No other client was active meanwhile, so clients recover their open files at once.
        Path("/proc/fs/nfsd/v4_end_grace").write_text("Y")


def test_a_soft_mount_without_a_server_is_a_typed_error(hosts: Hosts) -> None:
    reknit.save(hosts.soft / "old", state(1))
    storage = LocalStorage(hosts.soft)
    writer = storage.create("x", 8)
    writer.write(0, memoryview(bytes(8)))
    with server_away():
        calls: list[Callable[[], object]] = [
            writer.finish,
            lambda: reknit.save(hosts.soft / "new", state(2)),
            lambda: storage.put("y", b"1", if_absent=True),
        ]
        for call in calls:
            with pytest.raises(StorageError, match=r"EIO|ETIMEDOUT") as caught:
                call()
            assert str(hosts.soft) in str(caught.value.path)
        writer.abort()
    assert loaded(hosts.a / "old") == 1
    with pytest.raises(CheckpointNotFoundError):
        loaded(hosts.b / "new")
    reknit.save(hosts.soft / "new", state(3))
    assert loaded(hosts.b / "new") == 3


def test_a_hard_mount_goes_on_when_the_server_is_back(hosts: Hosts) -> None:
    reknit.save(hosts.a / "old", state(1))
    failed: list[BaseException] = []
    progress: list[int] = []

    def save_and_load() -> None:
        try:
            for value in range(2, 6):
                reknit.save(hosts.a / f"{value}", state(value, 4 * MIB))
                assert loaded(hosts.a / f"{value}", 4 * MIB) == value
                progress.append(value)
        except BaseException as error:
            failed.append(error)
            raise

    saver = threading.Thread(target=save_and_load)
    saver.start()
    while not progress and not failed:
        time.sleep(0.01)
    with server_away():
        time.sleep(3)
        assert saver.is_alive()
        assert len(progress) < 4
    saver.join(120)
    assert not saver.is_alive()
    assert failed == []
    for value in range(2, 6):
        assert loaded(hosts.b / f"{value}", 4 * MIB) == value


# One rank of a job, on the host whose mount it was given as /run/nfs.
RANK = """
import sys
import numpy as np
import reknit

rank, size, folder, what, wait = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
options = reknit.CommOptions(connect_timeout_s=100)
group = reknit.connect(rank, size, at=f"file:///run/nfs/{folder}/meet-{what}", options=options)
full = {"model": {"w": np.arange(3_000_000), "b": np.full((3, 5), 7)}}
path = f"/run/nfs/{folder}/c"
if what != "load":
    state = full | {"own": reknit.PerRank({"rank": rank})}
    save = reknit.SaveOptions(comm=options)
    overwrite = what == "again"
    reknit.save(path, state, options=save, group=group, wait=wait == "wait", overwrite=overwrite).result(200)
empty = {"model": {"w": np.zeros(3_000_000, int), "b": np.zeros((3, 5), int)}}
reknit.load(path, empty, options=reknit.LoadOptions(comm=options), group=group)
for name, value in full["model"].items():
    assert np.array_equal(empty["model"][name], value), name
reknit.close()
group.close()
"""


def run_ranks(hosts: Hosts, size: int, what: str, wait: str = "wait") -> None:
    """Run a job, every other rank on the other host."""
    ranks = []
    for rank in range(size):
        host = "ab"[rank % 2]
        bind = 'mount --bind "$1" /run/nfs && shift && exec "$@"'
        on_host = ["unshare", "--mount", "sh", "-c", bind, "sh", str(VIEWS / f"{host}-{hosts.version}")]
        order = [sys.executable, "-c", RANK, str(rank), str(size), hosts.server.name, what, wait]
        environment = os.environ | {"REKNIT_HOST": f"host {host}", "PYTHONPATH": str(ROOT / "src")}
        ranks.append(subprocess.Popen([*on_host, *order], env=environment, stderr=subprocess.PIPE, text=True))
    try:
        for process in ranks:
            _, reported = process.communicate(timeout=240)
            assert process.returncode == 0, reported
    finally:
        for process in ranks:
            process.kill()


def test_ranks_on_two_hosts_meet_in_a_folder(hosts: Hosts) -> None:
    """A rank finds a file of another rank long before the caches of NFS expire."""
    ours, others = FolderStore(hosts.b / "meet"), FolderStore(hosts.a / "meet")
    for k in range(20):
        with pytest.raises(DeadlineError):
            ours.get(f"key {k}", 0)
        others.set(f"key {k}", b"%d" % k)
        assert ours.get(f"key {k}", 10) == b"%d" % k
    assert others.get("key 0", 0) == b"0"


@pytest.mark.parametrize(("version", "wait"), [("v3", "background"), ("v4", "wait")], ids=["NFS 3", "NFS 4"])
def test_ranks_on_two_hosts_save_together_and_other_numbers_of_them_load(version: str, wait: str) -> None:
    hosts = Hosts(version)
    run_ranks(hosts, 4, "save", wait)
    run_ranks(hosts, 3, "load")
    run_ranks(hosts, 2, "again", wait)
    for host in (hosts.a, hosts.b):
        assert reknit.verify(host / "c").ok
