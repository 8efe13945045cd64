"""ZeRO-1, -2 and -3 on 2 and 3 ranks, in fp32 and bf16, load each other's checkpoints and those of others.

Every source is trained from weights of its own and saved once.  Every target loads several sources (at night:
all) one after another, the first into an engine that has taken no step yet.  The holdings of
each rank, by DeepSpeed's own mapping, are then compared with the state that the saver gathered by the
collectives of DeepSpeed or torch.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

import reknit
from tests import ranks
from tests.deepspeed import engines
from tests.optional import needs
from tests.running.examples import partners, thinned
from tests.torchrun import models

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("deepspeed", "DeepSpeed")

run = partial(ranks.run, warm="deepspeed")

OTHERS = {"single": 1, "tp-2": 2}
ON_TWO = dict.fromkeys((f"{layout}@2" for layout in engines.LAYOUTS), 2)
ON_THREE = dict.fromkeys((f"{layout}@3" for layout in thinned(engines.LAYOUTS, 5)), 3)
WORLDS = ON_TWO | ON_THREE | OTHERS
SOURCES = list(WORLDS)
ITEMS = ("model", "optimizer", "scheduler")
SAVE = reknit.SaveOptions(durability="process", threads=2, timeout_s=60)
LOAD = reknit.LoadOptions(cast=True, timeout_s=60)


def is_engine(name: str) -> bool:
    return name not in OTHERS


def build(name: str, **how: Any) -> tuple[Any, dict[str, Any], Any]:
    """Build a layout, and return it, its state, and a function that gathers the whole state."""
    if is_engine(name):
        engine = engines.build(name.partition("@")[0], **how)
        return engine, engines.state(engine), engines.truth
    trained = models.build(name, **how)
    state = models.state(trained)
    return trained, {item: state[item] for item in ITEMS}, models.truth


def step(name: str, job: Any) -> None:
    """Take the first step after the checkpoint."""
    if is_engine(name):
        engines.train_step(job, 2)
    else:
        models.train_step(job, 2)


def save_all(root: str, worlds: dict[str, int]) -> None:
    for number, (name, world) in enumerate(worlds.items()):
        if world != dist.get_world_size():
            continue
        job, state, truth = build(name, seed=number)
        report = reknit.save(f"{root}/{name}", state, step=2, options=SAVE).result()
        assert report.warnings == (), report.warnings
        before = truth(job), dict(state["scheduler"].state_dict())
        step(name, job)
        if dist.get_rank() == 0:
            torch.save((before, truth(job)), f"{root}/{name}.truth")
        else:
            truth(job)


def load_all(
    root: str, worlds: dict[str, int], sources: dict[str, list[str]]
) -> dict[str, dict[str, list[str]]]:
    """Load its sources into each layout of this world, and return the differences."""
    differing: dict[str, dict[str, list[str]]] = {}
    for name, world in worlds.items():
        if world != dist.get_world_size():
            continue
        job, state, _ = build(name, steps=0, seed=99)
        for source in sources[name]:
            (expected, scheduler), after = torch.load(f"{root}/{source}.truth", weights_only=False)
            reknit.load(f"{root}/{source}", state, options=LOAD)
            wrong = compare(name, job, as_in(name, expected))
            if state["scheduler"].state_dict() != scheduler:
                wrong.append("scheduler")
            if source == name:
                step(name, job)
                wrong += [f"after a step: {what}" for what in compare(name, job, after)]
            differing.setdefault(name, {})[source] = wrong
    return differing


def as_in(target: str, truth: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the state that a target must have after a load: in its precision, with masters if it has any."""
    masters = {
        key.removeprefix("state/").removesuffix("/master"): value
        for key, value in truth["optimizer"].items()
        if key.endswith("/master")
    }
    optimizer = {key: value for key, value in truth["optimizer"].items() if not key.endswith("/master")}
    exact = {name: masters.get(name, value) for name, value in truth["model"].items()}
    if "bf16" not in target:
        return {"model": exact, "optimizer": optimizer}
    trained = {name for name, value in truth["model"].items() if value.is_floating_point()}
    low = {name: v.bfloat16() if name in trained else v for name, v in truth["model"].items()}
    return {"model": low, "optimizer": optimizer | {f"state/{n}/master": exact[n] for n in trained}}


def compare(name: str, job: Any, expected: dict[str, dict[str, Any]]) -> list[str]:
    return engines.unlike(job, expected) if is_engine(name) else unlike(models.truth(job), expected)


def unlike(found: dict[str, dict[str, Any]], expected: dict[str, dict[str, Any]]) -> list[str]:
    wrong = [f"{item}: {sorted(set(found[item]) ^ set(expected[item]))}" for item in found]
    wrong = [line for line in wrong if not line.endswith(": []")]
    for item, values in expected.items():
        wrong += [key for key, value in values.items() if not same(found[item].get(key), value)]
    return wrong


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return bool(a == b)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deepspeed")
    for world in (1, 2, 3):
        run(world, save_all, str(root), WORLDS)
    return root


@pytest.mark.parametrize("world", sorted({*WORLDS.values()}))
def test_checkpoints_of_other_stages_and_of_other_layouts_load(world: int, checkpoints: Path) -> None:
    sources = {name: partners(name, SOURCES) for name in SOURCES}
    targets = [name for name, size in WORLDS.items() if size == world]
    for differences in run(world, load_all, str(checkpoints), WORLDS, sources, timeout=240):
        assert differences == {target: {source: [] for source in sources[target]} for target in targets}


def test_a_checkpoint_of_an_engine_has_the_names_of_the_plain_model(checkpoints: Path) -> None:
    plain = reknit.open(checkpoints / "single")
    for source in filter(is_engine, SOURCES):
        assert reknit.verify(checkpoints / source, "data").ok
        other = reknit.open(checkpoints / source)
        masters = {key for key in other.tensors["optimizer"] if key.endswith("/master")}
        assert bool(masters) == ("bf16" in source)
        for item in ITEMS:
            shapes = {key: spec.shape for key, spec in plain.tensors[item].items()}
            found = {key: spec.shape for key, spec in other.tensors[item].items() if key not in masters}
            assert found == shapes, (source, item)
            assert set(other.values[item]) == set(plain.values[item])
