"""Real processes that read together, on one host and over several: their values, and the bytes of disks."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor import Shard as TensorShard
from torch.distributed.tensor import zeros as dtensor_zeros
from torch.nn.parallel import DistributedDataParallel

import reknit
from reknit.engine.sharing import shared_read
from reknit.storage.base import Reading
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.testing.faulty_storage import FaultyStorage
from tests.faults.test_load_exchange import reblock
from tests.ranks import run
from tests.running.examples import at_night, is_night
from tests.torchrun import pieces

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

WORLD = 4
HOSTS = {"one host": "aaaa", "two hosts": "aabb", "two mixed hosts": "abab", "four hosts": "abcd"}
MIB = 1 << 20
CELL = MIB // 4
Share = Literal["auto", "always", "never"]


class Counted(FaultyStorage):
    """A disk that is read in small pieces, and counts the bytes of tensors that are read."""

    cell_nbytes = 8 * MIB
    nbytes = 0
    lock = threading.Lock()

    @property
    def reading(self) -> Reading:
        """The sizes of reads, such that no unwanted bytes are read."""
        return Reading(0, 0.0, self.cell_nbytes)

    def read_into(self, path: str, start: int, buffers: list[memoryview]) -> None:
        super().read_into(path, start, buffers)
        self._count(path, sum(buffer.nbytes for buffer in buffers))

    def read_runs(self, path: str, starts: NDArray[Any], nbytes: int, buffer: memoryview) -> None:
        super().read_runs(path, starts, nbytes, buffer)
        self._count(path, len(starts) * nbytes)

    def _count(self, path: str, nbytes: int) -> None:
        with self.lock:
            Counted.nbytes += nbytes if path.endswith(".safetensors") else 0


def become(hosts: str, *, bucket_nbytes: int = 32 * MIB) -> int:
    """Set this rank's host, count its reads from ``counted://``, and return the rank."""
    rank = dist.get_rank()
    os.environ["REKNIT_HOST"] = hosts[rank]
    vars(shared_read)["BUCKET_NBYTES"] = bucket_nbytes
    register("counted", lambda url, durability: Counted(LocalStorage(url.removeprefix("counted://"))))
    return rank


def taken() -> int:
    """Return the number of bytes that all ranks have read from the disk since the last call."""
    total = torch.tensor([Counted.nbytes])
    dist.all_reduce(total)
    Counted.nbytes = 0
    return int(total.item())


def options(share: Share, **more: Any) -> reknit.LoadOptions:
    return reknit.LoadOptions(share=share, threads=2, timeout_s=60, **more)


# Everything on every rank.


