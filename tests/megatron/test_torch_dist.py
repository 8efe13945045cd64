"""Folders that Megatron-Core itself saved (torch_dist): read in place, and loaded into any layout."""

from __future__ import annotations

import json
import logging
import re
import shutil
import uuid
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import reknit
from reknit.integrations.megatron.sharded import with_keys
from tests import ranks
from tests.megatron import torch_dist_jobs as jobs
from tests.megatron.torch_dist_jobs import CUT_BY_MEGATRON, RESHAPED, SAVED
from tests.optional import needs
from tests.running.examples import is_night

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.megatron.layouts import Layout

    Saved = Callable[..., Path]

pytestmark = needs("megatron", "Megatron-Core")

run = partial(ranks.run, warm="megatron")

PAGES = Path(__file__).parents[2] / "docs" / "howto"
BY_PARAMETER = [name for name, (_, form, _) in SAVED.items() if form in (jobs.FULLY, None)]
SAME: dict[str, dict[str, Layout]] = {name: {"same": layout} for name, (layout, _, _) in SAVED.items()}


AT_NIGHT = ("by-bucket-moe", "float16-moe", "fp32", *CUT_BY_MEGATRON)
CHOSEN = [name for name in SAVED if is_night() or name not in AT_NIGHT]

GROUPS = {
    kind: tuple(name for name in names if name in CHOSEN)
    for kind, names in {
        "by parameter": ("fully", "fully-fp32", "fully-moe", "fully-single-experts"),
        "by buffer": ("by-bucket", "by-bucket-bf16", "by-bucket-moe", "by-buffer"),
        "not distributed": ("float16", "float16-moe", "fp32"),
        "cut": CUT_BY_MEGATRON,
    }.items()
}
"""The folders that are saved together, with the first test that needs one of them."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that gives the folder with these checkpoints, saved by Megatron once."""
    root = tmp_path_factory.mktemp("torch_dist")

    def ensure(*names: str) -> Path:
        for group in GROUPS.values():
            if any(name in group and not (root / name).exists() for name in names):
                run(2, jobs.save_all, str(root), group)
        return root

    return ensure


def _exact(layouts: dict[str, dict[str, Layout]]) -> dict[str, list[str]]:
    return {f"{name} into {way}": [] for name, into in layouts.items() for way in into}


@pytest.mark.parametrize("group", ["by parameter", "by buffer", "not distributed"])
def test_live_models_and_optimizers_load_every_form_in_other_layouts(saved: Saved, group: str) -> None:
    layouts = {name: RESHAPED.get(name) or SAME[name] for name in GROUPS[group]}
    if is_night():
        layouts = {name: {**SAME[name], **into} for name, into in layouts.items()}
    for differing in run(2, jobs.load_each, str(saved(*layouts)), layouts):
        assert differing == _exact(layouts)


def test_scripts_receive_what_megatron_itself_loads(saved: Saved) -> None:
    layouts = {
        "fully": {**SAME["fully"], "pp2": RESHAPED["fully"]["pp2"]},
        "fully-fp32": RESHAPED["fully-fp32"],
        "fully-vpp": {**SAME["fully-vpp"], **RESHAPED["fully-vpp"]},
        "fully-single-experts": SAME["fully-single-experts"],
        "by-bucket": SAME["by-bucket"],
        "by-bucket-moe": SAME["by-bucket-moe"],
        "by-buffer": SAME["by-buffer"],
        "float16": SAME["float16"],
    }
    layouts = {name: into for name, into in layouts.items() if name in CHOSEN}
    for differing in run(2, jobs.load_as_script, str(saved(*layouts)), layouts):
        assert differing == _exact(layouts)


def test_states_in_the_order_of_buffers_load_into_other_numbers_of_data_parallel_ranks(saved: Saved) -> None:
    one: dict[str, dict[str, Layout]] = {
        name: {"dp1": replace(SAVED[name][0], world=1)} for name in ("by-bucket", "by-buffer")
    }
    (differing,) = run(1, jobs.load_each, str(saved(*one)), one)
    assert differing == _exact(one)


def test_states_in_the_order_of_buffers_are_refused_in_other_tensor_parallel_sizes(saved: Saved) -> None:
    other = {
        "by-bucket-bf16": {"dp2": replace(SAVED["by-buffer"][0], bucket=None)},
        "by-buffer": {"not distributed": replace(SAVED["by-buffer"][0], distributed=False)},
    }
    for refused in run(2, jobs.load_each, str(saved(*other)), other):
        for error in refused.values():
            assert "nothing was changed" in error
            assert "in the order of the buffers of its job" in error
            assert "load items=['model']" in error


