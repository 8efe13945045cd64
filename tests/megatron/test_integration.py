"""A script that calls dist_checkpointing's `save` and `load` calls those of reknit instead."""

from __future__ import annotations

import ast
import os
import re
from argparse import Namespace
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import reknit
from reknit.errors import MismatchError, StateError, UsageError
from reknit.integrations.megatron import script as megatron
from tests import ranks
from tests.megatron.layouts import Layout
from tests.optional import needs
from tests.running.examples import at_night

if TYPE_CHECKING:
    from pathlib import Path

    from tests.megatron.gpt import Trained

pytestmark = needs("megatron", "Megatron-Core")

run = partial(ranks.run, warm="megatron")

FULLY = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
OPTIONS = reknit.SaveOptions(durability="process", threads=2, timeout_s=60)


def state_dict(trained: Trained, *, loading: bool, live: bool, stacked: bool = True) -> dict[str, Any]:
    """Return the state dict of a training script."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import ShardedObject
    from megatron.core.transformer.enums import AttnBackend

    metadata = {**FULLY, "non_homogeneous_layers": not stacked}
    chunks = [chunk.module.sharded_state_dict(metadata=metadata) for chunk in trained.chunks]
    names = ["model"] if len(chunks) == 1 else [f"model{n}" for n in range(len(chunks))]
    models = dict(zip(names, chunks, strict=True))
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    mine = {"seed": [*place], "torch": torch.full((3,), float(sum(place)))}
    grid = trained.layout.pp, trained.layout.tp
    state: dict[str, Any] = {
        "args": Namespace(lr=0.5, rank=dist.get_rank(), dtype=torch.bfloat16, backend=AttnBackend.unfused),
        "iteration": 7,
        **models,
        "rng_state": ShardedObject(
            "rng_state", [mine], grid, place, replica_id=parallel_state.get_data_parallel_rank()
        ),
    }
    if live:
        state["optimizer"] = trained.optimizer
    else:
        both = models["model"] if len(chunks) == 1 else models
        state["optimizer"] = trained.optimizer.sharded_state_dict(both, is_loading=loading, metadata=metadata)
    return state


def save(root: str) -> None:
    from tests.megatron import gpt, truth

    trained = gpt.build(Layout(2, tp=2, layers=4))
    for live in (True, False):
        folder = megatron.iteration_folder(f"{root}/{live}", 7)
        state = state_dict(trained, loading=False, live=live)
        assert megatron.save(state, folder, content_metadata={"written by": "us"}, options=OPTIONS) is None
        if dist.get_rank() == 0:
            megatron.mark_latest(f"{root}/{live}", 7)
    known = truth.truth(trained)
    if dist.get_rank() == 0:
        torch.save(known, f"{root}/truth")


def resume_each(root: str, layouts: dict[bool, Layout], stacked: bool) -> list[tuple[list[str], Any]]:
    """Load with a live and with a sharded optimizer."""
    return [resume(root, layout, live, stacked) for live, layout in layouts.items()]


def resume(root: str, layout: Layout, live: bool, stacked: bool) -> tuple[list[str], Any]:
    """Load as a script does, and return the differences and the state dict."""
    from tests.megatron import gpt, truth
    from tests.megatron.jobs import compare

    trained = gpt.build(layout, steps=0, seed=1)
    state = state_dict(trained, loading=True, live=live, stacked=stacked)
    loaded = megatron.load(state, f"{root}/{live}/iter_0000007")
    for number, chunk in enumerate(trained.chunks):
        chunk.module.load_state_dict(loaded["model" if len(trained.chunks) == 1 else f"model{number}"])
    if not live:
        trained.optimizer.load_state_dict(loaded["optimizer"])
    expected = torch.load(f"{root}/truth", weights_only=False)
    wrong = compare(expected, truth.truth(trained))
    args = loaded["args"]
    reported = (args.lr, args.rank, args.dtype, args.backend.name)
    return wrong, (reported, loaded["iteration"], loaded["content_metadata"], loaded["rng_state"])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("script")
    run(2, save, str(folder))
    return folder


def test_a_script_resumes_in_the_same_layout_with_all_its_values(root: Path) -> None:
    same = dict.fromkeys((True, False), Layout(2, tp=2))
    for rank, answers in enumerate(run(2, resume_each, str(root), same, False)):
        for wrong, (args, iteration, content, random) in answers:
            assert wrong == []
            assert args == (0.5, 0, torch.bfloat16, "unfused")
            assert (iteration, content) == (7, {"written by": "us"})
            assert random[0]["seed"] == [0, rank]
            assert torch.equal(random[0]["torch"], torch.full((3,), float(rank)))


def test_a_script_resumes_in_another_layout_whatever_the_key_space(root: Path) -> None:
    others = {True: Layout(2, pp=2, vp=2), False: Layout(2, pp=2)}
    for answers in run(2, resume_each, str(root), others, True):
        assert [wrong for wrong, _ in answers] == [[], []]


def test_markers_are_those_of_megatron_scripts(root: Path) -> None:
    assert (root / "True" / megatron.TRACKER).read_text() == "7"
    assert reknit.latest(root / "True") == str(root / "True" / "iter_0000007")
    assert reknit.open(root / "True" / "iter_0000007").step == 7


def _follow(remedy: str, state: dict[str, Any], folder: str) -> None:
    """Load with each `strict` that a remedy has, for the names that the checkpoint lacks."""
    snippets = re.findall(r"strict=(False|\[[^\]]*\])", remedy)
    assert snippets
    for snippet in snippets:
        strict = ast.literal_eval(snippet.replace("model/head", "model/output_layer"))
        assert megatron.load(state, folder, strict=strict)["iteration"] == 7
    with pytest.raises(MismatchError, match=r"output_layer\.weight"):
        megatron.load(state, folder, strict=["!model/another.*"])
    with pytest.raises(MismatchError, match=r"output_layer\.weight"):
        megatron.load(state, folder, strict=True)


def load_alone(root: str) -> None:
    """Check strict values, common values, and wrong calls, on one rank."""
    from tests.megatron import gpt

    folder = f"{root}/True/iter_0000007"
    assert megatron.load_common_state_dict(folder)["iteration"] == 7
    trained = gpt.build(Layout(1, tied=False), steps=0)
    state = {"model": trained.chunks[0].module.sharded_state_dict()}
    with pytest.raises(MismatchError, match=r"output_layer\.weight") as raised:
        megatron.load(state, folder)
    _follow(str(raised.value.remedy), state, folder)
    _, only_there, only_here = megatron.load(state, folder, strict="return_all")
    assert (only_there, only_here) == (set(), {"model/output_layer.weight"})
    assert megatron.load(state, folder, strict="log_all")["iteration"] == 7
    with pytest.raises(UsageError, match="no strategy"):
        megatron.load(state, folder, sharded_strategy=("torch_dist", 1))
    with pytest.raises(UsageError, match="StrictHandling") as wrong:
        megatron.load(state, folder, strict="very")
    _follow(str(wrong.value.remedy), state, folder)
    with pytest.raises(StateError, match="no Megatron model in the state"):
        reknit.save(f"{root}/alone", {"optimizer": trained.optimizer}).result()


def test_strictness_and_wrong_calls(root: Path) -> None:
    run(1, load_alone, str(root))


def move(root: str) -> None:
    """Load parts into other places of the state dict, and check that values keep their types."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    rank, folder = dist.get_rank(), f"{root}/moved"

    def leaf(key: str, value: float) -> Any:
        data = torch.full((2, 3), value + rank)
        return ShardedTensor.from_rank_offsets(key, data, (0, rank, dist.get_world_size()))

    def thing(key: str, value: Any) -> Any:
        return ShardedObject(key, value, (1,), (0,), replica_id=rank)

    common = {"args": Namespace(size=torch.Size([1]), kinds=OrderedDict(a=[torch.half])), "iteration": 1}
    first = {
        "model": {"a": leaf("a", 1), "deep": [leaf("b", 2)]},
        "more": {"c": leaf("c", 3), "o": thing("o", [4])},
    }
    megatron.save({**first, **common}, folder, options=OPTIONS)
    second = {
        "net": {"x": [leaf("a", 0)], "y": thing("o", None)},
        "more": leaf("b", 0),
        "rest": [{"z": leaf("c", 0)}],
    }
    loaded = megatron.load(second, folder)
    found = loaded["net"]["x"][0], loaded["more"], loaded["rest"][0]["z"]
    assert [tensor.unique().tolist() for tensor in found] == [[1.0 + rank], [2.0 + rank], [3.0 + rank]]
    assert loaded["net"]["y"] == [4]
    assert loaded["args"] == common["args"]
    assert [type(value) for value in vars(loaded["args"]).values()] == [torch.Size, OrderedDict]
    with pytest.raises(MismatchError, match="model/lost"):
        megatron.load({"model": {"a": leaf("a", 1), "b": leaf("b", 1)}, "net": leaf("lost", 0)}, folder)
    around: dict[str, Any] = {"iteration": 1}
    around |= {"a": around, "b": [around]}
    with pytest.raises(StateError, match="contains itself"):
        megatron.save(around, folder)


