"""Names of Megatron's tensors and objects, the same in every layout: those of a model in one process."""

from __future__ import annotations

import re
from typing import NamedTuple

_LAYER = re.compile(r"(?:^|\.)layers\.(?!\d)")
_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d)")
_EXPERT = re.compile(r"\.experts\.experts\.(?=\d)")
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_MASTERS = ("param", "fp32_param")
_SHARD = re.compile(r"(.+)/shard_([0-9.]+)_([0-9.]+)")
_FLAT = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")
_BUCKET = re.compile(r"gbuf_idx_(\d+)\.dtype_(\(.+\))\.bucket_idx_(\d+)\.(\w+)")
FLAT = "flat"
"""Part of the names of the states of an optimizer that Megatron saved in the order of its buffers."""
GROUPS = "groups"
"""Name of the options of the groups of an optimizer, as Megatron saves them: without their parameters."""


def stacks_layers(key: str) -> bool:
    """Return whether a key is that of all layers, numbered by a dimension."""
    return _LAYER.search(key) is not None


def with_layer(key: str, number: int) -> str:
    """Return the key of one layer."""
    return _LAYER.sub(rf"\g<0>{number}.", key, count=1)


def stacks_experts(key: str) -> bool:
    """Return whether a key is that of all experts of a layer, numbered by a dimension."""
    return _EXPERTS.search(key) is not None


def with_expert(key: str, number: int) -> str:
    """Return the key of one expert."""
    return _EXPERTS.sub(f".experts.local_experts.{number}.", key, count=1)


def plain(key: str) -> str:
    """Return the key of one expert under its name in a model in one process."""
    return _EXPERT.sub(".experts.local_experts.", key)


def is_of_expert(name: str) -> bool:
    """Return whether a tensor belongs to an expert."""
    return ".local_experts." in name


def half(key: str) -> tuple[str, bool] | None:
    """Return the name of the whole tensor for the key of one half, and whether it is the second half."""
    found = _HALF.fullmatch(key)
    return None if found is None else (found[1], found[2] == "v")


def state_of(key: str) -> tuple[str, str] | None:
    """Return the prefix and the name of the state, for a key of a parameter's state in an optimizer."""
    found = _STATE.fullmatch(key)
    return None if found is None else (key[: found.start(2)], state_name(found[1]))


def state_name(name: str) -> str:
    """Return the name of a state in reknit: that of the weights in full precision is ``master``."""
    return "master" if name in _MASTERS else name


class GridPlace(NamedTuple):
    """The name of an object with a place in a grid, and the place and the grid that the name leaves out."""

    name: str
    at: tuple[int, ...]
    grid: tuple[int, ...]

    @property
    def is_alone(self) -> bool:
        """Whether the name leaves out nothing."""
        return self.grid in ((), (1,))

    @property
    def shard(self) -> str:
        """The end of Megatron's own key of such an object."""
        return f"shard_{_dotted(self.at)}_{_dotted(self.grid)}"

    @property
    def is_extra(self) -> bool:
        """Whether this is the extra state of a module, which is mostly empty."""
        return self.name.endswith("_extra_state")


def object_of(key: str, at: tuple[int, ...], grid: tuple[int, ...]) -> GridPlace:
    """Return the name of an object: its layer and its expert have numbers in it."""
    taken = 0
    if key.endswith("_extra_state") and stacks_layers(key) and at:
        key, taken = with_layer(key, at[taken]), taken + 1
    if stacks_experts(key) and len(at) > taken:
        key, taken = with_expert(key, at[taken]), taken + 1
    return GridPlace(plain(key), at[taken:], grid[taken:])


def saved_object_of(key: str) -> GridPlace:
    """Return the name of an object by its key in a folder."""
    if (found := _SHARD.fullmatch(key)) is None:
        return GridPlace(plain(key), (), ())
    at, grid = (tuple(int(n) for n in part.split(".") if n) for part in found.group(2, 3))
    return object_of(found[1], at, grid)


def flat_name(key: str) -> str | None:
    """Return the name of a part of an optimizer in the order of its buffers; None for others."""
    if (found := _FLAT.fullmatch(key)) is None:
        return None
    place = flat_place(int(found[1] or 0), int(found[2]))
    if (bucket := _BUCKET.fullmatch(found[3])) is None:
        return f"{place}/{found[3]}"
    return f"{place}/{bucket_name(int(bucket[1]), bucket[2], int(bucket[3]))}/{state_name(bucket[4])}"


def flat_place(chain: int, group: int) -> str:
    """Return the part of names for one optimizer of a chain and one group of data parallel ranks."""
    return f"{FLAT}/chained_{chain}/dp_group_idx_{group}"


def bucket_name(buffer: int, dtypes: str, bucket: int) -> str:
    """Return the part of names for a bucket, with the dtypes of its parameters and gradients."""
    return f"gbuf_idx_{buffer}/{dtypes}/bucket_idx_{bucket}"


def buffer_name(buffer: int, dtypes: str) -> str:
    """Return the part of names for a buffer that was saved as a whole."""
    return f"param_state/gbuf_idx_{buffer}/{dtypes}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
