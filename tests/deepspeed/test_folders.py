"""Folders that DeepSpeed itself wrote: read whole and exactly, or refused with the reason.

The table on the page about DeepSpeed has these layouts.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import reknit
from reknit.errors import FormatError
from tests import ranks
from tests.deepspeed import folders
from tests.integrations.formats.damage import FLIPPED, KINDS, damages, wrong_in_silence
from tests.optional import needs
from tests.running.examples import at_night

pytestmark = needs("deepspeed", "DeepSpeed")

CONVERTED = ("z1-bf16", "z3-small-groups", "z2-round-robin")
NAMELESS = ("z0-bf16", "experts-z0")
REFUSED = {
    "tied-stage": "layer_00-model_states.pt are not recorded: a pipeline that ties layers",
    "unnamed-stage": "a pipeline without ZeRO",
    "tensor-parallel": "several tensor-parallel ranks",
}
EXACT = [name for name in folders.ALL if name not in (*REFUSED, *NAMELESS, "z0-fp32", "z2-later")]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("deepspeed")
    on_two = [*folders.DENSE, *folders.PIPELINES, *folders.OTHERS]
    ranks.run(2, folders.write, str(place), on_two, warm="deepspeed", timeout=240)
    ranks.run(4, folders.write, str(place), list(folders.EXPERTS), warm="deepspeed")
    ranks.run(1, folders.convert, str(place), CONVERTED, warm="deepspeed")
    return place


def truth(root: Path, name: str) -> dict[str, dict[str, Any]]:
    return torch.load(root / f"{name}.truth", weights_only=True)  # type: ignore[no-any-return]


def read(path: Path) -> dict[str, dict[str, Any]]:
    with reknit.open(path) as checkpoint:
        return checkpoint.read_all()


def same(found: Any, value: Any) -> bool:
    """Return whether a value that was read is that of the ranks; ZeRO-3 saves its weights in fp32 only."""
    if not isinstance(value, torch.Tensor):
        return bool(found == {k: v for k, v in value.items() if k in found} and len(found) > 3)
    return found.shape == value.shape and torch.equal(found.to(value.dtype), value)


def unlike(found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]], item: str) -> list[str]:
    """Return the names under which an item has other values than expected, or none, or too many."""
    wanted = dict(expected[item])
    for name, value in expected["model"].items():
        if item == "optimizer" and value.dtype == torch.float32:
            wanted.pop(f"state/{name}/master", None)
    both = wanted.keys() & found[item].keys()
    return sorted(
        (wanted.keys() ^ found[item].keys()) | {n for n in both if not same(found[item][n], wanted[n])}
    )


def test_a_folder_has_all_that_the_ranks_had(root: Path) -> None:
    for name in EXACT:
        found, expected = read(root / name / "tag"), truth(root, name)
        assert unlike(found, expected, "model") == [], name
        if name == "z2-round-robin":  # DeepSpeed itself shows the states of other parameters
            for key, value in expected["model"].items():
                if value.dtype == torch.bfloat16:
                    assert torch.equal(found["optimizer"][f"state/{key}/master"].bfloat16(), value), key
        else:
            unsaved = [key for key in expected["optimizer"] if "groups" in key and name == "z2-elastic"]
            assert unlike(found, expected, "optimizer") == sorted(unsaved), name
        assert found["engine"]["global_steps"] == 2, name


@at_night("transformers takes 8 s")
def test_a_folder_of_the_trainer_of_transformers_has_all_that_it_had(root: Path) -> None:
    pytest.importorskip("transformers")
    ranks.run(1, folders.train_with_transformers, str(root), warm="deepspeed", joined=False)
    found, expected = read(root / "trainer/checkpoint-2/global_step2"), truth(root, "trainer")
    assert unlike(found, expected, "model") == []
    assert unlike(found, expected, "optimizer") == []


def test_states_without_zero_have_the_numbers_of_their_parameters(root: Path) -> None:
    found = read(root / "z0-fp32" / "tag")
    assert unlike(found, truth(root, "z0-fp32"), "model") == []
    assert found["optimizer"]["state/0/exp_avg"].shape == (7, 5)
    assert found["optimizer"]["state/2/step"] == 2


def test_states_without_names_are_not_read_and_the_log_has_the_reason(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in NAMELESS:
        caplog.clear()
        found = read(root / name / "tag")
        assert unlike(found, truth(root, name), "model") == []
        assert not found.get("optimizer")
        assert "cannot read 1 entry: optimizer (without ZeRO" in caplog.text, name


def test_a_layout_that_cannot_be_read_whole_is_refused_by_name(root: Path) -> None:
    for name, why in REFUSED.items():
        with pytest.raises(FormatError, match=why):
            reknit.open(root / name / "tag")


def test_a_universal_folder_has_all_that_the_converted_one_has(root: Path) -> None:
    for name in ("z1-bf16", "z3-small-groups"):
        found, expected = read(root / "universal" / name), truth(root, name)
        assert unlike(found, expected, "model") == []
        assert unlike(found, expected, "optimizer") == []
        weight = found["model"]["middle.weight"]
        assert torch.equal(weight, found["optimizer"]["state/middle.weight/master"])


def test_states_that_the_converter_exchanged_are_not_read_and_the_log_has_the_reason(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, expected = root / "universal" / "z2-round-robin", truth(root, "z2-round-robin")
    held = torch.load(path / "zero/frozen.weight/fp32.pt", weights_only=True)["param"]
    assert torch.equal(held.bfloat16(), expected["model"]["middle.weight"])
    found = read(path)
    assert unlike(found, expected, "model") == []
    assert not found.get("optimizer")
    assert "a job has round_robin_gradients, DeepSpeed's converter" in caplog.text


@pytest.mark.parametrize(("name", "layout"), [("z2-bf16", "z3-bf16"), ("z3-fp32", "z1-fp32")])
def test_training_goes_on_from_a_folder_with_another_stage(name: str, layout: str, root: Path) -> None:
    assert ranks.run(2, folders.continued, str(root), name, layout, warm="deepspeed") == [[], []]


@pytest.mark.parametrize("name", ["z2-bf16", "z3-bf16", "experts", "two-stages", "universal"])
def test_a_file_that_is_absent_short_exchanged_or_too_many_is_noticed(
    name: str, root: Path, tmp_path: Path
) -> None:
    folder = root / "universal" / "z3-small-groups" if name == "universal" else root / name / "tag"
    whole, wrong = read(folder), {}
    for damage, broken in damages(folder, tmp_path, kinds=[kind for kind in KINDS if kind != FLIPPED]):
        if found := wrong_in_silence(broken, whole):
            wrong[damage] = found
    assert wrong == {}


def test_a_byte_of_a_tensor_that_changed_is_found_by_verify(root: Path, tmp_path: Path) -> None:
    folder = root / "z2-bf16" / "tag"
    whole, wrong = read(folder), 0
    for damage, broken in damages(folder, tmp_path, kinds=[FLIPPED], files="*rank_1*", flips=20):
        if wrong_in_silence(broken, whole):
            wrong += 1
            assert "its checksum is another" in reknit.verify(broken, "data").problems[0], damage
    assert wrong


PARTITION = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
IN_FP32 = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
MIXED = [
    ("z2-later", PARTITION, "their steps differ"),
    ("z2-round-robin", PARTITION, "elements"),
    ("z1-bf16", PARTITION, "ZeRO differ"),
    ("z3-bf16", "zero_pp_rank_0_mp_rank_00_model_states.pt", "are of different saves"),
    ("z2-fp32", IN_FP32, "are files of one rank"),
    ("two-stages", "layer_01-model_states.pt", "layer_01-model_states.pt are not recorded"),
]


def test_files_of_two_saves_are_refused_by_name(root: Path, tmp_path: Path) -> None:
    for other, file, words in MIXED:
        shutil.copytree(root / "z2-bf16" / "tag", tmp_path / other)
        shutil.copy(root / other / "tag" / file, tmp_path / other / file)
        with pytest.raises(FormatError, match=words):
            reknit.open(tmp_path / other)


def test_the_file_of_a_rank_that_is_missing_is_named(root: Path, tmp_path: Path) -> None:
    for name in ("z2-bf16", "z3-bf16"):
        shutil.copytree(root / name / "tag", tmp_path / name)
        (tmp_path / name / PARTITION).unlink()
        with pytest.raises(FormatError, match=f"lacks {PARTITION}"):
            reknit.open(tmp_path / name)


def test_values_of_other_types_than_deepspeed_has_are_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "z3-bf16" / "tag", tmp_path / "tag")
    file = tmp_path / "tag" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    torch.save({**state, "shared_params": 3}, file)
    with pytest.raises(FormatError, match="values in an unknown form: AttributeError"):
        reknit.open(tmp_path / "tag")


@pytest.mark.parametrize("layout", ["partitions", "universal"])
def test_a_state_of_several_tensors_is_not_read_and_all_others_are(
    layout: str, root: Path, tmp_path: Path
) -> None:
    folder = root / "universal/z1-bf16" if layout == "universal" else root / "z2-bf16/tag"
    expected = read(folder)["optimizer"]
    shutil.copytree(folder, tmp_path / "tag")
    for number, file in enumerate(sorted((tmp_path / "tag").rglob("*optim_states.pt"))):
        if "mp_rank_00_optim" not in file.name:
            continue
        saved = torch.load(file, weights_only=False)
        base = saved["optimizer_state_dict"]["base_optimizer_state"]
        for state in (base["state"] if isinstance(base, dict) else base).values():
            state["history"] = [torch.full((2,), float(number))]
        torch.save(saved, file)
    for file in (tmp_path / "tag").glob("zero/*/exp_avg.pt"):
        torch.save({"param": [torch.ones(2)]}, file)
    lost = "exp_avg" if layout == "universal" else "history"
    with reknit.open(tmp_path / "tag") as checkpoint:
        unread = {entry.name for entry in checkpoint.manifest.unread}
        found = checkpoint.read_all()["optimizer"]
    assert unread
    assert {name.rpartition("/")[2] for name in unread} == {lost}
    left = {name: value for name, value in expected.items() if name.rpartition("/")[2] != lost}
    assert found.keys() == left.keys()


def test_states_that_were_offloaded_to_disks_are_refused(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "z3-bf16" / "tag", tmp_path / "tag")
    (tmp_path / "tag" / "offloaded_tensors" / "rank00").mkdir(parents=True)
    (tmp_path / "tag" / "offloaded_tensors" / "rank00" / "0.tensor.swp").write_bytes(b"states")
    with pytest.raises(FormatError, match="offload to NVMe"):
        reknit.open(tmp_path / "tag")


def test_a_folder_of_several_tags_names_them_as_places_to_open(root: Path) -> None:
    (root / "z2-bf16" / "latest").write_text("tag-that-is-gone")
    with pytest.raises(reknit.CheckpointNotFoundError, match="DeepSpeed's own checkpoints") as refused:
        reknit.open(root / "z2-bf16")
    assert "pass one of the folders in it" in str(refused.value)


PAGE = Path(__file__).parents[2] / "docs/howto/deepspeed.md"
ROWS: dict[str, tuple[str, ...]] = {
    "ZeRO-1, 2 and 3, in fp32, bf16 and fp16": (
        *("z1-fp32", "z1-bf16", "z2-fp32", "z2-bf16", "z2-fp16", "z3-fp32", "z3-bf16", "z3-fp16"),
    ),
    "frozen and tied parameters, buffers": ("z1-fp32", "z2-bf16", "z3-bf16"),
    "several groups, `sub_group_size`, `parameter_alignment`, `round_robin_gradients`": (
        *("z3-small-groups", "z2-aligned", "z2-round-robin"),
    ),
    "bf16 with gradients in fp32": ("z1-fp32-gradients",),
    "offload to the CPU": ("z3-offload",),
    "`elastic_checkpoint`": ("z2-elastic",),
    "a mixture of experts, with ZeRO-1 and 2": ("experts", "experts-z2", "experts-data-first"),
    "a pipeline, of any number of stages": ("one-stage", "two-stages"),
    "universal, of ZeRO-1, 2 and 3": ("z1-bf16", "z3-small-groups"),
    "without ZeRO, in fp32": ("z0-fp32",),
    "without ZeRO, in bf16 or with experts": NAMELESS,
    "universal, after `round_robin_gradients`": ("z2-round-robin",),
    "a pipeline that ties layers, or freezes a whole layer": ("tied-stage",),
    "a pipeline without ZeRO": ("unnamed-stage",),
    "tensor parallelism (several `mp_rank`)": ("tensor-parallel",),
}
"""The layouts of the page that are real folders here."""


def test_the_page_says_of_each_layout_what_happens_to_it(root: Path) -> None:
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    for layout, names in ROWS.items():
        (said,) = [row[1].strip() for row in rows if row[0] == f"| {layout}"]
        for name in names:
            path = root / "universal" / name if layout.startswith("universal") else root / name / "tag"
            try:
                with reknit.open(path) as checkpoint:
                    happens = "whole" if checkpoint.tensors["optimizer"] else "the model"
            except FormatError:
                happens = "refused"
            assert happens == said, (layout, name)