def test_a_script_whose_state_has_the_optimizer_itself_loads_states_by_buffers(saved: Saved) -> None:
    for answer in run(2, jobs.load_live_optimizer, str(saved("by-buffer")), "by-buffer"):
        assert answer == ([], 7, "unfused")


def test_states_by_buffers_pass_through_a_checkpoint_of_reknit(saved: Saved) -> None:
    for name in ("by-bucket", "by-buffer"):
        assert run(2, jobs.save_and_load_by_buffers, str(saved(name)), name) == [[], []]


def test_gathered_states_that_were_saved_as_one_value_get_the_keys_of_megatron() -> None:
    saved = {"buckets_coalesced": True, 0: {"(torch.bfloat16, torch.float32)": {"param": 1}}}
    dtypes = torch.bfloat16, torch.float32
    assert with_keys(saved) == {"buckets_coalesced": True, 0: {dtypes: {"param": 1}}}


def test_an_optimizer_takes_gathered_states_from_the_state_dict_of_a_script(saved: Saved) -> None:
    assert run(2, jobs.load_into_optimizer, str(saved("by-buffer")), "by-buffer") == [[], []]


def test_an_opened_folder_has_the_tensors_of_a_model_in_one_process(saved: Saved) -> None:
    for name in CHOSEN:
        root = saved(name)
        truth = torch.load(root / f"{name}.truth", weights_only=False)
        with reknit.open(root / name) as checkpoint:
            assert set(checkpoint.items) == {"model", "optimizer", "common", "rng_state"}
            assert checkpoint.step == 7
            assert checkpoint.values["common"]["iteration"] == 7
            found = dict(_tensors(checkpoint, "model"))
            assert not _unlike({key: value for key, value in truth.items() if "@" not in key}, found), name
            states = dict(_tensors(checkpoint, "optimizer"))
        if name not in BY_PARAMETER:
            assert {fqn.split("/")[0] for fqn in states} == {"flat"}
            assert {fqn.rsplit("/", 1)[1] for fqn in states} == {"master", "exp_avg", "exp_avg_sq"}
        elif name not in CUT_BY_MEGATRON:
            wanted = {
                "state/{}/{}".format(*key.split("@")): value
                for key, value in truth.items()
                if "@" in key and not key.endswith("@options")
            }
            copies = {fqn for fqn in states if fqn.endswith("/master")} - wanted.keys()
            for fqn in copies:  # of parameters in full precision
                assert torch.equal(states.pop(fqn), truth[fqn.split("/")[1]])
            assert not _unlike(wanted, states), name


def add_values(folder: Path, nums: tuple[int, ...]) -> None:
    """Write the common state of a folder with values of classes, once with each number of them."""
    common = torch.load(folder / "common.pt", weights_only=False)
    common["plain"] = SimpleNamespace(path=Path("runs"), sizes={(1, 2)})
    for num in nums:
        runs = {f"run{number}": uuid.UUID(int=number) for number in range(num)}
        torch.save(common | runs, folder.with_name(f"common-{num}.pt"))


def test_values_of_classes_in_the_common_state_are_named_and_close_nothing(
    saved: Saved, tmp_path: Path
) -> None:
    folder = shutil.copytree(saved("fully-fp32") / "fully-fp32", tmp_path / "folder")
    run(1, add_values, folder, nums := (0, 1, 3))
    for num in nums:
        runs = [f"run{number}" for number in range(num)]
        shutil.copy(tmp_path / f"common-{num}.pt", folder / "common.pt")
        with reknit.open(folder) as checkpoint:
            assert len([*_tensors(checkpoint, "model")]) > 9
            plain = checkpoint.values["common"]["plain"]
            assert vars(plain) == {"path": PurePosixPath("runs"), "sizes": {(1, 2)}}
            other = checkpoint.manifest.other
            assert other is not None
            assert [entry.name for entry in other.unread] == [f"common/{name}" for name in runs]
            assert all("uuid.UUID" in entry.why for entry in other.unread)


def _tensors(checkpoint: Any, item: str) -> list[tuple[str, torch.Tensor]]:
    return [(fqn, checkpoint.read(item, fqn, framework="torch")) for fqn in checkpoint.tensors[item]]


