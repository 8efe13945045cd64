"""Every layout's checkpoint loads into other layouts, bit for bit, and all of it.

Each layout is trained and saved once by real processes.  Then each layout's processes build a target and load
checkpoints of several (at night: all) layouts one after another, each time over other weights and optimizers
without state.  The loaded state is joined from the memory of all ranks and compared with the saved one, which
was joined in the same way.  Before the save, all elements get other bits, so that there are numbers of every
kind and not-a-numbers with payloads.  Loads are in full, lenient, or through transforms, in turn (at night
each in every way), and once for each target with values of every kind beside the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import reknit
from tests import values
from tests.ranks import run
from tests.running.examples import is_night, partners
from tests.torchrun import flat_truth, models

if TYPE_CHECKING:
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

AT_NIGHT = (
    "fsdp2-2",
    "fsdp2-4",
    "fsdp1gradop-3",
    "fsdp1none-2",
    "1group-fsdp2-2",
    "1group-fsdp1flatfull-2",
    "1group-fsdp1flatnone-2",
)
"""Layouts of which another one with the same kinds of shards is tested by day."""
LAYOUTS, ONE_GROUP = (
    [layout for layout in every if is_night() or layout not in AT_NIGHT]
    for every in (models.LAYOUTS, models.ONE_GROUP)
)
RANKS = models.LAYOUTS | models.ONE_GROUP
OPTIONS = reknit.SaveOptions(durability="process", threads=2, timeout_s=60)


def scheduler_state(trained: models.Trained) -> dict[str, Any]:
    return dict(trained.schedulers[0].state_dict())


Answers = dict[str, dict[tuple[str, str], list[str]]]
WAYS = ("full", "lenient", "renamed")
RENAMED: list[Any] = [
    reknit.transforms.names({"model/": "weights/"}),
    reknit.transforms.rename("layers.{i}.up.weight", "up.{i}"),
    reknit.transforms.rename("up.{i}", "layers.{i}.up.weight"),
]


def beside(trained: models.Trained, content: int) -> dict[str, Any]:
    """Return values of every kind, and tensors of every dtype, cut as the layout cuts them."""
    cut = {name: values.bits(name, content) for name in values.DTYPES}
    if trained.mesh is not None:
        cut = {name: by_rows(tensor, trained.mesh) for name, tensor in cut.items()}
    return (values.filled() if content else values.blank()) | {"cut": cut}


def by_rows(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor cut by rows over the first dimension of a mesh; torch cannot do it with every dtype."""
    placed: list[Any] = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    data = distribute_tensor(tensor.view(torch.uint8), mesh, placed, src_data_rank=None)
    local = data.to_local().view(tensor.dtype)
    return DTensor.from_local(local, mesh, placed, shape=tensor.shape, stride=tensor.stride())


