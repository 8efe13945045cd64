"""The program that wrote a file or a folder, recognised by first bytes; names alone show nothing.

A look reads at most `HEAD_NBYTES` of a file.  Nothing is unpickled, unpacked or parsed beyond these bytes, so
a hostile file costs no more than any other.
"""

from __future__ import annotations

import re
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import StorageError
from reknit.plugins.format import Foreign, HasFolderAbove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from reknit.plugins.format import Storage


HEAD_NBYTES = 4096
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_SAFETENSORS = re.compile(
    rb'\{\s*(?:\}|"__metadata__"\s*:\s*\{|"(?:[^"\\]|\\.)*"\s*:\s*\{\s*"(?:dtype|shape|data_offsets)"\s*:)'
)
_PART_OF_RANK = re.compile(
    rb"\x80(?:[\x02\x03]c[\w.]+\n\w*TensorAwareStateDict\n"
    rb"|[\x04\x05]\x95.{8}\x8c.[\w.]+\x94\x8c.[\w.]*TensorAwareStateDict\x94\x93)",
    re.DOTALL,
)
"""The beginning of a pickle of such an object, whose class is of NVRx, of Megatron or of a user."""
_PICKLE = re.compile(rb"\x80(?:[\x02\x03][\]\}()cXq\x8a]|[\x04\x05]\x95)")
_INDEX = re.compile(rb'\s*\{[^{}\[\]]*(?:"metadata"\s*:\s*\{[^{}]*\}\s*,\s*)?"weight_map"\s*:\s*\{')
_LARGEST_HEADER = 100_000_000
"""The most bytes of a header that the library safetensors reads."""
_ZIP_NAME_AT = 30
_LAST_GGUF = 99
"""Versions of GGUF count from 1, in either order of bytes."""

_SAVE = 'then reknit.save(folder, {"model": model}) saves it'
_SAVE_BOTH = 'then reknit.save(folder, {"model": model, "optimizer": optimizer}) saves them'
NVRX = "NVRx"


_FILES = frozenset({"torch.save", "Lightning", "safetensors", "npz", "npy", "GGUF"})
_FOLDERS = frozenset({"DCP", "Hugging Face", "PEFT", "Megatron", "DeepSpeed", "Orbax"})
READABLE = _FILES | _FOLDERS
"""The kinds of checkpoints of other programs that reknit opens as they are."""

WEIGHTS = frozenset({"safetensors", "npz", "npy", "GGUF", "Hugging Face", "PEFT"})
"""The kinds of checkpoints that have weights alone, such as those from which a run starts."""

OPENS = (
    "reknit.open({path}) and reknit.load({path}, state) read it as it is, and `reknit import` makes a "
    "checkpoint of reknit of it"
)

_TORCH = "a single file, as torch.save writes it"
_REMEDIES = {
    "torch.save": (_TORCH, OPENS),
    "Lightning": ("a checkpoint of Lightning", OPENS),
    NVRX: (
        "one rank's part of a local checkpoint of NVIDIA's resiliency extension (nvidia-resiliency-ext)",
        "in a job with the ranks that saved it, manager = LocalCheckpointManager({root}); "
        "manager.find_latest(); part = manager.load()[0] reads the newest iteration that all ranks have.  "
        "Load part.state_dict, or part.to_state_dict(sharded_state_dict, algo) of Megatron's parts, into the "
        "model and the optimizer, " + _SAVE_BOTH,
    ),
    "TorchScript": (
        "a model as torch.jit.save writes it (TorchScript)",
        "read it with torch.jit.load({path}) and model.load_state_dict, " + _SAVE,
    ),
    "safetensors": ("a file of safetensors", OPENS),
    "Hugging Face": ("the index of a model of Hugging Face", OPENS),
    "GGUF": ("a model in GGUF, as llama.cpp reads it", OPENS),
    "npz": ("arrays as numpy.savez writes them (.npz)", OPENS),
    "npy": ("an array as numpy.save writes it (.npy)", OPENS),
    "HDF5": ("a file of HDF5, as Keras saves it", "load it with the program that saved it, " + _SAVE),
    "pickle": (
        "a pickle",
        "reknit runs no pickle: load it with the program that saved it, if you trust it, " + _SAVE,
    ),
    "zip": ("a zip archive", "pass the folder of a checkpoint: the one that holds manifest.json"),
    "": ("a file", "pass the folder of a checkpoint: the one that holds manifest.json"),
}
"""For each kind, a description and a remedy, with the path of the file and of the folder above its folder."""


