"""SIGKILL at every storage operation of a save leaves the old checkpoint or the new one, whole.

Each save runs in a fresh interpreter (a fork of one that has only imported), and dies at its k-th operation.
By day k is each second number.
A second interpreter then checks the files.  A save that "links" takes over the frozen layer of a checkpoint
beside it, one that "overwrites" replaces a checkpoint.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.running.examples import is_night

if TYPE_CHECKING:
    from pathlib import Path

SWEEP = """
import json, os, shutil, sys
import numpy as np
import reknit
from reknit.storage.local.store import LocalStorage
from reknit.storage.registry import register
from reknit.testing.faulty_storage import Fault, FaultyStorage
from tests.warm.ahead import WITH_TORCH, WITHOUT_TORCH, import_all

root, durability, mode, every = sys.argv[1:]
overwrite = mode == "overwrites"
kept, kill_at = [], [0]
import_all(*WITHOUT_TORCH)  # once here, and not in every fork
if mode == "links":
    import torch
    import_all(*WITH_TORCH)

def faulty(url, durability):
    plan = [Fault("kill", kill_at[0])] if kill_at[0] else []
    store = FaultyStorage(LocalStorage(url.removeprefix("faulty://"), durability=durability), plan=plan)
    kept.append(store)
    return store

register("faulty", faulty)

def state(value):
    weights = {f"layer.{n}": np.full((40, 5), value + n, np.float32) for n in range(4)}
    items = {"model": weights, "extra": {"epoch": value, "rng": reknit.PerRank([value])}}
    if mode == "links":
        items["base"] = layer = torch.nn.Linear(512, 512, bias=False).requires_grad_(False)
        layer.weight.fill_(1.5)
    return items

def child(action):
    # A forked child that has no threads behind it; its answer comes back through a pipe.
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            answer = action()
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    data = b""
    while piece := os.read(read, 65536):
        data += piece
    os.close(read)
    _, status = os.waitpid(pid, 0)
    return json.loads(data) if data else {"signal": os.WTERMSIG(status)}

options = reknit.SaveOptions(durability=durability, threads=1)

def save(path, value, k, **more):
    if mode == "links":
        kill_at[0] = 0
        reknit.save("faulty://" + path + ".before", state(1), options=options, overwrite=True)
    kill_at[0] = k
    reknit.save("faulty://" + path, state(value), options=options, **more)
    return {"operations": [operation.name for operation in kept[-1].operations]}

def look(path):
    target = state(-1)
    try:
        reknit.load(path, target)
    except reknit.CheckpointNotFoundError:
        return {"found": None}
    value = target["extra"]["epoch"]
    expected = state(value)
    for name, array in expected["model"].items():
        assert target["model"][name].tobytes() == array.tobytes(), name
    if mode == "links":
        assert torch.equal(target["base"].weight, expected["base"].weight)
    problems = reknit.verify(path, "data").problems
    return {"found": value, "problems": list(problems)}

outcomes, k = [], 1
assert "operations" in child(lambda: save(f"{root}/old", 1, 0))
while True:
    path = f"{root}/{k:03d}"
    if overwrite:
        shutil.copytree(f"{root}/old", path)
    result = child(lambda: save(path, 2, k, overwrite=overwrite))
    seen = child(lambda: look(path))
    outcomes.append({"k": k, "result": result, "seen": seen})
    if len(outcomes) % 4 == 0 or "operations" in result:
        again = child(lambda: save(path, 3, 0, overwrite=True))
        after = child(lambda: look(path))
        leftovers = child(lambda: {"files": sorted(f.path for f in LocalStorage(path).list())})
        outcomes[-1].update(again=again, after=after, **leftovers)
    if "operations" in result:
        break
    k += int(every)
print(json.dumps(outcomes))
"""


@pytest.mark.parametrize(("durability", "mode"), [("process", "links"), ("power", "overwrites")])
def test_a_save_killed_at_any_operation_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, durability: str, mode: str
) -> None:
    command = [sys.executable, "-c", SWEEP, str(tmp_path), durability, mode, "1" if is_night() else "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) > 8, "the sweep reached every operation of a save"
    old = 1 if mode == "overwrites" else None
    files = 6 if mode == "links" else 5
    found = []
    for outcome in outcomes:
        killed = outcome["result"] == {"signal": 9}
        assert killed or "operations" in outcome["result"], outcome
        assert outcome["seen"].get("problems", []) == [], outcome
        assert outcome["seen"]["found"] in (old, 2), outcome
        found.append(outcome["seen"]["found"])
        if "again" not in outcome:
            continue
        assert "operations" in outcome["again"], outcome
        assert outcome["after"] == {"found": 3, "problems": []}, outcome
        # The note of a removal that was killed counts a minute more.
        left = [file for file in outcome["files"] if not file.startswith(".notes/removal.")]
        assert len(left) == files, "the next save clears away the files of the killed one"
    assert found == sorted(found, key=lambda value: value == 2), "once the new one is there it stays"
    assert ("copy_from" in outcomes[-1]["result"]["operations"]) == (mode == "links")
    assert found[0] == old
    assert found[-1] == 2
