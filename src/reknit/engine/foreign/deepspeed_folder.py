"""Checkpoints of DeepSpeed in place: flat partitions of ZeRO, whose ranges become boxes of parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from reknit.engine.foreign.deepspeed_partitions import (
    OPTIMIZER,
    RankPartition,
    Shapes,
    add_partitioned,
    lines_of_2,
    lines_of_3,
)
from reknit.engine.foreign.entries import MODEL, ForeignEntries, named
from reknit.engine.foreign.torch_files import TorchFile, add_extent, views_in
from reknit.errors import CorruptError, FormatError, shown
from reknit.format.foreign.safe_pickle import PickledObject
from reknit.format.foreign.torch_values import TORCH, TensorView

if TYPE_CHECKING:
    from reknit.storage.base import Storage

_MODEL_FILE = re.compile(r"(?:zero_pp_rank_([0-9]{1,9})_)?mp_rank_([0-9]{1,9})_model_states\.pt")
_STATE_FILE = re.compile(r"(?:\w+_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_optim_states\.pt")
_WORDS = TORCH._replace(families=("deepspeed.",))
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def read_folder(storage: Storage) -> ForeignEntries:
    """Return the entries of a checkpoint of one pipeline stage and one tensor-parallel rank."""
    entries = ForeignEntries(storage)
    names = [listed.path for listed in storage.list() if "/" not in listed.path]
    models = _by_rank(names, _MODEL_FILE)
    model = _open(entries, models[min(models)])
    if not isinstance(model.value, dict):
        raise FormatError(f"{model.path} has no state of a model")
    _add_progress(entries, model.value)
    if universal := storage.sub("zero").folders():
        for name in universal:
            _add_universal(entries, name)
        _add_module(entries, model, _texts(model.value.get("buffer_names")))
        return entries
    partitions = [_partition(entries, path) for _, path in sorted(_by_rank(names, _STATE_FILE).items())]
    shapes = [_shapes(group) for group in model.value.get("param_shapes") or ()]
    if not partitions or not shapes:
        raise FormatError("the checkpoint has no partitions of ZeRO, or no shapes of parameters")
    stage = _stage(partitions[0].state)
    lines = lines_of_3 if stage == 3 else lines_of_2
    module = model.value.get("module")
    views = module.items() if isinstance(module, dict) else ()
    dtypes = {name: one.spec.dtype for name, one in views if isinstance(one, TensorView)}
    places = lines(partitions, shapes)
    add_partitioned(entries, partitions, places, shapes, in_module=dtypes, with_model=stage == 3)
    _add_module(entries, model, _texts(model.value.get("buffer_names")) if stage == 3 else None)
    return entries


def _by_rank(names: list[str], pattern: re.Pattern[str]) -> dict[int, str]:
    """Return the files of a kind by data-parallel rank.  Raises `FormatError` for several others."""
    found: dict[int, str] = {}
    for name in names:
        if match := pattern.fullmatch(name):
            if int(match[2]):
                raise FormatError(
                    "the checkpoint is of several tensor-parallel ranks, which reknit does not join"
                )
            found[int(match[1] or 0)] = name
    if sorted(found) != list(range(len(found))):
        raise CorruptError("the checkpoint lacks the files of a rank")
    return found


def _open(entries: ForeignEntries, path: str) -> TorchFile:
    file = TorchFile(entries.storage, path, 0, entries.size(path), _WORDS)
    file.locate(views_in(file.value, [], set()))
    return file


def _partition(entries: ForeignEntries, path: str) -> RankPartition:
    file = _open(entries, path)
    state = file.value.get("optimizer_state_dict") if isinstance(file.value, dict) else None
    if not isinstance(state, dict):
        raise FormatError(f"{path} has no state of an optimizer")
    return RankPartition(file, state)


def _stage(state: dict[str, Any]) -> int:
    stage = state.get("zero_stage")
    stage = stage.args[0] if isinstance(stage, PickledObject) and stage.args else stage
    if stage not in (1, 2, 3):
        raise FormatError(f"the checkpoint is of the stage {shown(stage)} of ZeRO")
    return int(stage)


def _shapes(group: Any) -> Shapes:
    if not isinstance(group, dict) or not all(isinstance(shape, tuple) for shape in group.values()):
        raise FormatError("the checkpoint has shapes of parameters in an unknown form")
    return {str(name): shape for name, shape in group.items()}


def _texts(value: Any) -> frozenset[str]:
    return (
        frozenset(one for one in value if isinstance(one, str))
        if isinstance(value, list | set)
        else frozenset()
    )


def _add_module(entries: ForeignEntries, model: TorchFile, only: frozenset[str] | None) -> None:
    """Add the tensors of the model file, or only those of some names."""
    module = model.value.get("module")
    for name, view in module.items() if isinstance(module, dict) else ():
        key = named([name])
        if (
            isinstance(view, TensorView)
            and (only is None or name in only)
            and (MODEL, key) not in entries.tensors
        ):
            add_extent(entries, MODEL, key, view, model.extent(view))


def _add_universal(entries: ForeignEntries, name: str) -> None:
    """Add the states of a parameter of a universal checkpoint: one file for each."""
    for listed in entries.storage.list(f"zero/{name}"):
        state = listed.path.rpartition("/")[2].removesuffix(".pt")
        file = _open(entries, listed.path)
        held = file.value.get("param", None) if isinstance(file.value, dict) else file.value
        if not isinstance(held, TensorView):
            if isinstance(held, int | float):
                entries.value(OPTIMIZER, named(["state", name, state]), held)
            continue
        extent = file.extent(held)
        if state == "fp32":
            add_extent(entries, MODEL, named([name]), held, extent)
            state = "master"
        add_extent(entries, OPTIMIZER, named(["state", name, state]), held, extent)


def _add_progress(entries: ForeignEntries, state: dict[Any, Any]) -> None:
    """Add the counters of the engine."""
    for key in _COUNTS:
        if type(state.get(key)) is int:
            entries.value("engine", key, state[key])
    steps = state.get("global_steps")
    entries.step = steps if type(steps) is int and steps >= 0 else None
