"""Which layouts are saved and loaded: those of one family can take each other's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

WORDS = 13


@dataclass(frozen=True)
class Layout:
    """The parallel sizes and the kind of a model; odd sizes cut flat ranges in the middle of rows.

    Of a `mixed` model, some norms are in full precision, and equal ones in the same group are not.
    """

    world: int
    tp: int = 1
    pp: int = 1
    vp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    experts: int | None = None
    layers: int = 4
    hidden: int = 24
    ffn: int = 28
    kv: int = 2
    tied: bool = True
    swiglu: bool = True
    bf16: bool = False
    mixed: bool = False
    distributed: bool = True
    bucket: int | None = None
    overlap: bool = False
    instances: int = 1
    multiple: int = 1

    @property
    def words(self) -> int:
        """Rows of the embedding: a multiple of the tensor parallel size and another, as Megatron pads it."""
        return WORDS + (-WORDS) % (self.tp * self.multiple)


FAMILIES: dict[str, dict[str, Layout]] = {
    "dense": {
        "one": Layout(1),
        "dp3-irregular": Layout(3),
        "tp2-dp2": Layout(4, tp=2),
        "pp2-dp2-tied": Layout(4, pp=2),
        "tp4": Layout(4, tp=4),
        "vpp2": Layout(2, pp=2, vp=2),
        "tp2-plain": Layout(2, tp=2, distributed=False),
        "dp2-buckets": Layout(2, bucket=2000, overlap=True),
        "cp2": Layout(2, cp=2),
        "instances2": Layout(2, instances=2),
    },
    "untied": {
        "one": Layout(1, tied=False, swiglu=False, kv=4, layers=2),
        "tp2-pp2": Layout(4, tp=2, pp=2, tied=False, swiglu=False, kv=4, layers=2),
    },
    "bf16": {
        "one": Layout(1, bf16=True, layers=2),
        "dp2": Layout(2, bf16=True, layers=2),
        "tp2": Layout(2, tp=2, bf16=True, layers=2),
        "dp2-float16-optimizer": Layout(2, bf16=True, distributed=False, layers=2),
        "pp2-float16-optimizer": Layout(2, pp=2, bf16=True, distributed=False, layers=2),
    },
    "mixed": {
        "one": Layout(1, bf16=True, mixed=True, layers=2),
        "dp3-irregular": Layout(3, bf16=True, mixed=True, layers=2),
        "dp2-float16-optimizer": Layout(2, bf16=True, mixed=True, distributed=False, layers=2),
        "tp2-dp2": Layout(4, tp=2, bf16=True, mixed=True, layers=2),
    },
    "mixed-moe": {
        "one": Layout(1, experts=4, bf16=True, mixed=True, layers=2),
        "ep2": Layout(2, experts=4, ep=2, bf16=True, mixed=True, layers=2),
    },
    "moe": {
        "one": Layout(1, experts=4, layers=2),
        "ep2-etp2": Layout(4, experts=4, ep=2, etp=2, layers=2),
        "ep2": Layout(2, experts=4, ep=2, layers=2),
        "ep2-plain": Layout(2, experts=4, ep=2, layers=2, distributed=False),
    },
}

AT_NIGHT = {
    "dense": ("tp4", "cp2", "instances2"),
    "bf16": ("dp2", "pp2-float16-optimizer"),
    "mixed": ("one",),
    "moe": ("ep2",),
}
"""Layouts that the matrix leaves out by day, since others are like them."""
