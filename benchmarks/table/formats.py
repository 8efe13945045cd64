"""The speed of reads and imports of checkpoints of other programs, beside their own libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rivals import waiting
from benchmarks.table.rounds import Contestant, Row, in_turn
from benchmarks.timing import pinned, raw_read
from reknit.frameworks.custom import Held, registered

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.table.sizes import Sizes
    from benchmarks.timing import Bench

    Tensors = dict[str, Any]

EACH_MIB, WIDTH, FILES = 16, 4096, 4
PARTS = 8
"""A slice is one of so many equal parts of each tensor, by its first dimension."""


def rows(bench: Bench, sizes: Sizes) -> list[Row]:
    """Measure loads of whole tensors and of slices from a warm cache, and an import."""
    import torch

    each = min(EACH_MIB, sizes.formats_mib)
    names = [f"layers.{number}.weight" for number in range(sizes.formats_mib // each)]
    state = {name: torch.randn((each << 20) // 4 // WIDTH, WIDTH) for name in names}
    os.makedirs(bench.folder, exist_ok=True)
    found = [
        *_of_dcp(bench, sizes, state),
        *_of_hugging_face(bench, sizes, state),
        *_imported(bench, sizes.import_mib),
    ]
    bench.drop(bench.folder)
    return found


def _target(state: Tensors, parts: int) -> Tensors:
    """Return memory for a part of each tensor, or for all of it."""
    return {name: one.new_empty(one.shape[0] // parts, one.shape[1]) for name, one in state.items()}


class Part:
    """The first rows of each tensor, as a rank of a sharded job would hold them."""

    def __init__(self, state: Tensors, part: Tensors) -> None:
        self.held = [
            Held(name, tuple(state[name].shape), "float32", (0, 0), tuple(one.shape), one)
            for name, one in part.items()
        ]


class PartFramework:
    """The adapter of `Part`."""

    def matches(self, value: Any) -> bool:
        return isinstance(value, Part)

    def holdings(self, value: Any, rank: int, size: int) -> list[Held]:
        held: list[Held] = value.held
        return held

    def restore(self, value: Any, held: Any, values: Any) -> None: ...


def _rows(
    bench: Bench,
    sizes: Sizes,
    state: Tensors,
    folder: str,
    *,
    what: str,
    theirs: tuple[str, Callable[[Tensors], Any], Callable[[Tensors], Any]],
) -> list[Row]:
    """Return the rows of loads of whole tensors and of slices; `theirs` has the other library's loads."""
    import torch

    import reknit

    rival, load, load_part = theirs
    whole, part = _target(state, 1), _target(state, PARTS)
    report = reknit.load(folder, {"model": whole})
    assert all(torch.equal(whole[name], one) for name, one in state.items())
    files = [str(path) for path in Path(folder).iterdir()]
    memory = pinned(max(map(os.path.getsize, files)))

    def ours_of_part(_: int) -> None:
        with registered(PartFramework()):
            reknit.load(folder, {"model": Part(state, part)})

    name = f"{what}, {sizes.formats_mib} MiB"
    full = [
        Contestant("reknit", "ours", lambda _: reknit.load(folder, {"model": whole})),
        Contestant(rival, "rival", lambda _: load(whole)),
        Contestant("raw read", "limit", lambda _: raw_read(files, memory, 2, direct=False)),
    ]
    slices = [
        Contestant("reknit", "ours", ours_of_part),
        Contestant(rival, "rival", lambda _: load_part(part)),
    ]
    read = Row(f"{name}: bytes read / needed", "x")
    read.add("reknit", "ours", report.nbytes_read / report.nbytes_wanted)
    read.add("bytes needed", "limit", 1.0)
    return [
        in_turn(bench, Row(f"{name}: load", "s"), full, sizes.repeat),
        in_turn(bench, Row(f"{name}: load of 1/{PARTS} of each tensor", "s"), slices, sizes.repeat),
        read,
    ]


def _of_dcp(bench: Bench, sizes: Sizes, state: Tensors) -> list[Row]:
    folder = f"{bench.folder}/dcp"
    waiting.OWN.save(folder, {"model": state})

    def load_part(part: Tensors) -> None:
        flat = {f"model.{name}": one for name, one in part.items()}
        waiting.APART.load(folder, flat, planner=waiting.PartPlanner((0, 0)))

    load = ("DCP", lambda whole: waiting.OWN.load(folder, {"model": whole}), load_part)
    return _rows(bench, sizes, state, folder, what="a folder of DCP", theirs=load)


def _of_hugging_face(bench: Bench, sizes: Sizes, state: Tensors) -> list[Row]:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    folder, names = f"{bench.folder}/hf", list(state)
    os.makedirs(folder)
    where: dict[str, str] = {}
    for number in range(min(FILES, len(names))):
        part = names[number::FILES]
        save_file({name: state[name] for name in part}, f"{folder}/model-{number}.safetensors")
        where |= dict.fromkeys(part, f"model-{number}.safetensors")
    _index(folder, where)
    files = [f"{folder}/{file}" for file in sorted(set(where.values()))]

    def load(whole: Tensors) -> None:
        for file in files:
            for name, one in load_file(file).items():
                whole[name].copy_(one)

    def load_part(part: Tensors) -> None:
        for file in files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it is not a dict
                    part[name].copy_(opened.get_slice(name)[: part[name].shape[0]])

    theirs = ("safetensors and a copy", load, load_part)
    return _rows(bench, sizes, state, folder, what="a folder of Hugging Face", theirs=theirs)


def _index(folder: str, where: dict[str, str]) -> None:
    Path(folder, "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


IMPORT = """
import sys
from reknit.cli.main import main
status = main(["import", *sys.argv[1:]])
with open("/proc/self/status") as file:
    print(next(line.split()[1] for line in file if line.startswith("VmHWM")))
sys.exit(status)
"""


def _imported(bench: Bench, mib: int) -> list[Row]:
    """Import a large folder of Hugging Face in a process of its own."""
    import numpy as np
    from safetensors.numpy import save_file

    folder = f"{bench.folder}/large"
    os.makedirs(folder)
    where: dict[str, str] = {}
    count = max(mib // 512, 1)
    data = np.random.default_rng(0).random((mib << 20) // count // 8 // 8)
    for number in range(count):
        file = f"model-{number}.safetensors"
        part = {f"layers.{number}.{each}": data + each for each in range(8)}
        save_file(part, f"{folder}/{file}")
        where |= dict.fromkeys(part, file)
    _index(folder, where)
    command = [sys.executable, "-c", IMPORT, folder, f"{bench.folder}/imported"]
    begin = time.perf_counter()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    seconds = Row(f"import of {mib} MiB of Hugging Face", "s")
    seconds.add("reknit", "ours", time.perf_counter() - begin)
    memory = Row(f"import of {mib} MiB of Hugging Face: memory", "MiB")
    memory.add("reknit", "ours", int(done.stdout.split()[-1]) >> 10)
    return [seconds, memory]
