"""Processes without torch.distributed meet through `reknit.connect`, and save and load together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
import trustme

import reknit
from reknit.comm import group as comm
from reknit.errors import CommError, DeadlineError, MissingExtraError, UsageError
from tests.ports import free_port
from tests.running.examples import at_night

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SOURCES = Path(__file__).parents[1] / "src"
TOKEN = "a secret for the ranks of a test"

# One rank of a job: it reads its task from its arguments, and prints its result or error.
RANK = """
import json, sys, time
from pathlib import Path
import numpy as np
import psutil
import reknit

order = json.loads(sys.argv[1])
if "tcp" in order["at"]:
    from reknit.comm.group import quietly
    with quietly():
        import reknit.comm.tree.over_grpc
import reknit.comm.tree.tree_group
print(json.dumps("ready"), flush=True)
sys.stdin.readline()

rank, size, path = order["rank"], order["size"], order["path"]
if order["tls"] is not None:
    order["options"]["tls"] = reknit.Tls(**order["tls"])
options = reknit.CommOptions(**{"connect_timeout_s": 60} | order["options"])
try:
    group = reknit.connect(rank, size, at=order["at"], token=order["token"], options=options)
except reknit.ReknitError as error:
    print(json.dumps([type(error).__name__, error.message]))
    sys.exit()
print(json.dumps(["connected", group.generation, group.topology.hosts]), flush=True)
if order["hang"]:
    time.sleep(600)

def state(fill):
    return {
        "model": {"w": np.arange(1000.0) * fill, "b": np.full((3, 5), fill, np.int32)},
        "own": reknit.PerRank({"rank": rank * fill}),
    }

full, empty = state(1), state(0)
comm = reknit.SaveOptions(comm=options)
reknit.save(path, full, step=3, wait=order["wait"], options=comm, group=group).result(60)
report = reknit.load(path, empty, options=reknit.LoadOptions(comm=options), group=group)
assert np.array_equal(empty["model"]["w"], full["model"]["w"])
assert np.array_equal(empty["model"]["b"], full["model"]["b"])
assert empty["own"].value == {"rank": rank}
assert "torch" not in sys.modules
if "tcp" not in order["at"]:  # a store at an address speaks gRPC, and so do ranks of several hosts
    agents = [Path(f"/proc/{child.pid}/maps").read_text() for child in psutil.Process().children()]
    assert "grpc" not in sys.modules and len(agents) == (not order["wait"])
    assert not any("grpc" in maps for maps in agents)
