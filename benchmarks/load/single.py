"""One process and a whole model: reknit, safetensors, and torch DCP."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.load.sharded import both
from benchmarks.load.states import full, model_shapes, nbytes
from benchmarks.rivals import waiting
from benchmarks.timing import Contents, copier, gib_of, tensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.timing import Bench


def part(bench: Bench, gib: float, quick: bool) -> dict[str, Any]:
    """Measure a model that one process holds whole."""
    shapes = model_shapes(gib)
    state = {"model": {fqn: full(fqn, shape) for fqn, shape in shapes.items()}}
    result: dict[str, Any] = {
        "gib": gib_of(nbytes(shapes)),
        "tensors": len(shapes),
        "memcpy_s": bench.timed("memcpy", copier(tensors(state)), repeat=8),
        "cold": {},
        "warm": {},
    }

    contents = Contents(bench, state)

    def compete(name: str, path: str, load: Callable[[], Any], in_place: bool = True) -> None:
        def measured() -> dict[str, Any]:
            checked = contents.checked(load) if in_place else load
            return dict(zip(("cold", "warm"), both(bench, name, path, checked), strict=True))

        found = bench.attempt(name, measured)
        for kind in ("cold", "warm"):
            result[kind][name] = found.get(kind, found)

    _reknit(bench, state, compete)
    _safetensors(bench, state, compete)
    for mode in waiting.QUICK_MODES if quick else (waiting.APART, *waiting.SAFETENSORS):
        path = f"{bench.folder}/{mode.stored}"
        mode.save(path, state)
        bench.settle()
        compete(mode.name, path, partial(mode.load, path, state))
        bench.drop(path)
    for kind in ("cold", "warm"):
        for who, begin in (("safetensors", "load_file"), ("dcp", "DCP")):
            times = [m["s"] for k, m in result[kind].items() if k.startswith(begin) and "s" in m]
            result[kind][f"{who}_best_s"] = min(times, default=None)
    return result


def _reknit(bench: Bench, state: dict[str, Any], compete: Callable[..., None]) -> None:
    import reknit

    path = f"{bench.folder}/reknit"
    reknit.save(path, state).result()
    bench.settle()
    compete("reknit", path, lambda: reknit.load(path, state))
    plain = reknit.LoadOptions(verify="off")
    compete("reknit, not verified", path, lambda: reknit.load(path, state, options=plain))
    bench.drop(path)


def _safetensors(bench: Bench, state: dict[str, Any], compete: Callable[..., None]) -> None:
    from safetensors.torch import save_file

    folder = f"{bench.folder}/safetensors"
    os.makedirs(folder)
    file = f"{folder}/model.safetensors"
    save_file(state["model"], file)
    bench.settle()
    for name, load in waiting.safetensors_ways(file, state["model"]).items():
        compete(name, folder, load, in_place=name != waiting.NEW_TENSORS)
    bench.drop(folder)
