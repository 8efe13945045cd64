"""Exports to Orbax, in a process of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import torch

import reknit
from reknit.interop.states.orbax_export import export_orbax
from tests.interop.checkpoints import every_dtype, random_bits, save_training

LACKING = ("complex32", "float8_e8m0fnu", "float4_e2m1fn_x2")


def restored(path: Path) -> Any:
    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(path)


def check_every_dtype(folder: str) -> None:
    state = every_dtype(without=LACKING)
    reknit.save(f"{folder}/c", {"model": state})
    report = export_orbax(f"{folder}/c", f"{folder}/out", verify=True)
    assert report.num_tensors == 2 * len(state)
    assert set(report.left_out) == {f"model.{dtype}.none" for dtype in state}
    found = restored(Path(folder, "out"))["model"]
    for dtype, tensors in state.items():
        for name in ("matrix", "scalar"):
            tensor = tensors[name]
            array = np.asarray(found[dtype][name])
            assert (str(array.dtype), array.shape) == (dtype, tuple(tensor.shape))
            data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            assert array.tobytes() == data.tobytes(), dtype
    assert sorted(path.name for path in Path(folder).iterdir()) == ["c", "out"]


def check_training(folder: str) -> None:
    _, optimizer = save_training(Path(folder, "c"))
    report = export_orbax(f"{folder}/c", f"{folder}/out", verify=True)
    assert {"rng", "values.none", "values.set"} <= set(report.left_out)
    found = restored(Path(folder, "out"))
    assert found["values"]["epoch"] == 3
    assert found["values"]["text"] == "x"
    state = next(iter(optimizer.state.values()))
    assert np.array_equal(found["optimizer"]["state"]["0.weight"]["exp_avg"], state["exp_avg"].numpy())
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.1


def check_refusals(folder: str) -> None:
    for dtype in LACKING:
        reknit.save(f"{folder}/{dtype}", {"model": {"w": random_bits(dtype, (2,))}})
        raised(reknit.MismatchError, f"{folder}/{dtype}", f"{folder}/out")
    reknit.save(f"{folder}/c", {"model": {"w": torch.zeros(1000)}})
    (file,) = Path(folder, "c", "model").glob("*")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    raised(reknit.CorruptError, f"{folder}/c", f"{folder}/out")
    assert sorted(path.name for path in Path(folder).iterdir()) == sorted(["c", *LACKING])


def raised(kind: type[Exception], *arguments: str) -> None:
    try:
        export_orbax(*arguments)
    except kind:
        return
    raise AssertionError(f"the export raised no {kind.__name__}")
