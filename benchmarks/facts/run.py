"""The fate of a checkpoint that is damaged, half replaced, or forged, with each library.

Each library saves and loads the same tensors in one process, by the calls that its documentation shows first:

- damage: one bit of the largest file is flipped; does a load raise, or return wrong values?
- kill: a checkpoint is replaced by a newer one of the same path, and the process is killed during that save,
  at `--kills` moments spread over its time.  How often is there a whole checkpoint afterwards?
- forgery: each file in turn is replaced by a pickle that makes a folder when it is loaded; is that code run?

Prints a table in Markdown.  Run: scripts/bench facts [--mb 256] [--kills 10]
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    Arrays = dict[str, np.ndarray[Any, Any]]

NAMES = ("torch.save", "DCP", "Orbax", "reknit")
NUM_ARRAYS = 8


def save(name: str, path: Path, arrays: Arrays) -> None:
    """Write a checkpoint to `path`, and replace an existing one."""
    if name == "torch.save":
        import torch

        torch.save({key: torch.from_numpy(array) for key, array in arrays.items()}, path)
    elif name == "DCP":
        import torch
        import torch.distributed.checkpoint as dcp

        dcp.save({key: torch.from_numpy(array) for key, array in arrays.items()}, checkpoint_id=path)
    elif name == "Orbax":
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, arrays, force=True)
    else:
        import reknit

        reknit.save(path, {"model": arrays}, overwrite=True)


def load(name: str, path: Path, like: Arrays) -> Arrays:
    """Return the arrays of a checkpoint."""
    if name == "torch.save":
        import torch

        return {key: tensor.numpy() for key, tensor in torch.load(path).items()}
    if name == "DCP":
        import torch
        import torch.distributed.checkpoint as dcp

        tensors = {key: torch.zeros(array.shape) for key, array in like.items()}
        dcp.load(tensors, checkpoint_id=path)
        return {key: tensor.numpy() for key, tensor in tensors.items()}
    if name == "Orbax":
        import orbax.checkpoint as ocp

        with ocp.StandardCheckpointer() as checkpointer:
            return {key: np.asarray(array) for key, array in checkpointer.restore(path, like).items()}
    import reknit

    arrays = {key: np.zeros_like(array) for key, array in like.items()}
    reknit.load(path, {"model": arrays})
    return arrays


def version(number: int, nbytes: int) -> Arrays:
    """Return the arrays of a version of the checkpoint: random, so that no library compresses them."""
    random = np.random.default_rng(number)
    return {
        f"w{each}": random.random(nbytes // NUM_ARRAYS // 4, dtype=np.float32) for each in range(NUM_ARRAYS)
    }


def outcome(name: str, path: Path, versions: list[Arrays]) -> str:
    """Load, and return which of the versions there is: "whole", "wrong values", or the error."""
    try:
        found = load(name, path, versions[0])
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the errors of DCP do not derive from Exception
        return f"error ({type(error).__name__})"
    same = (all(np.array_equal(found[key], each[key]) for key in each) for each in versions)
    return "whole" if any(same) else "wrong values"


def files(path: Path) -> list[Path]:
    """Return the files of a checkpoint, the largest last."""
    found = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sorted(found, key=lambda each: each.stat().st_size)


def damage(name: str, folder: Path, nbytes: int) -> str:
    """Flip a bit in the largest file, inside of an array, and load."""
    saved = version(1, nbytes)
    save(name, folder / "ckpt", saved)
    largest = files(folder / "ckpt")[-1]
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size * 3 // 7)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return outcome(name, folder / "ckpt", [saved])


def forgery(name: str, folder: Path, nbytes: int) -> str:
    """Put a pickle in the place of each file in turn, and load."""
    saved, mark, run = version(1, nbytes), folder / "ran", 0
    save(name, folder / "ckpt", saved)
    payload = pickle.dumps(_Payload(str(mark)))
    for file in files(folder / "ckpt"):
        before = file.read_bytes()
        file.write_bytes(payload)
        outcome(name, folder / "ckpt", [saved])
        file.write_bytes(before)
        if mark.exists():
            run += 1
            mark.rmdir()
    return "code is run" if run else "no code is run"


class _Payload:
    """A value whose pickle makes a folder when it is loaded."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self._path,)


def killed(name: str, folder: Path, nbytes: int, kills: int) -> str:
    """Kill a process while it replaces a checkpoint, at each of some moments, and load."""
    versions, outcomes = [version(1, nbytes), version(2, nbytes)], Counter[str]()
    for number in range(kills):
        shutil.rmtree(folder)
        folder.mkdir()
        command = [sys.executable, __file__, "--replace", name, str(folder / "ckpt"), str(nbytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            save_s = float(process.stdout.readline())
            time.sleep(save_s * (number + 0.5) / kills)
            process.kill()
        outcomes[outcome(name, folder / "ckpt", versions)] += 1
    return ", ".join(f"{count} of {kills} {what}" for what, count in outcomes.most_common())


def replace(name: str, path: Path, nbytes: int) -> None:
    """Save version 1 twice, print how long the second save took, and replace it by version 2."""
    one, two = version(1, nbytes), version(2, nbytes)
    save(name, path, one)
    begin = time.monotonic()
    save(name, path, one)
    print(time.monotonic() - begin, flush=True)
    save(name, path, two)
    time.sleep(60)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mb", type=int, default=256, help="size of the checkpoint that is killed")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--dir", type=Path, help="where to save; default: the folder for temporary files")
    parser.add_argument("--replace", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.replace is not None:
        replace(args.replace[0], Path(args.replace[1]), int(args.replace[2]))
        return
    print(
        "| library | a bit is flipped | killed while it replaces | a forged file |\n| --- | --- | --- | --- |"
    )
    for name in NAMES:
        cells = []
        for fact, more in (
            (damage, (1 << 24,)),
            (killed, (args.mb << 20, args.kills)),
            (forgery, (1 << 20,)),
        ):
            with tempfile.TemporaryDirectory(dir=args.dir) as folder:
                (Path(folder) / "here").mkdir()
                cells.append(fact(name, Path(folder) / "here", *more))  # type: ignore[operator]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
