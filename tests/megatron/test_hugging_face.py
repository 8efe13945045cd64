"""Checkpoints of Megatron load into Hugging Face models and the other way round, with equal logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.integrations import model_maps
from tests import ranks
from tests.integrations.hugging_face import tiny
from tests.megatron import family_jobs
from tests.megatron.layouts import Layout
from tests.running.examples import at_night, thinned

if TYPE_CHECKING:
    from pathlib import Path

TOLERANCE = 2e-5
"""For logits around one in float32; the two libraries add in different orders."""

Root = tuple["Path", dict[str, Any]]

FAMILIES = thinned(tiny.FAMILIES, 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """Return a folder with a checkpoint of each family from each library, and the logits of Megatron."""
    folder = tmp_path_factory.mktemp("families")
    configs = {}
    for kind in FAMILIES:
        model = tiny.build(kind, seed=4)
        reknit.save(folder / f"{kind}-hugging_face", {"model": model})
        configs[kind] = model.config.to_dict()
    (answers,) = ranks.run(1, family_jobs.both, configs, Layout(1), folder, warm="megatron")
    return folder, answers


def load_from_megatron(path: Path, kind: str) -> Any:
    model = tiny.build(kind, seed=3)
    rules = model_maps.megatron_to_hugging_face(model.config)
    report = reknit.load(path, {"model": model}, options=reknit.LoadOptions(transforms=rules))
    assert not report.missing
    assert not report.unexpected
    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_family_has_equal_logits_in_both_directions(kind: str, root: Root) -> None:
    folder, answers = root
    if isinstance(answers[kind], str):
        pytest.fail(answers[kind])
    saved, loaded = answers[kind]
    assert float(saved.std()) > 0.1
    assert torch.allclose(
        tiny.logits(load_from_megatron(folder / f"{kind}-megatron", kind)), saved, atol=TOLERANCE
    )

    first = tiny.build(kind, seed=4)
    assert not torch.allclose(tiny.logits(first), saved, atol=0.05)
    assert torch.allclose(tiny.logits(first), loaded, atol=TOLERANCE)
    again = load_from_megatron(folder / f"{kind}-again", kind)
    for name, tensor in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("llama", Layout(2, tp=2), id="llama-tp2"),
        pytest.param(
            "gpt_oss",
            Layout(2, tp=2, etp=1),
            id="gpt-oss-tp2",
            marks=at_night("the others are cut, and have experts"),
        ),
        pytest.param("qwen3_moe", Layout(2, experts=4, ep=2), id="qwen3-moe-ep2"),
    ],
)
def test_logits_are_those_of_the_other_library_on_two_ranks(
    kind: str, layout: Layout, tmp_path: Path
) -> None:
    first = tiny.build(kind, seed=4)
    reknit.save(tmp_path / f"{kind}-hugging_face", {"model": first})
    configs = {kind: first.config.to_dict()}
    answers = ranks.run(2, family_jobs.both, configs, layout, tmp_path, warm="megatron")
    if isinstance(answers[0][kind], str):
        pytest.fail(answers[0][kind])
    saved, loaded = answers[0][kind]
    assert torch.allclose(tiny.logits(first), loaded, atol=TOLERANCE)
    model = load_from_megatron(tmp_path / f"{kind}-megatron", kind)
    assert torch.allclose(tiny.logits(model), saved, atol=TOLERANCE)
