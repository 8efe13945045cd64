"""Which program saved a checkpoint, or a run, into a folder?  A few files decide, by their first bytes."""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from reknit.engine.record.foreign_files import OPENS, READABLE, head_of, kind_of
from reknit.errors import StorageError
from reknit.types.foreign.other_format import Foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reknit.storage.base import Storage

_MOST_LISTED = 100
_MOST_HEADS = 4
"""Files of a folder without known names that are looked into."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_SINGLE_WEIGHTS = (".npz", ".gguf", ".safetensors")
_SINGLE_FILES = (".ckpt", ".pt", ".pth", *_SINGLE_WEIGHTS)
_YET = "which reknit cannot read yet"
_PICKLE = rb"\x80[\x02-\x05].*"
_JSON = rb"\s*\{.*"


class _Mark(NamedTuple):
    """A file that identifies a folder: its name, the content it has to have, and the folder's kind.

    `content` is a pattern for the first bytes, or the names of kinds of files.  `what` describes the folder,
    and `remedy` the way to load it, with ``{path}`` for its place.
    """

    name: str
    content: bytes | tuple[str, ...]
    kind: str
    what: str
    remedy: str


_BYTECHECKPOINT = ("ByteCheckpoint", "a checkpoint of ByteCheckpoint", OPENS)
_INSIDE = "pass one of the folders in it: reknit.open and reknit.load read many of these as they are"
_ZERO = ("DeepSpeed", "a checkpoint of DeepSpeed (ZeRO)", OPENS)
_TORCH_DIST = "a checkpoint of Megatron's dist_checkpointing (torch_dist)"
_TRACKER = "latest_checkpointed_iteration.txt"
_MEGATRON = (
    "load it with Megatron into the model and the optimizer, then "
    'reknit.save(folder, {"model": model, "optimizer": optimizer}) saves it'
)
_MODEL = (
    "Hugging Face",
    "a model as Hugging Face libraries save it",
    OPENS,
)
_PEFT = (
    "PEFT",
    "an adapter as PEFT saves it",
    OPENS,
)
_SHARDS = (
    "FSDP shards",
    "a checkpoint of Accelerate or transformers with shards of FSDP",
    "load it with accelerator.load_state({path}), or with the trainer that saved it; reknit.open reads the "
    "folder pytorch_model_fsdp_0, or the file pytorch_model_fsdp.bin, in it as it is",
)
_VERL = (
    "verl",
    "a checkpoint of verl with shards of FSDP",
    "python -m verl.model_merger merge --backend fsdp --local_dir {path} --target_dir merged makes a folder "
    "of Hugging Face of it, which opens as it is; its folder huggingface may have no weights",
)
_TORCH = ("torch.save",)

_MODELS = (
    _Mark("shard-00001-model-00001-of-00001.safetensors", ("safetensors",), *_MODEL),
    _Mark("model.safetensors", ("safetensors",), *_MODEL),
    _Mark("model.safetensors.index.json", _JSON + rb'"weight_map"\s*:', *_MODEL),
    _Mark("pytorch_model.bin", _TORCH, *_MODEL),
    _Mark("pytorch_model.bin.index.json", _JSON + rb'"weight_map"\s*:', *_MODEL),
    _Mark("config.json", _JSON + rb'"transformers_weights"\s*:\s*"', *_MODEL),
)
"""Files that identify a model of Hugging Face."""

_CHECKPOINTS = (
    _Mark(
        "metadata.json",
        _JSON + rb'"sharded_backend"\s*:\s*"',
        "Megatron",
        _TORCH_DIST,
        OPENS,
    ),
    _Mark(".metadata", _PICKLE + rb"bytecheckpoint\.", *_BYTECHECKPOINT),
    _Mark("model/.metadata", _PICKLE + rb"bytecheckpoint\.", *_BYTECHECKPOINT),
    _Mark(
        ".metadata",
        _PICKLE + rb"torch\.distributed\.checkpoint\.metadata",
        "DCP",
        "a checkpoint of torch.distributed.checkpoint (DCP)",
        OPENS,
    ),
    _Mark(
        "mp_rank_00/model_optim_rng.pt",
        _TORCH,
        "Megatron (torch)",
        "a checkpoint of Megatron (torch)",
        _MEGATRON,
    ),
    _Mark(
        "mp_rank_00_000/model_optim_rng.pt",
        _TORCH,
        "Megatron (torch)",
        "a checkpoint of Megatron (torch)",
        _MEGATRON,
    ),
    _Mark("mp_rank_00_model_states.pt", _TORCH, *_ZERO),
    _Mark("zero_pp_rank_0_mp_rank_00_model_states.pt", _TORCH, *_ZERO),
    _Mark("fsdp_config.json", _JSON + rb'"FSDP_version"\s*:', *_VERL),
    _Mark("pytorch_model_fsdp_0/.metadata", _PICKLE + rb"torch\.distributed\.checkpoint\.metadata", *_SHARDS),
    _Mark("pytorch_model_fsdp.bin", _TORCH, *_SHARDS),
    _Mark("pytorch_model_fsdp_rank0.bin", _TORCH, *_SHARDS),
    _Mark("pytorch_model_fsdp_0_rank0.bin", _TORCH, *_SHARDS),
    _Mark("adapter_model.safetensors", ("safetensors",), *_PEFT),
    _Mark("adapter_model.bin", _TORCH, *_PEFT),
    _Mark("adapter_config.json", _JSON + rb'"peft_type"\s*:', *_PEFT),
    *_MODELS,
    _Mark("model_index.json", _JSON + rb'"_class_name"\s*:', *_MODEL),
    _Mark("manifest.ocdbt", rb"\x0c\xdb:\*", "Orbax", "a checkpoint of Orbax (OCDBT)", OPENS),
    _Mark("_METADATA", _JSON + rb'"tree_metadata"\s*:', "Orbax", "a checkpoint of Orbax (zarr)", OPENS),
    _Mark(
        "_CHECKPOINT_METADATA",
        _JSON + rb'"(?:item_handlers|init_timestamp_nsecs)"\s*:',
        "Orbax",
        "a checkpoint of Orbax",
        OPENS,
    ),
)
"""Files that identify the checkpoints of other programs, the most special first."""

_RUNS = (
    _Mark(
        "zero_to_fp32.py", rb".*DeepSpeed", "DeepSpeed", "a folder of DeepSpeed's own checkpoints", _INSIDE
    ),
    _Mark(
        _TRACKER,
        rb"\s*(?:[0-9]{1,18}|release)\s*\Z",
        "Megatron",
        "a folder of Megatron's own checkpoints",
        _INSIDE,
    ),
)
"""Files that identify folders in which other programs save their checkpoints, and reknit may too."""


def checkpoint_of_others(storage: Storage) -> Foreign | None:
    """Return the kind of the checkpoint of another program in a folder, None if it is unknown."""
    found = _marked(storage, _CHECKPOINTS)
    if found is not None and found.kind == "PEFT" and head_of(storage, "config.json") is not None:
        # transformers reads the model of a folder with its configuration, and an adapter beside it after that
        found = _marked(storage, _MODELS) or found
    if found is not None and found.kind == "DeepSpeed" and _is_universal(storage):
        return found._replace(what="a universal checkpoint of DeepSpeed")
    if found is not None and found.kind == "DCP" and head_of(storage, "common.pt") is not None:
        return found._replace(what=_TORCH_DIST, kind="Megatron")
    return found


def run_of_others(storage: Storage) -> Foreign | None:
    """Return the kind of a folder in which another program saves; None if it is unknown.

    reknit may save into such a folder, too.
    """
    found = _marked(storage, _RUNS)
    if found is not None and found.kind == "Megatron" and (newest := _iteration(storage)) is not None:
        if (step := _step_of_verl(storage, newest)) is not None:
            what = "a folder of verl's own checkpoints"
            return Foreign(what, f"pass a folder in {storage.url}/{step}, such as actor", _VERL[0])
        return found._replace(remedy=f"pass {storage.url}/{newest}, which {_TRACKER} names as the newest")
    return found or _single_files(storage)


def _iteration(storage: Storage) -> str | None:
    """Return the folder of the checkpoint that a folder of Megatron names as its newest."""
    head = head_of(storage, _TRACKER)
    text = "" if head is None else head.data.decode("ascii", "replace").strip()
    return f"iter_{int(text):07d}" if text.isdecimal() else text or None


def _step_of_verl(storage: Storage, newest: str) -> str | None:
    """Return the folder of verl's newest step, whose file of this is called as that of Megatron."""
    step = f"global_step_{int(newest[len('iter_') :])}" if newest.startswith("iter_") else ""
    return step if step in storage.folders() else None


