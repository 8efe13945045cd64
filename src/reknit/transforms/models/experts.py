"""Hugging Face's names of experts and their router: in models, where experts are stacked, and in files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reknit.transforms.models.steps import renamed, split, unstack

if TYPE_CHECKING:
    from reknit.transforms.base import Rule
    from reknit.transforms.models.families import Family

_LAYER = "model.layers.{i}."


def router(family: Family) -> str:
    """Return the name of the weight of the router."""
    return f"{_LAYER}{family.block}.{family.router}.weight"


def stacked(family: Family) -> tuple[str, str]:
    """Return the names of the stacked experts: gate and up, and down."""
    experts = f"{_LAYER}{family.block}.experts"
    return f"{experts}.gate_up_proj", f"{experts}.down_proj"


def file_rules(family: Family) -> list[Rule]:
    """Return the rules from the names in models to those in files, which differ for experts only."""
    if not family.file_experts:
        return []
    place, (gate, up, down) = family.file_experts
    here = f"{_LAYER}{place}."
    first, second = stacked(family)
    return [
        unstack(first, f"{here}gate_up"),
        split(f"{here}gate_up", [f"{here}{gate}.weight", f"{here}{up}.weight"], (1, 1)),
        unstack(second, f"{here}{down}.weight"),
        *(renamed({router(family): _LAYER + family.file_router}) if family.file_router else ()),
    ]
