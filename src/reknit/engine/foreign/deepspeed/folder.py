"""Checkpoints of DeepSpeed in place: flat partitions of ZeRO, whose ranges become boxes of parameters.

A folder is read whole, or refused with the name of the file or of the feature that is in the way.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from reknit.engine.foreign.deepspeed.files import (
    DeepSpeedFiles,
    add_rest,
    add_weights,
    files_of,
    open_file,
    shapes_of,
    weights_of,
)
from reknit.engine.foreign.deepspeed.partitions import (
    OPTIMIZER,
    PartitionLine,
    RankPartition,
    Shapes,
    add_partitioned,
    bytes_of,
    check_same_save,
    places_in_parts,
    places_on_lines,
)
from reknit.engine.foreign.deepspeed.universal import add_universal
from reknit.engine.foreign.entries import MODEL, ForeignEntries, named
from reknit.engine.foreign.optimizer_states import named_states
from reknit.engine.foreign.torch_files import TorchFile, add_extent
from reknit.errors import CorruptError, FormatError, ReknitError, shown
from reknit.format.foreign.torch_values import TensorView

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.storage.base import Storage

_EXPERT = re.compile(r"(.*\.deepspeed_moe\.experts\.deepspeed_experts\.)([0-9]{1,9})(\..*)")
_COUNTS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_ODD = (AttributeError, IndexError, KeyError, TypeError, ValueError)
"""Errors of a walk through values that have other types than DeepSpeed gives them."""
_NOT_JOINED = "which reknit does not join"
_UNNAMED = (
    "without ZeRO, DeepSpeed saves no names of parameters with an optimizer in bf16, fp16 or with experts"
)


def read_folder(storage: Storage) -> ForeignEntries:
    """Return the entries of a checkpoint.  Raises `FormatError` for one that cannot be read whole."""
    entries = ForeignEntries(storage)
    files = files_of([listed.path for listed in storage.list()])
    try:
        _add_all(entries, files)
    except ReknitError:
        raise
    except _ODD as error:
        raise FormatError(
            f"the checkpoint has values in an unknown form: {type(error).__name__} {shown(str(error))}"
        ) from error
    return entries


def _add_all(entries: ForeignEntries, files: DeepSpeedFiles) -> None:
    """Add the entries of all files."""
    stages = sorted({rank for _, rank in files.models})
    models = [_models(entries, files, stage) for stage in stages]
    first = models[0][0].value
    _check_layout(first, files, len(stages))
    _add_progress(entries, first)
    if files.universal:
        add_universal(entries, files, models[0])
        return
    _add_layers(entries, files, {name for each in models for name in chain(*shapes_of(each[0].value))})
    experts = _add_experts(entries, files, first.get("num_experts"))
    for stage, of_stage in zip(stages, models, strict=True):
        _add_stage(entries, files, stage, of_stage, experts)


def _check_layout(state: dict[str, Any], files: DeepSpeedFiles, num_stages: int) -> None:
    """Raise `FormatError` for a layout that reknit does not join, `CorruptError` for missing ranks."""
    is_pipeline = bool(files.layers)
    others = [path for key, path in [*files.layers.items(), *files.experts.items()] if key[-1] > 0]
    if others or (num_stages > 1 and not is_pipeline):
        where = f": {others[0]}" if others else ""
        raise FormatError(f"the checkpoint is of several tensor-parallel ranks, {_NOT_JOINED}{where}")
    if state.get("ds_autoep_layers"):
        raise FormatError(f"the checkpoint has experts of AutoEP, {_NOT_JOINED}")
    if is_pipeline and files.experts:
        raise FormatError(f"the checkpoint is of a pipeline with experts, {_NOT_JOINED}")
    if is_pipeline and not shapes_of(state):
        raise FormatError(
            "the checkpoint is of a pipeline without ZeRO, which records no names of parameters"
        )
    if state.get("module") is None and not is_pipeline:
        raise CorruptError("the checkpoint has no weights: its model is None, and no file has a layer")
    saved = state.get("mp_world_size")
    if type(saved) is int and saved != num_stages:
        raise CorruptError(
            f"{saved} model-parallel ranks saved the checkpoint, which has files of {num_stages}"
        )


def _models(entries: ForeignEntries, files: DeepSpeedFiles, stage: int) -> list[TorchFile]:
    """Return the files of the model of a stage: the first, and with divided frozen parameters all."""
    found = {rank: path for (rank, at), path in sorted(files.models.items()) if at == stage}
    if -1 in found and len(found) > 1:
        raise FormatError(f"{found[-1]} and {found[max(found)]} are of different saves")
    if -1 not in found and 0 not in found:
        raise CorruptError(f"the checkpoint lacks zero_pp_rank_0_mp_rank_{stage:02}_model_states.pt")
    first = open_file(entries, found[min(found)])
    if not isinstance(first.value, dict):
        raise FormatError(f"{first.path} has no state of a model")
    if -1 in found:
        return [first]
    size = first.value.get("dp_world_size")
    wanted = range(size) if type(size) is int else found
    for rank in sorted(found.keys() ^ {*wanted}):
        path = f"zero_pp_rank_{rank}_mp_rank_{stage:02}_model_states.pt"
        raise CorruptError(f"{path} is {'of another save' if rank in found else 'missing'}")
    frozen = first.value.get("frozen_param_shapes")
    others = [open_file(entries, path) for rank, path in found.items() if rank > 0 and frozen]
    for other in others:
        if not isinstance(other.value, dict) or any(
            other.value.get(n) != first.value.get(n) for n in _COUNTS
        ):
            raise CorruptError(f"{first.path} and {other.path} are of different saves")
    return [first, *others]


def _add_layers(entries: ForeignEntries, files: DeepSpeedFiles, trained: set[str]) -> None:
    """Add the weights of the layers of a pipeline.  Raises `FormatError` if their names are not recorded."""
    for key, path in sorted(files.layers.items()):
        layer = open_file(entries, path)
        weights = {f"{key[0]}.{name}": one for name, one in weights_of(layer, layer.value).items()}
        if weights and not trained & weights.keys():
            raise FormatError(
                f"the names of the weights in {path} are not recorded: a pipeline that ties layers, or "
                "freezes a whole layer, cannot be read"
            )
        add_weights(entries, layer, weights)


def _add_experts(entries: ForeignEntries, files: DeepSpeedFiles, counts: Any) -> dict[str, int]:
    """Add the weights of experts, and return their number in each layer, by the prefix of their names."""
    counts = counts if isinstance(counts, list) else []
    wanted = {(layer, expert, 0) for layer, count in enumerate(counts) for expert in range(count)}
    for key in sorted(wanted ^ files.experts.keys()):
        path = "layer_{}_expert_{}_mp_rank_{:02}_model_states.pt".format(*key)
        raise CorruptError(f"{path} is {'missing' if key in wanted else 'of another save'}")
    found = {}
    for key, path in sorted(files.experts.items()):
        expert = open_file(entries, path)
        for name in (weights := weights_of(expert, expert.value)):
            match = _EXPERT.fullmatch(name)
            if match is None or int(match[2]) != key[1]:
                raise FormatError(f"{path} has {shown(name)}, which is not a weight of its expert")
            found[match[1]] = counts[key[0]]
        add_weights(entries, expert, weights)
    return found


def _add_stage(
    entries: ForeignEntries,
    files: DeepSpeedFiles,
    stage: int,
    models: list[TorchFile],
    experts: dict[str, int],
) -> None:
    """Add the weights and the optimizer of a pipeline stage."""
    state = models[0].value
    weights, shapes = weights_of(models[0], state.get("module")), shapes_of(state)
    if not shapes:
        add_weights(entries, models[0], weights)
        _add_undivided(entries, files, models[0])
        return
    partitions = _partitions(entries, files, stage, state.get("dp_world_size"))
    if partitions[0].stage == 3:
        dtypes = {name: one.spec.dtype for name, one in weights.items() if isinstance(one, TensorView)}
        places = places_in_parts(partitions, shapes)
        add_partitioned(entries, partitions, places, in_module=dtypes, with_model=True)
        add_rest(entries, models)
        return
    add_weights(entries, models[0], weights)
    places = places_on_lines(partitions, shapes, partial(_lines, partitions, shapes, experts, state))
    dtypes = {}
    for place in places:
        weight = entries.tensors.get((MODEL, named([place.name])))
        if weight is None or weight[0].shape != place.shape:
            raise CorruptError(f"the checkpoint has no weights of the shape of {place.name[:200]!r}")
        dtypes[place.name] = weight[0].dtype
    add_partitioned(entries, partitions, places, in_module=dtypes, with_model=False)


def _partitions(entries: ForeignEntries, files: DeepSpeedFiles, stage: int, size: Any) -> list[RankPartition]:
    """Return the partitions of a pipeline stage.  Raises `CorruptError` unless each rank has one."""
    found = {rank: path for (rank, at), path in sorted(files.partitions.items()) if at == stage}
    if not found:
        raise CorruptError(f"the checkpoint lacks zero_pp_rank_0_mp_rank_{stage:02}_optim_states.pt")
    first = _partition(entries, found[min(found)])
    num = max([*first.counts, size if type(size) is int else 0])
    for rank in sorted({*range(num)} ^ found.keys()):
        if rank in found:
            raise CorruptError(f"{found[rank]} is of another save: {num} ranks saved the checkpoint")
        path = first.file.path.replace(f"_pp_rank_{min(found)}_", f"_pp_rank_{rank}_")
        raise CorruptError(f"the checkpoint lacks {path}")
    partitions = [first, *(_partition(entries, path) for rank, path in found.items() if rank)]
    check_same_save(entries, partitions)
    return partitions


def _partition(entries: ForeignEntries, path: str) -> RankPartition:
    file = open_file(entries, path)
    state = file.value.get("optimizer_state_dict") if isinstance(file.value, dict) else None
    if not isinstance(state, dict):
        raise FormatError(f"{path} has no state of an optimizer")
    if "ds_zero_partition_groups" in state:
        raise FormatError(f"the checkpoint has experts of AutoEP, {_NOT_JOINED}")
    return RankPartition(file, state)


def _lines(
    partitions: Sequence[RankPartition],
    shapes: list[Shapes],
    experts: dict[str, int],
    state: dict[str, Any],
    group: int,
) -> list[PartitionLine]:
    """Return the lines of a group: that of all ranks, or one for each expert-parallel rank."""
    counts, size = partitions[0].counts, len(partitions)
    count = counts[group] if group < len(counts) else counts[-1]
    if count == size:
        return [PartitionLine(range(size))]
    matches = [_EXPERT.fullmatch(name) for name in shapes[group]]
    if size % count or not all(match and match[1] in experts for match in matches):
        raise FormatError(f"group {group} has {count} partitions on {size} ranks, and is not one of experts")
    ep_size = size // count
    config = state.get("ds_config")
    is_data_first = isinstance(config, dict) and config.get("use_data_before_expert_parallelism") is True
    ranks = [
        range(each * count, (each + 1) * count) if is_data_first else range(each, size, ep_size)
        for each in range(ep_size)
    ]
    return [
        PartitionLine(ranks[each], partial(_whole_name, experts, ep_size, each)) for each in range(ep_size)
    ]


def _whole_name(experts: dict[str, int], ep_size: int, rank: int, name: str) -> str:
    """Return the whole model's name of an expert's weight, which an expert-parallel rank counts from 0 on."""
    match = _EXPERT.fullmatch(name)
    assert match is not None
    return f"{match[1]}{rank * (experts[match[1]] // ep_size) + int(match[2])}{match[3]}"


def _add_undivided(entries: ForeignEntries, files: DeepSpeedFiles, model: TorchFile) -> None:
    """Add the optimizer of a job without ZeRO, whose states have the numbers of their parameters."""
    optimizer = model.value.get("optimizer")
    is_plain = isinstance(optimizer, dict) and optimizer.keys() == {"state", "param_groups"}
    if is_plain and not files.experts and not files.partitions:

        def place(item: str, fqn: str, view: TensorView) -> None:
            add_extent(entries, item, fqn, view, model.extent(view))

        entries.inline = partial(bytes_of, entries.storage, model)
        entries.nested(OPTIMIZER, (), named_states(optimizer), place)
    elif optimizer is not None or files.experts or files.partitions:
        entries.unread(OPTIMIZER, [], _UNNAMED)


def _add_progress(entries: ForeignEntries, state: dict[Any, Any]) -> None:
    """Add the counters of the engine."""
    for key in _COUNTS:
        if type(state.get(key)) is int:
            entries.value("engine", key, state[key])
    steps = state.get("global_steps")
    entries.step = steps if type(steps) is int and steps >= 0 else None
