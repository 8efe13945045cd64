"""The files of a folder of DeepSpeed: which of them are there, and what does each hold?"""

from __future__ import annotations

import re
from functools import partial
from math import prod
from typing import Any, NamedTuple

from reknit.engine.foreign.deepspeed.partitions import ParameterPlace, Shapes, add_ranges, bytes_of, parts_of
from reknit.engine.foreign.entries import MODEL, ForeignEntries, named
from reknit.engine.foreign.torch_files import TorchFile, add_extent, views_in
from reknit.errors import CorruptError, FormatError
from reknit.format.foreign.torch_values import TORCH, TensorView, Whole

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
