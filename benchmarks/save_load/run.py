"""How near to the disk do save and load come?  reknit, torch DCP with its best settings, and raw I/O, in one
run.

Every rank holds an equal part of one model's state as FSDP2 would: bf16 parameters, fp32 Adam moments and
master copy, all DTensors sharded by rows.  Raw write is write + fsync, raw read is a cold read (page cache
dropped), each the best of one and four threads, of the same bytes per rank.  Prints JSON; times are the best
of `--repeat`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PIECE = 8 << 20


def launch(args: argparse.Namespace) -> int:
    """Start one process per rank and pass on what rank 0 prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = dict(os.environ, WORLD_SIZE=str(args.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    common.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    folder = tempfile.mkdtemp(prefix="reknit-bench-", dir=args.dir)
    command = [sys.executable, __file__, *sys.argv[1:], "--dir", folder]
    ranks = [
        subprocess.Popen(
            command, env=dict(common, RANK=str(r), LOCAL_RANK=str(r), LOCAL_WORLD_SIZE=str(args.world))
        )
        for r in range(args.world)
    ]
    try:
        return max(rank.wait(timeout=args.timeout) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
        shutil.rmtree(folder, ignore_errors=True)


def build(gib: float, world: int) -> dict[str, Any]:
    """Return a transformer-like state of `gib` GiB over all ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    hidden = 1024 if gib >= 0.05 else 64  # or a single layer would be larger than that
    shapes: dict[str, tuple[int, ...]]
    shapes = {"wq": (hidden, hidden), "wk": (hidden, hidden), "wv": (hidden, hidden), "wo": (hidden, hidden)}
    shapes |= {"w1": (4 * hidden, hidden), "w2": (hidden, 4 * hidden), "norm1": (hidden,), "norm2": (hidden,)}
    per_layer = sum(torch.Size(s).numel() for s in shapes.values()) * 14
    layers = max(1, round(gib * (1 << 30) / per_layer))

    def tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        local = torch.empty((shape[0] // world, *shape[1:]), dtype=dtype).normal_()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    model, moments = {}, {}
    for layer in range(layers):
        for name, shape in shapes.items():
            fqn = f"layers.{layer}.{name}"
            model[fqn] = tensor(shape, torch.bfloat16)
            moments[fqn] = {k: tensor(shape, torch.float32) for k in ("exp_avg", "exp_avg_sq", "master")}
    return {"model": model, "optimizer": {"state": moments}}


def tensors(state: Any) -> list[Any]:
    return [t for v in state.values() for t in tensors(v)] if isinstance(state, dict) else [state.to_local()]


def evict(folder: str) -> None:
    """Drop a folder's files from the page cache."""
    for path in Path(folder).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def raw_write(path: str, data: memoryview, threads: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda k: os.pwrite(fd, data[k : k + PIECE], k), range(0, len(data), PIECE)))
    os.fsync(fd)
    os.close(fd)


def raw_read(path: str, data: memoryview, threads: int) -> None:
    fd = os.open(path, os.O_RDONLY)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda k: os.preadv(fd, [data[k : k + PIECE]], k), range(0, len(data), PIECE)))
    os.close(fd)