def _unlike(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> list[str]:
    """Return the names that differ, also in their bytes: padding between parameters may be NaN."""
    both = wanted.keys() & found.keys()
    return sorted(wanted.keys() ^ found.keys()) + [
        name for name in both if _bytes(wanted[name]) != _bytes(found[name])
    ]


def _bytes(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), data


def test_the_code_of_the_page_continues_from_a_folder_of_megatron(saved: Saved) -> None:
    root = saved("by-bucket")
    page = (PAGES / "migrate.md").read_text()
    (snippet,) = re.findall(r"## Megatron-Core\n.*?```\{code-block\} python\n(.*?)```", page, re.DOTALL)[:1]
    (root / "page" / "old").mkdir(parents=True)
    shutil.copytree(root / "by-bucket", root / "page" / "old" / "iter_0000007")
    assert run(2, jobs.run_page, str(root), "by-bucket", snippet) == [[], []]


DAMAGES = ("removed", "half", "empty", "swapped")


@pytest.mark.parametrize("name", ["fully-fp32", "by-bucket"])
def test_damage_of_a_file_is_refused_or_changes_no_value(
    saved: Saved, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = saved(name)
    files = sorted(path.name for path in (root / name).iterdir())
    assert len(files) >= 5
    sound = _values(root / name)
    pairs = zip(files, [*files[1:], files[0]], strict=True)
    for (file, other), damage in product(pairs, DAMAGES):
        folder = shutil.copytree(root / name, tmp_path / f"{file}-{damage}")
        _break(folder / file, folder / other, damage)
        caplog.clear()
        try:
            found = _values(folder)
        except reknit.ReknitError:
            continue
        assert found.keys() == sound.keys(), (file, damage)
        assert not _unlike(found, sound), (file, damage)
        assert file == "common.pt" or damage == "swapped", file
        with caplog.at_level(logging.WARNING, "reknit"):
            _values(folder)
        assert "common.pt" in caplog.text


def _values(folder: Path) -> dict[str, torch.Tensor]:
    with reknit.open(folder) as checkpoint:
        return {
            f"{item}/{fqn}": tensor
            for item in ("model", "optimizer")
            for fqn, tensor in _tensors(checkpoint, item)
        }


def _break(file: Path, other: Path, damage: str) -> None:
    if damage == "removed":
        file.unlink()
    elif damage == "swapped":
        data = file.read_bytes()
        file.write_bytes(other.read_bytes())
        other.write_bytes(data)
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2 if damage == "half" else 0])


def _refusal(folder: Path) -> str:
    with pytest.raises(reknit.ReknitError) as raised:
        reknit.open(folder)
    return f"{raised.value.message} {raised.value.remedy}"


def test_folders_of_other_formats_and_of_saves_that_did_not_end_are_refused_in_words(
    saved: Saved, tmp_path: Path
) -> None:
    folder = tmp_path / "iter_0000007"
    shutil.copytree(saved("fully") / "fully", folder)
    settings = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps(settings | {"sharded_backend": "zarr"}))
    assert "names the format 'zarr', and reknit reads torch_dist" in _refusal(folder)
    (folder / "metadata.json").unlink()
    assert "metadata.json is missing: Megatron writes this file last" in _refusal(folder)
    (folder / "metadata.json").write_text(json.dumps(settings))
    (folder / "common.pt").unlink()
    with reknit.open(folder) as checkpoint:
        assert "embedding.word_embeddings.weight" in checkpoint.tensors["model"]
    with pytest.raises(reknit.MismatchError, match=r"common\.pt is missing"):
        reknit.load(folder, {"common": {"iteration": 0}})


def test_the_folder_above_is_refused_with_the_newest_iteration(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert "iter_0000007, which latest_checkpointed_iteration.txt names" in _refusal(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert "/release, which latest_checkpointed_iteration.txt names" in _refusal(tmp_path)


def save_part_of_rank(path: Path) -> None:
    """Save the object that Megatron hands to a manager of local checkpoints."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict

    weight = ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
    torch.save(MCoreTensorAwareStateDict({"iteration": 7}, {"w": weight}), path)


def test_a_local_part_of_megatron_is_named_with_the_way_to_load_it(tmp_path: Path) -> None:
    place = tmp_path / "local" / "0" / "iter_0000007_0_local.pt"
    place.parent.mkdir(parents=True)
    run(1, save_part_of_rank, place)
    with pytest.raises(reknit.CheckpointNotFoundError, match="one rank's part of a local") as caught:
        reknit.open(place)
    remedy = str(caught.value.remedy)
    assert f"LocalCheckpointManager('{tmp_path}/local')" in remedy
    assert "part.to_state_dict(sharded_state_dict, algo)" in remedy
