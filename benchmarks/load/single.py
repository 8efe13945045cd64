"""One process and a whole model: reknit, safetensors, and torch DCP; and the same onto a GPU."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.load.sharded import both
from benchmarks.load.states import full, model_shapes, nbytes
from benchmarks.rivals import waiting
from benchmarks.timing import Contents, copier, gib_of, pinned, raw_read, tensors

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


def gpu_part(bench: Bench, gib: float) -> dict[str, Any]:
    """Measure a load onto a GPU: do reading and the copy over the bus overlap?"""
    import torch

    import reknit

    if not torch.cuda.is_available():
        return {"skipped": "no GPU"}
    shapes = model_shapes(gib)
    host = {"model": {fqn: full(fqn, shape) for fqn, shape in shapes.items()}}
    device = {"model": {fqn: tensor.cuda() for fqn, tensor in host["model"].items()}}
    path = f"{bench.folder}/reknit"
    reknit.save(path, host).result()
    bench.settle()
    reused = {fqn: tensor.pin_memory() for fqn, tensor in host["model"].items()}

    def over_the_bus() -> None:
        for fqn, tensor in reused.items():
            device["model"][fqn].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()

    def load(state: dict[str, Any]) -> None:
        reknit.load(path, state)
        torch.cuda.synchronize()

    contents = Contents(bench, device)
    over_the_bus()  # since the first use of a GPU takes long
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "gib": gib_of(nbytes(shapes))}
    result["host_to_device_s"] = bench.timed("host to device", over_the_bus)
    files = [os.path.join(top, name) for top, _, names in os.walk(path) for name in names]
    files = [name for name in files if name.endswith(".safetensors")]
    memory = pinned(max(map(os.path.getsize, files)))
    for kind, before in (("cold", lambda: bench.cold(path)), ("warm", lambda: bench.warm(path))):
        raw = [
            bench.timed(
                f"raw read, {threads} threads, {kind}",
                partial(raw_read, files, memory, threads, direct=False),
                before,
            )
            for threads in (1, 2, 4)
        ]
        found = {"raw_read_s": min(raw)}
        found["to_host_s"] = bench.timed(f"reknit to the host, {kind}", lambda: load(host), before)
        found["to_device_s"] = bench.timed(
            f"reknit to the device, {kind}", contents.checked(lambda: load(device)), before
        )
        found["slower_half_s"] = max(found["to_host_s"], result["host_to_device_s"])
        found["one_after_another_s"] = round(found["to_host_s"] + result["host_to_device_s"], 4)
        result[kind] = found
    bench.drop(path)
    return result
