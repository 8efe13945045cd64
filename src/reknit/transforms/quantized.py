"""The saved tensors that are quantized: integers or narrow floats, multiplied by scales beside them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from reknit.types.dtype import FLOATS, INTEGERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_ENDS = re.compile(r"[./:]")
_SCALE = re.compile(r"scale|absmax|quant_map|zero_?point|qzeros|codebook|^_?scb$", re.IGNORECASE)
_ACTIVATION = re.compile(r"input|output|act|[kqv]_scale", re.IGNORECASE)
"""Scales of inputs and outputs, which say less about a weight than its own."""
_PACKED = (
    (re.compile(r"(^|[./:])_?([^./:]+)_qdata$"), r"\1\2"),
    (re.compile(r"(_packed|_blocks|_quantized|[.:](_data|qdata|int_data|_codes|codes))$"), ""),
    (re.compile(r"(^|[./:])(qweight|W_q)$"), r"\1weight"),
)
"""Names of packed values, and of the plain tensor: torchao, compressed-tensors, MXFP4, quanto, GPTQ, HQQ."""
_MOST_LEVELS = 3


class Quantized(NamedTuple):
    """A quantized tensor of a checkpoint, its dtype, and the tensor or value that has its scale."""

    name: str
    dtype: str
    scale: str

    @property
    def kind(self) -> str:
        """The dtype and the last part of the scale's name, which all layers of a model share."""
        return f"{self.dtype} {self.scale[len(_folder(self.scale)) :]}"


class Scales:
    """The names in a checkpoint that look like scales, or like packed values."""

    def __init__(self, names: Iterable[str]) -> None:
        self._below: dict[str, list[str]] = {}
        self._packed: dict[str, str] = {}
        for name in names:
            ends = [found.end() for found in _ENDS.finditer(name)]
            if _SCALE.search(name[ends[-1] if ends else 0 :]):
                for end in ends[-_MOST_LEVELS:] or [0]:
                    self._below.setdefault(name[:end], []).append(name)
            elif (plain := _plain(name)) != name:
                self._packed.setdefault(plain, name)

    def packed(self, name: str) -> str:
        """Return the name of the values that a checkpoint has in place of a tensor, or else this name."""
        return self._packed.get(name, name)

    def of(self, name: str, dtype: str) -> str | None:
        """Return the name of the scale of a tensor, or None if the tensor is not quantized.

        The name of a scale begins with that of its tensor, or is in the same folder.  The latter says enough
        about types of at most 8 bits and about packed values only.
        """
        plain = _plain(name)
        beside = [one for one in self._below.get(_folder(name), ()) if one != name]
        own = [one for one in beside if one.startswith(tuple(plain + end for end in "_./:"))]
        if not own and (plain != name or _is_narrow(dtype)):
            own = [one for one in beside if _folder(one) == _folder(name)]
        return min(own, key=lambda one: bool(_ACTIVATION.search(one[len(_folder(one)) :])), default=None)


def quantized(
    wanted: Mapping[str, str], saved: Mapping[str, str], names: Iterable[str]
) -> Iterator[tuple[str, Quantized]]:
    """Yield the wanted floats, by name, whose values the checkpoint has in quantized form.

    `wanted` and `saved` map the names of tensors to dtypes, `names` are those of all tensors and values of
    the checkpoint.  A tensor without any scale is not quantized: its elements are the values.
    """
    scales = Scales(names)
    for name, dtype in wanted.items():
        source = name if name in saved else scales.packed(name)
        own = saved.get(source, dtype)
        if dtype not in FLOATS or own == dtype or not (_is_narrow(own) or own in INTEGERS):
            continue
        if (scale := scales.of(source, own)) is not None:
            yield name, Quantized(source, own, scale)


def parts_of_quantized(tensors: Mapping[str, str]) -> set[str]:
    """Return the floats among tensors, by name with dtypes, without whose exact bits others have no value.

    These are scales of any name, and all tensors beside a quantized one in its module, except a bias.
    """
    scales = Scales(tensors)
    modules = {
        _folder(name)
        for name, dtype in tensors.items()
        if (_is_narrow(dtype) or dtype in INTEGERS) and scales.of(name, dtype) is not None
    }
    exact = set()
    for name, dtype in tensors.items():
        folder = _folder(name)
        last = name[len(folder) :]
        beside = bool(folder) and folder in modules and not last.endswith("bias")
        if dtype in FLOATS and modules and (beside or _SCALE.search(last)):
            exact.add(name)
    return exact


def _is_narrow(dtype: str) -> bool:
    """Return whether a type has at most 8 bits."""
    return dtype.startswith(("float8", "float4")) or dtype in ("int8", "uint8")


def _plain(name: str) -> str:
    """Return the name of the tensor that packed values stand for; other names as they are."""
    for expression, plain in _PACKED:
        if expression.search(name):
            return expression.sub(plain, name)
    return name


def _folder(name: str) -> str:
    """Return the beginning of a name, up to its last part."""
    ends = [found.end() for found in _ENDS.finditer(name)]
    return name[: ends[-1]] if ends else ""
