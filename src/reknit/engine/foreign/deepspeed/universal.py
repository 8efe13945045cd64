"""Universal checkpoints of DeepSpeed: a file for each state of each parameter."""

from __future__ import annotations

from functools import partial
from itertools import chain
from math import prod
from typing import Any

from reknit.engine.foreign.deepspeed.files import (
    DeepSpeedFiles,
    add_rest,
    add_weights,
    open_file,
    shapes_of,
    weights_of,
)
from reknit.engine.foreign.deepspeed.partitions import (
    OPTIMIZER,
    Shapes,
    add_state_value,
    add_whole,
    bytes_of,
    options_by_flat,
)
from reknit.engine.foreign.entries import MODEL, ForeignEntries, named
from reknit.engine.foreign.torch_files import TorchFile, add_extent
from reknit.errors import CorruptError, FormatError
from reknit.format.foreign.torch_values import TensorView
from reknit.types.box import Box
from reknit.types.shard import TensorSpec

_EXCHANGED = (
    "if a job has round_robin_gradients, DeepSpeed's converter to universal checkpoints gives parameters the "
    "states of each other; read the folder that was converted"
)


def add_universal(entries: ForeignEntries, files: DeepSpeedFiles, models: list[TorchFile]) -> None:
    """Add a universal checkpoint, which has a file for each state of each parameter."""
    state = models[0].value
    if "num_experts" in state or state.get("module") is None:
        raise FormatError("DeepSpeed's converter to universal checkpoints leaves out experts and layers")
    weights = weights_of(models[0], state["module"])
    common, shapes = open_file(entries, "zero/optimizer_state.pt"), shapes_of(state)
    if _is_exchanged(state, common.value.get("partition_count"), shapes):
        entries.unread(OPTIMIZER, [], _EXCHANGED)
    else:
        _add_states(entries, files, common, shapes, weights)
    if any(rank == 0 for rank, _ in files.models):
        add_rest(entries, models)
    else:
        add_weights(entries, models[0], weights)


def _is_exchanged(state: dict[str, Any], counts: Any, shapes: list[Shapes]) -> bool:
    """Return whether partitions have parameters in another order than DeepSpeed's converter assumes."""
    config = state.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    is_dealt = isinstance(zero, dict) and zero.get("round_robin_gradients") is True
    pairs = zip(counts, shapes, strict=False) if isinstance(counts, list) else ()
    return is_dealt and any(1 < count < len(members) for count, members in pairs)


def _add_states(
    entries: ForeignEntries,
    files: DeepSpeedFiles,
    common: TorchFile,
    shapes: list[Shapes],
    in_module: dict[str, Any],
) -> None:
    """Add the states and options of all parameters of a universal checkpoint."""
    options = options_by_flat(common.value.get("param_groups"))
    of_3 = common.value.get("optimizer_state_dict")
    every = {"fp32", *(key for name in chain(*shapes) for key in files.universal.get(name, ()))}
    entries.inline = partial(bytes_of, entries.storage, common)
    for group, members in enumerate(shapes):
        steps = of_3["state"].get(group, {}).get("step") if isinstance(of_3, dict) else None
        for name, shape in members.items():
            found = files.universal.get(name, {})
            untrained = found.keys() == {"fp32"}  # without a gradient until then, it has no other states
            for key in sorted(every - found.keys()) if not untrained else ():
                raise CorruptError(f"the checkpoint lacks zero/{name}/{key}.pt")
            weight = in_module.get(name)
            is_fp32 = isinstance(weight, TensorView) and weight.spec.dtype == "float32"
            for key, path in found.items():
                _add_state(entries, open_file(entries, path), name, key, shape, has_master=not is_fp32)
            if isinstance(steps, TensorView):
                add_extent(entries, OPTIMIZER, named(["state", name, "step"]), steps, common.extent(steps))
            if group in options:
                add_whole(entries, ["param_groups", name], options[group])


def _add_state(
    entries: ForeignEntries, file: TorchFile, name: str, key: str, shape: tuple[int, ...], *, has_master: bool
) -> None:
    """Add a state of a parameter.  A flat one, of ZeRO 3, gets the shape of its parameter."""
    held = file.value.get("param") if isinstance(file.value, dict) else file.value
    if not isinstance(held, TensorView):
        add_state_value(entries, ["state", name, key], held)
        return
    extent, spec = file.extent(held), held.spec
    if key != "step":
        spec = TensorSpec(shape, spec.dtype) if held.spec.shape == (prod(shape),) else spec
        if spec.shape != shape:
            raise CorruptError(
                f"{file.path} has the shape {list(spec.shape)}, and its parameter {list(shape)}"
            )
    entries.size(extent.file)
    chunks = [(Box.whole(spec.shape), extent)]
    if key == "fp32":
        entries.tensor(MODEL, named([name]), spec, chunks)
    if key != "fp32" or has_master:
        state = "master" if key == "fp32" else key
        entries.tensor(OPTIMIZER, named(["state", name, state]), spec, chunks)
