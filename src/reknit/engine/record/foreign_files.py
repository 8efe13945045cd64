"""Which program wrote a file?  Its first bytes decide, and its name alone shows nothing.

A look reads at most `HEAD_NBYTES` of a file.  Nothing is unpickled, unpacked or parsed beyond these bytes, so
a hostile file costs no more than any other.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import StorageError
from reknit.storage.base import HasFolderAbove
from reknit.types.foreign.other_format import Foreign

if TYPE_CHECKING:
    from reknit.storage.base import Storage

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
    "HDF5": (
        "a file of HDF5, as Keras saves it",
        "load it with the program that saved it, " + _SAVE,
    ),
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