def file_at(storage: Storage) -> Foreign | None:
    """Return the kind of the file at the root of a store, None unless the root is a file."""
    if not isinstance(storage, HasFolderAbove) or (found := storage.above()) is None:
        return None
    return file_in(*found, storage.url)


def file_in(folder: Storage, name: str, url: str) -> Foreign | None:
    """Return the kind of a file of a folder, with its URL; None for a file that cannot be read."""
    if (head := head_of(folder, name)) is None:
        return None
    kind = kind_of(head.data, head.nbytes)
    what, remedy = _REMEDIES[kind]
    what = f"{what}, which reknit cannot read" if kind and kind not in READABLE else what
    remedy = remedy.replace("{path}", repr(url)).replace("{root}", repr(url.rsplit("/", 2)[0]))
    return Foreign(what, remedy, kind, is_file=True)


class Head(NamedTuple):
    """The first bytes of a file, and its size in bytes."""

    data: bytes
    nbytes: int


def head_of(storage: Storage, name: str) -> Head | None:
    """Return the first bytes of a file, None for a file that cannot be read."""
    try:
        nbytes = storage.size(name)
        if nbytes <= HEAD_NBYTES:  # some endpoints do not support ranges
            return Head(storage.get(name, limit=HEAD_NBYTES), nbytes)
        buffer = bytearray(HEAD_NBYTES)
        storage.read_into(name, 0, [memoryview(buffer)])
    except StorageError:  # absent, closed, a pipe, a name that no store takes
        return None
    return Head(bytes(buffer), nbytes)


def kind_of(head: bytes, nbytes: int) -> str:
    """Return the kind of a file with these first bytes and this size, as in `_REMEDIES`."""
    if head.startswith(b"PK\x03\x04"):
        return _kind_of_zip(head)
    if head.startswith(_OLD_TORCH):
        return _kind_of_torch(head)
    if head.startswith(b"\x93NUMPY"):
        return "npy"
    if head.startswith(b"\x89HDF\r\n\x1a\n"):
        return "HDF5"
    if head.startswith(b"GGUF") and len(head) >= 8:
        version = min(int.from_bytes(head[4:8], "little"), int.from_bytes(head[4:8], "big"))
        return "GGUF" if 1 <= version <= _LAST_GGUF else ""
    if _is_safetensors(head, nbytes):
        return "safetensors"
    if _PICKLE.match(head):
        return "pickle"
    if _INDEX.match(head):
        return "Hugging Face"
    return ""


def _kind_of_zip(head: bytes) -> str:
    """Return the kind of a zip archive by the name of its first entry."""
    name_nbytes = int.from_bytes(head[26:28], "little")
    name = head[_ZIP_NAME_AT : _ZIP_NAME_AT + name_nbytes]
    if name.endswith(b".npy"):
        return "npz"
    if name.count(b"/") == 1 and name.endswith(b"/data.pkl"):
        return "TorchScript" if b"c__torch__." in head else _kind_of_torch(head)
    if re.fullmatch(rb"[^/]+/(?:data|code|constants)(?:/[^/]+)*", name):
        return "TorchScript"
    return "zip"


def _kind_of_torch(head: bytes) -> str:
    """Return the program that wrote a file of torch: Lightning puts its version first, and NVRx its class."""
    if _PART_OF_RANK.search(head) is not None:
        return NVRX
    return "Lightning" if b"pytorch-lightning_version" in head else "torch.save"