def test_what_moved_in_the_state_dict_is_found_by_its_key(tmp_path: Path) -> None:
    run(2, move, str(tmp_path))


def save_in_the_background(root: str) -> list[str]:
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    from tests.megatron import gpt

    trained = gpt.build(Layout(2))
    state = state_dict(trained, loading=False, live=True)
    request = megatron.save(state, f"{root}/background/iter_0000009", async_sharded_save=True, step=9)
    seen: list[str] = []
    request.add_finalize_fn(lambda: seen.append(str(reknit.latest(f"{root}/background"))))
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    assert len(queue.maybe_finalize_async_calls(blocking=True)) == 1
    reknit.close()
    return seen


def test_a_save_in_the_background_is_one_of_megatrons_queue(root: Path) -> None:
    for seen in run(2, save_in_the_background, str(root)):
        assert seen == [str(root / "background" / "iter_0000009")]


def saved_by_itself(folder: str) -> None:
    from megatron.core import dist_checkpointing

    sharded = dist_checkpointing.ShardedTensor.from_rank_offsets("w", torch.ones(4))
    os.makedirs(folder)
    dist_checkpointing.save({"w": sharded, "iteration": 3}, folder)


@at_night("test_torch_dist.py opens folders of whole models by day")
def test_what_megatron_saved_is_opened_in_place(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "iter_0000003"
    run(1, saved_by_itself, str(folder))
    with reknit.open(folder) as checkpoint:
        assert torch.equal(checkpoint.read("model", "w", framework="torch"), torch.ones(4))
        assert checkpoint.step == 3
    with pytest.raises(
        reknit.CheckpointNotFoundError, match="iter_0000003 in it is a checkpoint of Megatron"
    ):
        reknit.open(folder.parent)
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(reknit.CheckpointNotFoundError, match="Megatron's own checkpoints"):
        reknit.open(folder.parent)


def test_a_folder_of_the_older_layout_is_called_by_its_name(tmp_path: Path) -> None:
    for name in ("mp_rank_00", "mp_rank_00_000"):
        (tmp_path / name / name).mkdir(parents=True)
        torch.save({"model": {}}, tmp_path / name / name / "model_optim_rng.pt")
        with pytest.raises(reknit.CheckpointNotFoundError, match=r"a checkpoint of Megatron \(torch\)"):
            reknit.open(tmp_path / name)