def _marked(storage: Storage, marks: tuple[_Mark, ...]) -> Foreign | None:
    """Identify a folder by the first of these files that it has, with the content that it should have."""
    heads = {}
    for mark in marks:
        if mark.name not in heads:
            heads[mark.name] = head_of(storage, mark.name)
        if (head := heads[mark.name]) is None:
            continue
        if isinstance(mark.content, bytes):
            fits = re.match(mark.content, head.data, re.DOTALL) is not None
        else:
            fits = kind_of(head.data, head.nbytes) in mark.content
        if fits:
            what = mark.what if mark.kind in {*READABLE, _SHARDS[0], _VERL[0]} else f"{mark.what}, {_YET}"
            return Foreign(what, mark.remedy.replace("{path}", repr(storage.url)), mark.kind)
    return None


def _is_universal(storage: Storage) -> bool:
    """Return whether a checkpoint of DeepSpeed has a folder for each parameter, as universal ones have."""
    try:
        parameters = storage.sub("zero").folders()[:1]
    except StorageError:
        return False
    return any(_kind_in(storage, f"zero/{name}/fp32.pt") == "torch.save" for name in parameters)


def _kind_in(storage: Storage, name: str) -> str:
    """Return the kind of a file, empty for an absent or unknown file."""
    head = head_of(storage, name)
    return "" if head is None else kind_of(head.data, head.nbytes)


