"""torchrun starts all ranks again when one dies, while agents of the dead are still at work."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import reknit
from tests.running.examples import at_night

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 200.0

TRAIN = """
import os, signal, sys, threading
import torch
import torch.distributed as dist
import reknit
from reknit.testing.faulty_storage import Fault
from tests.storage.killpoint import faulty_url, register_faulty

register_faulty()
root = sys.argv[1]
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
options = reknit.SaveOptions(durability="process", threads=1, timeout_s=60)
state = {"x": torch.full((1000,), 1.0), "mine": reknit.PerRank(rank)}
if attempt == 0:
    reknit.save(root + "/step_1", state, step=1, options=options)
    state["x"].fill_(2.0)
    url = faulty_url(root + "/step_2", Fault("stall", 1, "commit"), gate=root + ".gate")
    reknit.save(url, state, step=2, wait=False, options=options)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else signal.pause()
if rank == 0:
    print("before:", reknit.latest(root), flush=True)
    threading.Timer(0.5, lambda: open(root + ".gate", "w").close()).start()
newest = reknit.latest(root, pending="wait", timeout_s=60)
report = reknit.load(newest, state, options=reknit.LoadOptions(timeout_s=60))
assert (state["x"] == 2.0).all() and state["mine"].value == rank
state["x"].fill_(3.0)
reknit.save(root + "/step_3", state, step=3, options=options, wait=False).result(60)
print("after:", newest, flush=True)
assert reknit.close()
dist.destroy_process_group()
"""


@at_night("five processes import torch, one after another; tests/faults/test_restart.py has the rest")
def test_a_run_that_torchrun_starts_again_goes_on_from_what_agents_of_the_dead_one_commit(
    tmp_path: Path,
) -> None:
    script, root = tmp_path / "train.py", tmp_path / "steps"
    script.write_text(TRAIN)
    options = ["--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *options, str(script), str(root)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"before: {root}/step_1" in done.stdout
    assert done.stdout.count(f"after: {root}/step_2") == 2
    assert f"{root}/step_2/pending." in done.stderr, "the warning names the save that may yet commit"
    assert all(reknit.verify(root / f"step_{step}", "data").ok for step in (1, 2, 3))