def scramble(trained: models.Trained) -> None:
    """Replace the bits of every element, equal bits by equal ones, such that not-a-numbers are among them."""
    states = [state for optimizer in trained.optimizers for state in optimizer.state.values()]
    held = [tensor for part in trained.parts for tensor in (*part.parameters(), *part.buffers())]
    held += [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    for tensor in {id(tensor): tensor for tensor in held}.values():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        if local.dtype == torch.float32 and local.ndim:
            whole = local.view(torch.int32)
            whole.mul_(-1640531527)


def save(layout: str, root: str) -> None:
    trained = models.build(layout)
    scramble(trained)
    state = models.state(trained) | {"values": beside(trained, 1)}
    report = reknit.save(f"{root}/{layout}", state, step=2, options=OPTIONS).result()
    assert report.warnings == (), report.warnings
    truth = models.truth(trained)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save((truth, scheduler_state(trained), trained.progress), f"{root}/{layout}.truth")


def save_several(layouts: list[str], root: str) -> None:
    for layout in layouts:
        save(layout, root)


def forget(trained: models.Trained) -> None:
    """Make a target like a new one: with other weights, and optimizers without states."""
    with torch.no_grad():
        for part in trained.parts:
            for tensor in (*part.parameters(), *part.buffers()):
                tensor.fill_(7)
    for optimizer in trained.optimizers:
        optimizer.state.clear()
    trained.progress.update(step=0, losses=[])


def load_several(root: str, sources: dict[str, list[tuple[str, str]]]) -> Answers:
    """Load into each of the layouts; return the names that differ, by layout and checkpoint."""
    return {layout: load_all(layout, root, saved) for layout, saved in sources.items()}


def load_all(layout: str, root: str, saved: list[tuple[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Load each checkpoint in its way into a target like a new one; return the names that differ."""
    differing: dict[tuple[str, str], list[str]] = {}
    # The groups of ranks are made only once, as that takes longer than the loads.
    trained = models.build(layout, steps=0, seed=1)
    for source, way in saved:
        forget(trained)
        state = models.state(trained)
        item = "model"
        if way == "renamed":
            item = "weights"
            state[item] = state.pop("model")
        if way == "lenient":
            state["more"] = {"tensor": torch.ones(2), "value": 5}
        if source == layout:
            state["values"] = beside(trained, 0)
        options = reknit.LoadOptions(timeout_s=60, transforms=RENAMED if way == "renamed" else ())
        report = reknit.load(f"{root}/{source}", state, strict=way != "lenient", options=options)
        assert bool(report.missing) == (way == "lenient")
        assert not report.unexpected
        assert report.step == 2
        mine = {f"{item}/{name}" for part in trained.parts for name in plain_names(part)}
        assert mine <= set(report.restored)
        wrong = differing[source, way] = unlike_saved(trained, state, f"{root}/{source}.truth")
        if source == layout:
            wrong += values.differing(beside(trained, 1), state["values"], "values")
        if way == "lenient" and (state["more"]["tensor"].sum(), state["more"]["value"]) != (2, 5):
            wrong.append("more")
    return differing


def unlike_saved(trained: models.Trained, state: dict[str, Any], truth: str) -> list[str]:
    """Return the names whose values differ from the truth in a file."""
    expected, scheduler, progress = torch.load(truth, weights_only=False)
    found, wrong = models.truth(trained), list[str]()
    for item, tensors in expected.items():
        wrong += sorted(f"{item}/{k}" for k in set(tensors) ^ set(found[item]))
        wrong += [f"{item}/{k}" for k, v in tensors.items() if not same(v, found[item].get(k))]
    wrong += [] if scheduler_state(trained) == scheduler else ["scheduler"]
    return wrong + ([] if state["progress"] == progress == trained.progress else ["progress"])


def ways(target: str, layouts: list[str]) -> list[tuple[str, str]]:
    """Return the checkpoints to load, each with the way of the load."""
    sources = partners(target, layouts)
    if is_night():
        return [(source, way) for source in sources for way in WAYS]
    return [(source, WAYS[number % len(WAYS)]) for number, source in enumerate(sources)]


def plain_names(part: torch.nn.Module) -> list[str]:
    """Return the names of the tensors of which this rank has elements."""
    if isinstance(part, FullyShardedDataParallel):
        return flat_truth.names_held(part)
    held = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in part.state_dict().items()}
    return [name.removeprefix("module.") for name, tensor in held.items() if tensor.numel()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(bytes_of(a), bytes_of(b))
    return bool(a == b)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("matrix")
    for world in (1, 2, 3, 4):
        run(world, save_several, [name for name in LAYOUTS + ONE_GROUP if RANKS[name] == world], str(root))
    return root


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_checkpoints_of_other_layouts_load_into_all_of_so_many_ranks(world: int, checkpoints: Path) -> None:
    """Checkpoints of an optimizer with one parameter group load into others with one."""
    sources = {
        target: ways(target, layouts)
        for layouts in (LAYOUTS, ONE_GROUP)
        for target in layouts
        if RANKS[target] == world
    }
    expected: Answers = {target: {source: [] for source in those} for target, those in sources.items()}
    assert run(world, load_several, str(checkpoints), sources, timeout=240) == [expected] * world


def test_a_checkpoint_of_any_layout_is_sound_and_has_the_same_names(checkpoints: Path) -> None:
    for layout in LAYOUTS:
        assert_sound_and_alike(checkpoints / layout, checkpoints / "single")
    for layout in ONE_GROUP:
        assert_sound_and_alike(checkpoints / layout, checkpoints / "1group-single")


def assert_sound_and_alike(one: Path, another: Path) -> None:
    report = reknit.verify(one, "data")
    assert report.ok, report.problems
    single, other = reknit.open(another), reknit.open(one)
    assert other.tensors == single.tensors
    assert set(other.values["optimizer"]) == set(single.values["optimizer"])