print(json.dumps(["loaded", report.step]))
reknit.close()
group.close()
"""


class Rank:
    """A process that is one rank."""

    def __init__(self, order: dict[str, Any], environment: dict[str, str]) -> None:
        self.number = order["rank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", RANK, json.dumps(order)],
            env=os.environ | {"PYTHONPATH": str(SOURCES)} | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def begin(self) -> None:
        """Let the rank begin: its deadlines do not depend on the time of its imports."""
        assert self.says() == "ready"
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def says(self) -> Any:
        """Return the next message of the rank."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"rank {self.number} ended:\n{self._process.communicate()[1]}"
        return json.loads(line)

    def ends(self) -> list[Any]:
        """Wait for a good end of the rank, and return its remaining messages."""
        out, err = self._process.communicate(timeout=120)
        assert self._process.returncode == 0, err
        return [json.loads(line) for line in out.splitlines()]

    def kill(self) -> None:
        """End the process at once, if it has not ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.communicate()


@contextmanager
def job(
    at: str,
    path: Path,
    size: int = 3,
    *,
    ranks: Sequence[int] | None = None,
    tokens: Sequence[str | None] = (),
    environment: Callable[[int], dict[str, str]] = lambda _: {},
    tls: dict[str, str] | None = None,
    hang: bool = False,
    wait: bool = True,
    **options: object,
) -> Iterator[list[Rank]]:
    """Start the ranks of a job, with `options` of its `CommOptions`, and leave none behind."""
    started = []
    try:
        for rank in range(size) if ranks is None else ranks:
            order = {
                "rank": rank,
                "size": size,
                "at": at,
                "path": str(path),
                "token": tokens[rank] if tokens else None,
                "tls": tls,
                "hang": hang,
                "wait": wait,
                "options": options,
            }
            started.append(Rank(order, environment(rank)))
        for rank_ in started:
            rank_.begin()
        yield started
    finally:
        for rank_ in started:
            rank_.kill()


def whole(ranks: Sequence[Rank]) -> list[Any]:
    """Return the first messages of the ranks, sent when they connected; all have saved and loaded."""
    said = [rank.ends() for rank in ranks]
    assert [last for _, last in said] == [["loaded", 3]] * len(ranks)
    assert all(first[0] == "connected" for first, _ in said)
    assert len({json.dumps(first) for first, _ in said}) == 1
    return list(said[0][0])


def test_ranks_of_one_host_that_meet_in_a_folder_save_and_load_without_grpc(tmp_path: Path) -> None:
    with job(f"file://{tmp_path}/meet", tmp_path / "checkpoint", wait=False) as ranks:
        assert whole(ranks)[2] == [0, 0, 0]


@at_night("ranks with certificates, and those with IPv6, meet at addresses")
def test_ranks_that_meet_at_an_address_save_and_load_together(tmp_path: Path) -> None:
    at = f"tcp://127.0.0.1:{free_port()}"
    with job(at, tmp_path / "checkpoint", tokens=[TOKEN] * 3, generation=77) as ranks:
        assert whole(ranks)[1] == 77


def test_ranks_of_several_hosts_meet_by_ipv6_and_their_agents_too(tmp_path: Path) -> None:
    try:
        port = free_port("::1")
    except OSError:
        pytest.skip("this machine has no IPv6")

    def on_own_host(rank: int) -> dict[str, str]:
        return {"REKNIT_HOST": f"host {rank // 2}", "REKNIT_TOKEN": TOKEN}

    path = tmp_path / "checkpoint"
    at = f"tcp://[::1]:{port}"
    with job(at, path, 4, environment=on_own_host, wait=False, bind="::1", fan_out=2) as ranks:
        assert whole(ranks)[2] == [0, 0, 1, 1]


def test_ranks_and_agents_with_certificates_save_and_load_together(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("ranks.example")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "certificate.pem")
    tls = {name: str(tmp_path / f"{name}.pem") for name in ("ca", "certificate", "key")}
    at, path = f"tcp://localhost:{free_port()}", tmp_path / "checkpoint"
    tls["server_name"] = "ranks.example"
    with job(at, path, tokens=[TOKEN] * 3, tls=tls, wait=False) as ranks:
        whole(ranks)


def test_a_rank_with_a_wrong_token_is_refused_and_missed(tmp_path: Path) -> None:
    at = f"tcp://127.0.0.1:{free_port()}"
    tokens = [TOKEN, TOKEN, TOKEN + "!"]
    with job(at, tmp_path / "checkpoint", tokens=tokens, connect_timeout_s=8) as ranks:
        first, second, third = (rank.ends() for rank in ranks)
    ((kind, message),) = third
    assert kind == "CommError"
    assert "refuses our token" in message
    for ((kind, message),) in (first, second):
        assert kind == "DeadlineError"
        assert "rank 2 did not come to the rendezvous of job 'job' within 8 s" in message


def test_a_job_that_was_killed_starts_again_in_the_same_place(tmp_path: Path) -> None:
    generations = []
    with job(str(tmp_path / "meet"), tmp_path / "checkpoint", hang=True) as ranks:
        generations += [rank.says()[1] for rank in ranks]
    # In the last start rank 0 comes last: the others find only the address of a dead run in the folder.
    with (
        job(str(tmp_path / "meet"), tmp_path / "checkpoint", ranks=[1, 2]) as others,
        job(str(tmp_path / "meet"), tmp_path / "checkpoint", ranks=[0]) as first,
    ):
        generations.append(whole(first + others)[1])
    assert generations == sorted(generations)
    assert len(set(generations)) == 2


def test_ranks_meet_in_a_store_of_torch() -> None:
    torch_dist: Any = dist
    server = torch_dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def be(rank: int) -> int:
        store = torch_dist.TCPStore("127.0.0.1", server.port, is_master=False)
        group = reknit.connect(rank, 2, at=store)
        try:
            comm.barrier(group, "once more", 30)
            return group.generation
        finally:
            group.close()

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(be, range(2)))) == 1


def test_a_job_of_one_rank_needs_nobody(tmp_path: Path) -> None:
    group = reknit.connect(0, 1, at=tmp_path / "meet", options=reknit.CommOptions(generation=5))
    assert (group.rank, group.size, group.generation) == (0, 1, 5)
    reknit.save(tmp_path / "checkpoint", {"item": {"x": 1}}, group=group)
    assert reknit.latest(tmp_path) is not None
    group = reknit.connect(0, 1, at=f"tcp://127.0.0.1:{free_port()}", token=TOKEN)
    group.close()


def test_wrong_calls_are_told_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rank": 2}, "rank must be within 0 .. size - 1, not 2 of 2"),
        ({"rank": "0"}, "rank is a whole number, not '0'"),
        ({"size": 1.5}, "size is a whole number, not 1.5"),
        ({"job": ""}, "job is a name, not ''"),
        ({"at": None}, "ranks cannot meet at None"),
        ({"at": ""}, "ranks cannot meet at ''"),
        ({"at": "s3://bucket/meet"}, "ranks cannot meet at 's3://bucket/meet'"),
        ({"at": "file://elsewhere/meet"}, "names no folder of this host"),
        ({"at": "tcp://node"}, "names no host and port"),
        ({"at": "tcp://node:29400"}, "need a token of 16 letters or more"),
        ({"at": "tcp://node:29400", "token": "short"}, "need a token of 16 letters or more"),
        ({"token": TOKEN}, "a token is for at='tcp://host:port' only"),
    ]
    for change, message in cases:
        monkeypatch.delenv("REKNIT_TOKEN", raising=False)
        arguments: dict[str, Any] = {"rank": 0, "size": 2, "at": tmp_path / "meet"} | change
        with pytest.raises(UsageError) as caught:
            reknit.connect(arguments.pop("rank"), arguments.pop("size"), **arguments)
        assert message in caught.value.message


def test_without_jax_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setitem(sys.modules, "jax._src", None)
    with pytest.raises(MissingExtraError, match="needs JAX"):
        reknit.connect(0, 2, at="jax://")


def test_the_place_of_a_group_that_failed_is_free_again(tmp_path: Path) -> None:
    port = free_port()
    for at, token in ((f"tcp://127.0.0.1:{port}", TOKEN), (tmp_path / "meet", None)):
        options = reknit.CommOptions(connect_timeout_s=0.2)
        with pytest.raises(DeadlineError, match="rank 1 did not come"):
            reknit.connect(0, 2, at=at, token=token, options=options)
    socket.create_server(("127.0.0.1", port)).close()


def test_a_folder_that_cannot_be_made_is_a_comm_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CommError, match="rendezvous folder cannot be made"):
        reknit.connect(0, 2, at=tmp_path / "file" / "meet")


def test_wrong_options_are_told_what_is_wrong() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"generation": -1}, "generation is a whole number"),
        ({"generation": True}, "generation is a whole number"),
        ({"generation": 1 << 63}, "generation is a whole number"),
        ({"bind": "10.0.0.1", "interface": "eth0"}, "give one of them"),
        ({"interface": ""}, "interface is a text"),
        ({"bind": 7}, "bind is a text"),
        ({"connect_timeout_s": 0}, "connect_timeout_s must be positive"),
    ]
    for options, message in cases:
        with pytest.raises(UsageError, match=message):
            reknit.CommOptions(**options)