def weights(*, zero: bool = False) -> dict[str, torch.Tensor]:
    """Return 10 MiB in tensors of all sizes."""
    generator = torch.Generator().manual_seed(5)
    sizes = [3 * MIB // 4, MIB // 2, 1, 7, 1000] + [MIB // 8 + k for k in range(10)]
    made = {f"w{k}": torch.randn(size, generator=generator) for k, size in enumerate(sizes)}
    return {name: torch.zeros_like(tensor) for name, tensor in made.items()} if zero else made


def load_replicated(path: str, hosts: str) -> list[tuple[bool, int, int, int, int]]:
    become(hosts, bucket_nbytes=MIB // 2)
    Counted.cell_nbytes = CELL
    expected = weights()
    answers = []
    cases: list[tuple[Share, Literal["off", "touched"]]] = [
        ("always", "off"), ("auto", "off"), ("always", "touched"), ("auto", "touched"), ("never", "off")
    ]  # fmt: skip
    for share, verify in cases:
        target = weights(zero=True)
        report = reknit.load(f"counted://{path}", {"model": target}, options=options(share, verify=verify))
        equal = all(torch.equal(target[name], tensor) for name, tensor in expected.items())
        answers.append((equal, taken(), report.nbytes_read, report.nbytes_received, report.nbytes_wanted))
    return answers


@pytest.mark.parametrize("hosts", HOSTS.values() if is_night() else ["aaaa", "abab"])
def test_replicas_take_each_byte_from_the_disk_once_over_many_exchanges(tmp_path: Path, hosts: str) -> None:
    reknit.save(tmp_path / "x", {"model": weights()})
    reblock(tmp_path / "x")
    total = sum(tensor.nbytes for tensor in weights().values())
    for answers in run(WORLD, load_replicated, str(tmp_path / "x"), hosts, timeout=100):
        assert [equal for equal, *_ in answers] == [True] * 5
        always_off, _, always_touched, _, never = answers
        assert always_off[1] == total
        assert always_touched[1] == total
        assert never[1] == WORLD * total
        for _, nbytes, read, received, wanted in (always_off, always_touched):
            assert abs(read - nbytes / WORLD) <= 2 * CELL
            assert received == nbytes - read
            assert wanted == total
        assert never[2:] == (total, 0, total)


# Very many small reads.


def load_every_second(path: str, hosts: str) -> tuple[bool, int, int]:
    become(hosts, bucket_nbytes=20_000)
    Counted.cell_nbytes = 4 << 10
    names = [f"t{k:04}" for k in range(0, 3_000, 2)]
    target = {name: torch.zeros(10) for name in names}
    how = options("always", verify="off", gap_nbytes=0)
    report = reknit.load(f"counted://{path}", {"model": target}, strict=False, options=how)
    equal = all(torch.equal(target[name], torch.arange(10.0) + int(name[1:])) for name in names)
    return equal, taken(), report.nbytes_read + report.nbytes_received


@at_night("thousands of small reads in world/test_sharing.py")
@pytest.mark.parametrize("hosts", HOSTS.values())
def test_an_exchange_of_hundreds_of_small_reads(tmp_path: Path, hosts: str) -> None:
    reknit.save(tmp_path / "x", {"model": {f"t{k:04}": torch.arange(10.0) + k for k in range(3_000)}})
    reblock(tmp_path / "x")
    for answer in run(WORLD, load_every_second, str(tmp_path / "x"), hosts, timeout=100):
        assert answer == (True, 1_500 * 40, 1_500 * 40)


# Parallel layouts.


def network() -> nn.Module:
    """Return the same weights on every rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 300), nn.LayerNorm(300))


def save_ddp(path: str) -> None:
    module = DistributedDataParallel(network())
    reknit.save(path, {"model": module}, options=reknit.SaveOptions(durability="process")).result()


def load_sharded(path: str, hosts: str, shape: tuple[int, ...]) -> list[tuple[list[str], int]]:
    """Load into FSDP2 over the last axis of a mesh, with replicas over the first of two."""
    become(hosts, bucket_nbytes=20_000)
    Counted.cell_nbytes = 64 << 10
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    expected = dict(network().named_parameters())
    answers = []
    for share, verify in (("always", "off"), ("auto", "touched")):
        module = network()
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
        fully_shard(module, mesh=mesh)
        how = options(share, verify=verify)  # type: ignore[arg-type]
        reknit.load(f"counted://{path}", {"model": module}, options=how)
        found = pieces.wholes(module.state_dict())
        wrong = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
        answers.append((wrong, taken()))
    return answers


MESHES = {"fsdp2": (4,), "hsdp": (2, 2)}
SPREAD = [(hosts, mesh) for hosts in ("aaaa", "aabb", "abab") for mesh in MESHES]
BY_DAY = [("aabb", "hsdp"), ("abab", "fsdp2")]
"""Each mesh: meshes decide the boxes that ranks want, hosts their readers."""


@pytest.mark.parametrize(("hosts", "mesh"), SPREAD if is_night() else BY_DAY)
def test_a_ddp_checkpoint_loads_into_shards_and_each_byte_leaves_the_disk_once(
    tmp_path: Path, hosts: str, mesh: str
) -> None:
    run(2, save_ddp, str(tmp_path / "x"))
    reblock(tmp_path / "x")
    nbytes = sum(parameter.nbytes for parameter in network().parameters())
    for (wrong, off), (wrong_too, _) in run(WORLD, load_sharded, str(tmp_path / "x"), hosts, MESHES[mesh]):
        assert wrong == wrong_too == []
        assert off == nbytes


PLACEMENTS: dict[str, Sequence[Placement]] = {
    "rows of replicas": (Replicate(), TensorShard(0)),
    "columns of replicas": (Replicate(), TensorShard(1)),
    "replicas of rows": (TensorShard(0), Replicate()),
    "columns of rows": (TensorShard(0), TensorShard(1)),
    "replicas": (Replicate(), Replicate()),
}
SHAPE = (301, 260)


def load_distributed(path: str, hosts: str) -> list[tuple[list[str], int]]:
    """Load into DTensors that are spread in any way over FSDP2 and tensor parallelism."""
    become(hosts, bucket_nbytes=20_000)
    Counted.cell_nbytes = 64 << 10
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    answers = []
    for share, verify in (("always", "touched"), ("always", "off"), ("auto", "off")):
        target = {
            name: dtensor_zeros(*SHAPE, device_mesh=mesh, placements=places)
            for name, places in PLACEMENTS.items()
        }
        how = options(share, verify=verify)  # type: ignore[arg-type]
        reknit.load(f"counted://{path}", {"model": target}, options=how)
        wrong = [name for name, t in pieces.wholes(target).items() if not torch.equal(t, matrix(name))]
        answers.append((wrong, taken()))
    return answers


def matrix(name: str) -> torch.Tensor:
    return torch.arange(301.0 * 260).reshape(SHAPE) + list(PLACEMENTS).index(name)


@pytest.mark.parametrize("hosts", ["aaaa", "aabb", "abab"] if is_night() else ["aabb"])
def test_replicas_of_tensor_parallel_shards_share_what_they_read(tmp_path: Path, hosts: str) -> None:
    reknit.save(tmp_path / "x", {"model": {name: matrix(name) for name in PLACEMENTS}})
    reblock(tmp_path / "x")
    for touched, off, auto in run(WORLD, load_distributed, str(tmp_path / "x"), hosts):
        assert touched[0] == off[0] == auto[0] == []
        assert touched[1] == 5 * matrix("replicas").nbytes
        # If many halves of rows lie in a cell, each rank reads its own alone; one such tensor has replicas.
        nbytes = matrix("replicas").nbytes
        assert 5 * nbytes <= off[1] <= 6 * nbytes
