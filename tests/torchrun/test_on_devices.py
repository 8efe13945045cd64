"""A background save of a model on a device stores the values at the call, at any timing of the device.

Real ranks train on simulated devices, whose streams are slow at random, by a seed.  Each save is called while
writes are queued and the save before is under way.  After the call all saved tensors are overwritten at once:
by a step, on the current stream, and on a side stream.  Each checkpoint is loaded into another model, whose
own writes are queued, and compared with a copy of the rank's values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import reknit
from reknit.engine.background import snapshot
from tests.accelerator.group import joined
from tests.devices import run_simulated
from tests.running.examples import is_night
from tests.torchrun import models
from tests.torchrun.test_matrix import bytes_of, forget

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 100.0
NUM_SEEDS = 200 if is_night() else 2
STAGES = ("eager", "lazy")
RANKS: tuple[tuple[str, ...], ...] = (("ddp-2", "fsdp2-2"),)
if is_night():
    RANKS = (("ddp-2", "fsdp1full-2", "fsdp2-2", "tp-2"), ("pp-2xfsdp2-2",))


def memory(trained: models.Trained) -> dict[str, torch.Tensor]:
    """Return the tensors of this rank on its device, by name."""
    found: dict[str, Any] = {}
    for number, (part, optimizer) in enumerate(zip(trained.parts, trained.optimizers, strict=True)):
        tensors = [*part.named_parameters(), *part.named_buffers()]
        found |= {f"{number}/{name}": tensor for name, tensor in tensors if not name.endswith("scratch")}
        for name, parameter in part.named_parameters():
            states = optimizer.state.get(parameter, {})
            found |= {f"{number}/{name}/{key}": value for key, value in states.items()}
    return {name: _local(tensor) for name, tensor in found.items()}


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def copied(trained: models.Trained) -> dict[str, torch.Tensor]:
    """Return copies of the tensors on the host."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in memory(trained).items()}


def count(tensors: dict[str, torch.Tensor]) -> None:
    """Set each number to the next larger one of its type."""
    for tensor in tensors.values():
        if tensor.dtype == torch.float32 and tensor.ndim:
            tensor.view(torch.int32).add_(1)


def overwrite(trained: models.Trained) -> None:
    """Write to all saved tensors, on the current stream and on another that waits for it."""
    tensors = list(memory(trained).values())
    device = models.device_of(trained.parts[0])
    side: Any = torch.get_device_module(device).Stream(device)
    current = torch.get_device_module(device).current_stream(device)
    side.wait_stream(current)
    with side:
        for tensor in tensors[::2]:
            tensor.fill_(3)
            tensor.record_stream(side) if tensor.device == device else None
    for tensor in tensors[1::2]:
        tensor.fill_(5)
    current.wait_stream(side)


def restore(trained: models.Trained, values: dict[str, torch.Tensor]) -> None:
    for name, tensor in memory(trained).items():
        tensor.copy_(values[name])


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Return the names whose bits differ."""
    names = sorted(found.keys() ^ expected.keys())
    both = found.keys() & expected.keys()
    return names + [name for name in both if not torch.equal(bytes_of(found[name]), bytes_of(expected[name]))]


def save_and_load(layouts: tuple[str, ...], folder: str, device_type: str, num_seeds: int) -> dict[str, Any]:
    """Return the names that differ, by checkpoint, and the number of deferred shards, by layout."""
    device, place, rank = joined(device_type)
    snapshot.SMALL_NBYTES = 64  # tensors that can be watched are copied later, although the model is small
    lengths = lengths_of_deferred()
    found = dict[str, Any]()
    for layout in layouts:
        trained, target = (models.build(layout, steps=1, seed=seed, device=place) for seed in (0, 1))
        for stage in STAGES:
            before: Any = None
            for seed in range(num_seeds):
                device.reset(seed=4 * seed + rank)
                now = saved(f"{folder}/{layout}-{stage}-{seed}", trained, stage, seed)
                overwrite(trained)
                if before is not None:
                    found[before[0]] = loaded(target, *before)
                restore(trained, now[-1])
                before = now
            found[before[0]] = loaded(target, *before)
        found[layout] = sum(lengths)
        lengths.clear()
    assert reknit.close(LIMIT_S)
    assert device.contexts() == [rank]
    dist.barrier()
    dist.destroy_process_group()
    return found


def saved(path: str, trained: models.Trained, stage: Any, seed: int) -> tuple[str, Any, dict[str, Any]]:
    """Begin a save over queued writes, and overwrite the state by a step; return the expected values, too."""
    options = reknit.SaveOptions(durability="process", timeout_s=60, stage=stage)
    models.train_step(trained, seed)
    expected = copied(trained)
    count(memory(trained))
    count(expected)
    pending = reknit.save(path, models.state(trained), step=seed, wait=False, options=options)
    if stage == "lazy" or seed % 2:
        models.train_step(trained, seed)
    return path, pending, expected


def lengths_of_deferred() -> list[int]:
    """Return a list to which each lazy save adds the number of shards that it copies later."""
    lengths, hold = list[int](), snapshot.Deferred.hold

    def recorded(self: snapshot.Deferred, wait: Any) -> None:
        lengths.append(len(self))
        hold(self, wait)

    setattr(snapshot.Deferred, "hold", recorded)  # noqa: B010
    return lengths


def loaded(target: models.Trained, path: str, pending: Any, expected: dict[str, torch.Tensor]) -> list[str]:
    """Load a checkpoint over writes that are still queued; return the names that differ."""
    assert pending.result(LIMIT_S).warnings == ()
    forget(target)
    reknit.load(path, models.state(target), options=reknit.LoadOptions(timeout_s=60))
    return differing(copied(target), expected)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("layouts", "device_type"),
    [(layouts, kind) for kind in ("cuda", "sim")[: 1 + is_night()] for layouts in RANKS],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_what_is_overwritten_at_once_after_a_save_is_stored_as_it_was(
    tmp_path: Path, layouts: tuple[str, ...], device_type: str
) -> None:
    world = models.LAYOUTS[layouts[0]]
    call = (layouts, str(tmp_path), device_type, NUM_SEEDS)
    answers = run_simulated(world, save_and_load, *call, device_type=device_type, joined=False, timeout=3000)
    for found in answers:
        assert {path: wrong for path, wrong in found.items() if path not in layouts and wrong} == {}
    for layout in layouts:
        assert any(found[layout] for found in answers), "no rank copied anything later"