def _single_files(storage: Storage) -> Foreign | None:
    """Return the kind of a folder in which a file is a checkpoint in itself."""
    if (found := single_file(storage)) is None:
        return None
    name, kind = found
    what = f"a folder with files such as {name} ({kind})" + f", {_YET}" * (kind not in READABLE)
    return Foreign(what, f"pass {storage.url}/{name} to see how to read it", kind)


def single_file(storage: Storage, counts: Callable[[str, str], bool] | None = None) -> tuple[str, str] | None:
    """Return the newest file, by name, directly in a folder that is a checkpoint in itself, and its kind.

    `counts` returns whether a file with this name and kind counts; then files of weights come last.
    """
    try:
        names = [each.path for each in islice(storage.list(), _MOST_LISTED) if "/" not in each.path]
    except StorageError:
        return None
    likely = newest_first(name for name in names if name.lower().endswith(_SINGLE_FILES))
    if counts is not None:
        likely.sort(key=lambda name: name.lower().endswith(_SINGLE_WEIGHTS))
    for name in likely[:_MOST_HEADS]:
        kind = _kind_in(storage, name)
        if kind and kind != "zip" and (counts is None or counts(name, kind)):
            return name, kind
    return None


def newest_first(names: Iterable[str]) -> list[str]:
    """Return names by the last number in each, the highest first; names without a number come last."""

    def order(name: str) -> tuple[int, str]:
        numbers = _NUMBER.findall(name)
        return int(numbers[-1]) if numbers else -1, name

    return sorted(names, key=order, reverse=True)
