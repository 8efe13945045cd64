"""Names of Megatron's tensors, the same in every layout: those of a model in one process."""

from __future__ import annotations

import re

_LAYER = re.compile(r"(?:^|\.)layers\.(?!\d)")
_EXPERTS = re.compile(r"\.experts\.experts\.(?!\d)")
_EXPERT = re.compile(r"\.experts\.experts\.(?=\d)")
_HALF = re.compile(r"(.*\.linear_fc1\.(?:weight|bias))_([wv])")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_MASTERS = ("param", "fp32_param")


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
    if found is None:
        return None
    name = "master" if found[1] in _MASTERS else found[1]
    return key[: found.start(2)], name