def _is_safetensors(head: bytes, nbytes: int) -> bool:
    """Return whether a file begins with the size of a header that fits the file, and with this header."""
    header_nbytes = int.from_bytes(head[:8], "little")
    if not 2 <= header_nbytes <= min(_LARGEST_HEADER, nbytes - 8):
        return False
    return _SAFETENSORS.match(head[8 : 8 + header_nbytes]) is not None


_MOST_LISTED = 100
_MOST_HEADS = 4
"""Files of a folder without known names that are looked into."""
_NUMBER = re.compile(r"[0-9]{1,18}")
_SINGLE_WEIGHTS = (".npz", ".gguf", ".safetensors")
_SINGLE_FILES = (".ckpt", ".pt", ".pth", *_SINGLE_WEIGHTS)
_YET = "which reknit cannot read yet"
_PICKLE_HEAD = rb"\x80[\x02-\x05].*"
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
_MODEL = ("Hugging Face", "a model as Hugging Face libraries save it", OPENS)
_PEFT = ("PEFT", "an adapter as PEFT saves it", OPENS)
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
_TORCH_FORMAT = ("torch.save",)

_MODELS = (
    _Mark("shard-00001-model-00001-of-00001.safetensors", ("safetensors",), *_MODEL),
    _Mark("model.safetensors", ("safetensors",), *_MODEL),
    _Mark("model.safetensors.index.json", _JSON + rb'"weight_map"\s*:', *_MODEL),
    _Mark("pytorch_model.bin", _TORCH_FORMAT, *_MODEL),
    _Mark("pytorch_model.bin.index.json", _JSON + rb'"weight_map"\s*:', *_MODEL),
    _Mark("config.json", _JSON + rb'"transformers_weights"\s*:\s*"', *_MODEL),
)
"""Files that identify a model of Hugging Face."""

_CHECKPOINTS = (
    _Mark("metadata.json", _JSON + rb'"sharded_backend"\s*:\s*"', "Megatron", _TORCH_DIST, OPENS),
    _Mark(".metadata", _PICKLE_HEAD + rb"bytecheckpoint\.", *_BYTECHECKPOINT),
    _Mark("model/.metadata", _PICKLE_HEAD + rb"bytecheckpoint\.", *_BYTECHECKPOINT),
    _Mark(
        ".metadata",
        _PICKLE_HEAD + rb"torch\.distributed\.checkpoint\.metadata",
        "DCP",
        "a checkpoint of torch.distributed.checkpoint (DCP)",
        OPENS,
    ),
    _Mark(
        "mp_rank_00/model_optim_rng.pt",
        _TORCH_FORMAT,
        "Megatron (torch)",
        "a checkpoint of Megatron (torch)",
        _MEGATRON,
    ),
    _Mark(
        "mp_rank_00_000/model_optim_rng.pt",
        _TORCH_FORMAT,
        "Megatron (torch)",
        "a checkpoint of Megatron (torch)",
        _MEGATRON,
    ),
    _Mark("mp_rank_00_model_states.pt", _TORCH_FORMAT, *_ZERO),
    _Mark("zero_pp_rank_0_mp_rank_00_model_states.pt", _TORCH_FORMAT, *_ZERO),
    _Mark("fsdp_config.json", _JSON + rb'"FSDP_version"\s*:', *_VERL),
    _Mark(
        "pytorch_model_fsdp_0/.metadata",
        _PICKLE_HEAD + rb"torch\.distributed\.checkpoint\.metadata",
        *_SHARDS,
    ),
    _Mark("pytorch_model_fsdp.bin", _TORCH_FORMAT, *_SHARDS),
    _Mark("pytorch_model_fsdp_rank0.bin", _TORCH_FORMAT, *_SHARDS),
    _Mark("pytorch_model_fsdp_0_rank0.bin", _TORCH_FORMAT, *_SHARDS),
    _Mark("adapter_model.safetensors", ("safetensors",), *_PEFT),
    _Mark("adapter_model.bin", _TORCH_FORMAT, *_PEFT),
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
