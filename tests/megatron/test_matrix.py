"""All checkpoints of all layouts load into other layouts, bit for bit.

Each layout is trained and saved once by real Megatron.  Then each layout's ranks build a fresh model (other
weights, an optimizer without state), load the checkpoints of its partners, and are compared by the test.
By day these are other layouts: `test_integration.py` resumes in the same one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from tests import ranks
from tests.megatron import jobs
from tests.megatron.layouts import AT_NIGHT, FAMILIES
from tests.optional import needs
from tests.running.examples import is_night, partners

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("megatron", "Megatron-Core")

run = partial(ranks.run, warm="megatron")

CHOSEN = {
    family: [name for name in layouts if is_night() or name not in AT_NIGHT.get(family, ())]
    for family, layouts in FAMILIES.items()
}
WORLDS = sorted({layout.world for family in FAMILIES.values() for layout in family.values()})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    for world in WORLDS:
        run(world, jobs.save_all, str(folder), world, CHOSEN)
    return folder


@pytest.mark.parametrize("world", WORLDS)
def test_checkpoints_of_all_layouts_load_into_those_of_so_many_ranks(world: int, root: Path) -> None:
    sources = {
        (family, name): [source for source in partners(name, layouts) if is_night() or source != name]
        for family, layouts in CHOSEN.items()
        for name in layouts
    }
    for differing in run(world, jobs.load_all, str(root), world, sources):
        assert differing == {pair: [] for pair in differing}
        assert differing


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_of_all_layouts_are_sound_and_have_the_same_names(family: str, root: Path) -> None:
    first, *others = CHOSEN[family]
    one = reknit.open(root / family / first)
    for name in others:
        assert reknit.verify(root / family / name, "data").problems == ()
        other = reknit.open(root / family / name)
        assert shapes(other) == shapes(one), name
        assert set(other.values["optimizer"]) == set(one.values["optimizer"])


def shapes(checkpoint: Any) -> dict[str, Any]:
    """Return the names and shapes of all tensors, with vocabularies as the layout pads them."""
    found: dict[str, Any] = {}
    for item, tensors in checkpoint.tensors.items():
        for name, spec in tensors.items():
            padded = "word_embeddings" in name or "output_layer" in name
            shape = spec.shape[1:] if padded else spec.shape
            found[f"{item}/{name}"] = (shape, spec.dtype)
    return found
