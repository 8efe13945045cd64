"""Checkpoints of torchtitan load into Hugging Face models and the other way round, with equal logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.integrations import model_maps
from tests import ranks
from tests.integrations.hugging_face import tiny, titan_jobs
from tests.optional import needs
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("torchtitan", "torchtitan")

TOLERANCE = 2e-5
"""For logits around one in float32; the two libraries add in different orders."""
CASES = {
    f"{kind}-{'fused' if fused else 'apart'}": (kind, fused)
    for kind in ("llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")
    for fused in (True, False)
    if fused or kind != "deepseek_v3"  # whose queries, keys and values are never fused
}
Root = tuple["Path", dict[str, Any]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    """Return a folder with a checkpoint of each family from each library, and the logits of torchtitan."""
    folder = tmp_path_factory.mktemp("families")
    cases = {}
    for case, (kind, fused) in CASES.items():
        model = tiny.build(kind, seed=4)
        if fused:
            reknit.save(folder / f"{kind}-hugging_face", {"model": model})
        cases[case] = kind, fused, model.config.to_dict()
    (answers,) = ranks.run(1, titan_jobs.both, cases, folder, warm="torchtitan")
    return folder, answers


def to_hugging_face(path: Path, kind: str) -> Any:
    model = tiny.build(kind, seed=3)
    options = reknit.LoadOptions(transforms=model_maps.torchtitan_to_hugging_face(model.config))
    report = reknit.load(path, {"model": model}, options=options)
    assert not report.missing
    return model


@table("case", CASES)
def test_a_family_has_equal_logits_in_both_directions(case: str, root: Root) -> None:
    (folder, answers), (kind, _) = root, CASES[case]
    if isinstance(answers[case], str):
        pytest.fail(answers[case])
    saved, loaded = answers[case]
    assert float(saved.std()) > 0.1
    assert torch.allclose(tiny.logits(to_hugging_face(folder / f"{case}-titan", kind)), saved, atol=TOLERANCE)

    first = tiny.build(kind, seed=4)
    assert not torch.allclose(tiny.logits(first), saved, atol=0.05)
    assert torch.allclose(tiny.logits(first), loaded, atol=TOLERANCE)
    again = to_hugging_face(folder / f"{case}-again", kind)
    for name, tensor in first.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