class Bench:
    """One rank's side of every measurement: all ranks start together, and the slowest counts."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.args, self.dist = args, dist
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def best(self, name: str, action: Any, before: Any = None) -> float:
        """Return the best time of the slowest rank."""
        import torch

        times = []
        for k in range(self.args.repeat):
            if before is not None:
                before(k)
            self.dist.barrier()
            begin = time.perf_counter()
            action(k)
            taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
            self.dist.all_reduce(taken, self.dist.ReduceOp.MAX)
            times.append(float(taken))
        if self.rank == 0:
            print(
                f"{name:24s} best {min(times):6.2f} s  median {statistics.median(times):6.2f} s",
                file=sys.stderr,
            )
        return min(times)

    def cold(self, folder: str) -> Any:
        """Return what drops a folder from the page cache before each repeat."""
        return lambda k: self.on_root(lambda: evict(folder))

    def on_root(self, action: Any) -> None:
        if self.rank == 0:
            action()
        self.dist.barrier()


def measure_raw(bench: Bench, folder: str, nbytes: int) -> dict[str, Any]:
    """Return what the disk does with the same bytes and no checkpoint."""
    os.makedirs(folder, exist_ok=True)
    file = f"{folder}/{bench.rank}"
    data = memoryview(bytearray(nbytes))

    def fresh(k: int) -> None:
        if os.path.exists(file):
            os.unlink(file)

    def write(threads: int) -> float:
        return bench.best(f"raw write, {threads} threads", lambda k: raw_write(file, data, threads), fresh)

    def read(threads: int) -> float:
        return bench.best(
            f"raw read, {threads} threads", lambda k: raw_read(file, data, threads), bench.cold(folder)
        )

    return {"raw_write_s": min(write(1), write(4)), "raw_read_s": min(read(1), read(4))}


def run(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    import reknit

    torch.set_num_threads(1)
    bench = Bench(args)
    state = build(args.gib, bench.world)
    nbytes = sum(t.nbytes for t in tensors(state))
    folder = args.dir

    def clean(name: str) -> Any:
        return lambda k: bench.on_root(lambda: shutil.rmtree(f"{folder}/{name}", ignore_errors=True))

    result = measure_raw(bench, f"{folder}/raw", nbytes)

    clean("raw")(0)
    ours, theirs = f"{folder}/reknit", f"{folder}/dcp"
    reports: dict[str, Any] = {}

    def save(k: int) -> None:
        reports["save"] = reknit.save(ours, state).result()

    def load(k: int) -> None:
        reports["load"] = reknit.load(ours, state)

    result["save_s"] = bench.best("reknit save", save, clean("reknit"))
    result["load_s"] = bench.best("reknit load", load, bench.cold(ours))
    for name in ("save", "load"):
        seconds: dict[str, float] = {}
        for record in reports[name].phases:
            seconds[record.phase] = round(seconds.get(record.phase, 0.0) + record.seconds, 3)
        result[f"{name}_phases_rank0_s"] = seconds
    clean("reknit")(0)
    if not args.no_dcp:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)

        def dcp_save(k: int) -> None:
            writer = dcp.FileSystemWriter(theirs, thread_count=args.dcp_threads, sync_files=True)
            dcp.save(state, storage_writer=writer, planner=planner)

        result["dcp_save_s"] = bench.best("DCP save", dcp_save, clean("dcp"))
        result["dcp_load_s"] = bench.best(
            "DCP load", lambda k: dcp.load(state, checkpoint_id=theirs), bench.cold(theirs)
        )
        clean("dcp")(0)
    result |= {
        "world": bench.world,
        "gib_per_rank": round(nbytes / (1 << 30), 3),
        "tensors_per_rank": len(tensors(state)),
        "save_over_raw_write": round(result["save_s"] / result["raw_write_s"], 3),
        "load_over_raw_read": round(result["load_s"] / result["raw_read_s"], 3),
    }
    if not args.no_dcp:
        result["dcp_save_over_save"] = round(result["dcp_save_s"] / result["save_s"], 3)
        result["dcp_load_over_load"] = round(result["dcp_load_s"] / result["load_s"], 3)
    if bench.rank == 0:
        print(json.dumps(result, indent=1))
    bench.dist.barrier()
    bench.dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--gib", type=float, default=2.0, help="GiB of state over all ranks")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--dcp-threads", type=int, default=2)
    parser.add_argument("--no-dcp", action="store_true")
    parser.add_argument("--dir", default=".", help="folder on the disk to measure")
    parser.add_argument("--timeout", type=float, default=900.0)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        return launch(args)
    threading.Timer(args.timeout, lambda: os._exit(3)).start()
    run(args)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
