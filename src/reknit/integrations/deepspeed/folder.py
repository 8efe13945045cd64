"""Checkpoints of DeepSpeed in place: flat partitions of ZeRO, whose ranges become boxes of parameters.

A folder is read whole, or refused with the name of the file or of the feature that is in the way.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from reknit.errors import CorruptError, FormatError, ReknitError, shown
from reknit.integrations.deepspeed.partitions import (
    OPTIMIZER,
    ParameterPlace,
    PartitionLine,
    RankPartition,
    Shapes,
    add_partitioned,
    add_ranges,
    add_state_value,
    add_whole,
    bytes_of,
    check_same_save,
    options_by_flat,
    parts_of,
    places_in_parts,
    places_on_lines,
)
from reknit.integrations.formats.entries import MODEL, ForeignEntries, named, named_states
from reknit.integrations.formats.torch_values import TORCH, TensorView, Whole
from reknit.integrations.torch_save.files import TorchFile, add_extent, views_in
from reknit.plugins.format import Box, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reknit.plugins.format import Storage


_MODEL_FILE = re.compile(r"(?:zero_pp_rank_([0-9]{1,9})_)?mp_rank_([0-9]{1,9})_model_states\.pt")
_STATE_FILE = re.compile(r"(?:\w+_)?zero_pp_rank_([0-9]{1,9})_mp_rank_([0-9]{1,9})_?optim_states\.pt")
_LAYER_FILE = re.compile(r"layer_([0-9]{1,9})(?:-model_([0-9]{1,9}))?-model_states\.pt")
_EXPERT_FILE = re.compile(r"layer_([0-9]{1,9})_expert_([0-9]{1,9})_mp_rank_([0-9]{1,9})_model_states\.pt")
_OLD_EXPERT_FILE = re.compile(r"expert_[0-9]{1,9}_mp_rank_[0-9]{1,9}_model_states\.pt")
_KINDS = (_MODEL_FILE, _STATE_FILE, _LAYER_FILE, _EXPERT_FILE)
_UNIVERSAL = ("fp32", "exp_avg", "exp_avg_sq", "step", "optimizer_state")
_WORDS = TORCH._replace(families=("deepspeed.",))


class DeepSpeedFiles(NamedTuple):
    """The paths of a folder's files, by the numbers in their names; a number that is absent counts as -1.

    Models and partitions have the data-parallel and the model-parallel rank.  The files of a universal
    checkpoint go by parameter and state.
    """

    models: dict[tuple[int, ...], str]
    partitions: dict[tuple[int, ...], str]
    layers: dict[tuple[int, ...], str]
    experts: dict[tuple[int, ...], str]
    universal: dict[str, dict[str, str]]


def files_of(paths: list[str]) -> DeepSpeedFiles:
    """Return the files that hold something.  Raises `FormatError` for two files of one rank."""
    files = DeepSpeedFiles({}, {}, {}, {}, {})
    for path in paths:
        for pattern, found in zip(_KINDS, files[:4], strict=True):
            if match := pattern.fullmatch(path):
                key = tuple(-1 if each is None else int(each) for each in match.groups())
                if key in found:
                    raise FormatError(f"{found[key]} and {path} are files of one rank, of different saves")
                found[key] = path
        if path.startswith("zero/") and path.count("/") == 2 and path.endswith(".pt"):
            _, name, state = path.split("/")
            files.universal.setdefault(name, {})[state.removesuffix(".pt")] = path
        if path.startswith("offloaded_tensors/"):
            raise FormatError(
                "states of its optimizer lie in offloaded_tensors, as offload to NVMe writes them"
            )
        if _OLD_EXPERT_FILE.fullmatch(path):
            raise FormatError(f"{path} is an expert as DeepSpeed before 0.5 saved it")
    return files


def open_file(entries: ForeignEntries, path: str) -> TorchFile:
    """Open a file.  Raises `CorruptError` if it was saved under another name."""
    file = TorchFile(entries.storage, path, 0, entries.size(path), _WORDS)
    name = f"{file.saved_as}.pt"
    known = file.saved_as in _UNIVERSAL or any(each.fullmatch(name) for each in _KINDS)
    if known and name != path.rpartition("/")[2]:
        raise CorruptError(f"{path} was saved as {name}: a file was renamed, or two were exchanged")
    file.locate(views_in(file.value, [], set()))
    return file


def shapes_of(state: dict[str, Any]) -> list[Shapes]:
    """Return the shapes of the parameters in training, by group; none without ZeRO."""
    groups = state.get("param_shapes") or []
    if not isinstance(groups, list):
        raise FormatError("the checkpoint has shapes of parameters in an unknown form")
    return [shape_table(group) for group in groups]


def shape_table(group: Any) -> Shapes:
    """Return a table of shapes by name.  Raises `FormatError` for anything else."""
    if not isinstance(group, dict) or not all(isinstance(shape, tuple) for shape in group.values()):
        raise FormatError("the checkpoint has shapes of parameters in an unknown form")
    return {str(name): shape for name, shape in group.items()}


def weights_of(file: TorchFile, values: Any) -> dict[str, Any]:
    """Return the entries of a module's state dict in a file: tensors, and extra states of other types."""
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise FormatError(f"{file.path} has weights in an unknown form")
    return values


def add_weights(entries: ForeignEntries, file: TorchFile, weights: dict[str, Any]) -> None:
    """Add weights and extra states of a file to the model, without the names that it has."""

    def place(item: str, fqn: str, view: TensorView) -> None:
        add_extent(entries, item, fqn, view, file.extent(view))

    entries.inline = partial(bytes_of, entries.storage, file)
    for name, one in weights.items():
        if (MODEL, named([name])) not in entries.tensors:
            entries.nested(MODEL, [name], one if isinstance(one, TensorView) else Whole(one), place)


def add_rest(entries: ForeignEntries, models: list[TorchFile]) -> None:
    """Add the parts of a model beside the partitions of ZeRO 3: buffers, frozen weights, further names."""
    state = models[0].value
    buffers = state.get("buffer_names")
    weights = weights_of(models[0], state.get("module"))
    if not isinstance(buffers, list) or not {*buffers} <= weights.keys():
        raise CorruptError(f"{models[0].path} lacks some of its buffers")
    kept = {name: one for name, one in weights.items() if name in buffers or not isinstance(one, TensorView)}
    add_weights(entries, models[0], kept)
    for name, shape in shape_table(state.get("frozen_param_shapes") or {}).items():
        parts = [(each.value.get("frozen_param_fragments") or {}).get(name) for each in models]
        place = ParameterPlace(name, shape, 0, parts_of(prod(shape), len(models), 0))
        add_ranges(entries, MODEL, [name], files=models, views=parts, place=place)
    for name, other in (state.get("shared_params") or {}).items():
        if (MODEL, named([other])) in entries.tensors:
            entries.tensor(MODEL, named([name]), *entries.tensors[MODEL, named([other])])


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
