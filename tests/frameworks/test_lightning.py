"""Lightning's ModelParallelStrategy (FSDP2) with the real trainer: saved while it fits, loaded elsewhere."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import reknit
from reknit.frameworks.registry import collect
from tests import ranks
from tests.frameworks.silence import Silence
from tests.torchrun import pieces

if TYPE_CHECKING:
    from pathlib import Path

run = partial(ranks.run, warm="lightning")

if find_spec("lightning") is None:
    pytest.skip("Lightning is not installed", allow_module_level=True)


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 5))


def trainer_of(steps: int, callbacks: list[Any]) -> Any:
    """Return a trainer for the processes that are already there."""
    size, rank = dist.get_world_size(), dist.get_rank()
    os.environ.update(
        TORCHELASTIC_RUN_ID="test", LOCAL_RANK=str(rank), GROUP_RANK="0", LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
    )  # fmt: skip
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1)
    return Trainer(
        accelerator="cpu", devices=size, strategy=strategy, max_steps=steps, callbacks=callbacks,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip


def lit(seed: int) -> Any:
    """Return a Lightning module that shards itself."""
    from lightning.pytorch import LightningModule
    from torch.distributed.fsdp import fully_shard

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(seed)

        def configure_model(self) -> None:
            assert self.device_mesh is not None
            mesh = self.device_mesh["data_parallel"]
            fully_shard(self.net[0], mesh=mesh)
            fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Lit()


def state_of(trainer: Any, module: Any) -> dict[str, Any]:
    """Return the state that a user of Lightning saves."""
    return {
        "model": module,
        "optimizer": trainer.optimizers[0],
        "schedule": trainer.lr_scheduler_configs[0].scheduler,
        "progress": {"step": trainer.global_step},
    }


def data() -> Any:
    rows = torch.arange(8 * 3 * 6, dtype=torch.float32).reshape(8, 3, 6) / 100
    return torch.utils.data.DataLoader(list(rows), batch_size=None)  # type: ignore[arg-type]


def whole(trainer: Any, module: Any) -> dict[str, torch.Tensor]:
    """Return parameters and states, whole."""
    found: dict[str, Any] = dict(module.named_parameters())
    for name, parameter in module.named_parameters():
        for key, state in trainer.optimizers[0].state[parameter].items():
            found[f"{name}/{key}"] = state
    return pieces.wholes(found)


def fit_and_save(folder: str) -> dict[str, Any]:
    """Save from a callback after the second of three steps; resume in a new trainer and end alike."""
    from lightning.pytorch import Callback

    seen: dict[str, Any] = {}

    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                state = state_of(trainer, module)
                with Silence():
                    collect(state, dist.get_rank(), 2)
                reknit.save(folder, state, step=2).result()
                seen["saved"] = whole(trainer, module)

    class Resume(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            state = state_of(trainer, module)
            assert not reknit.load(folder, state).missing
            seen["progress"] = state["progress"]
            seen["resumed"] = whole(trainer, module)

    trainer, module = trainer_of(2, [Save()]), lit(0)
    trainer.fit(module, data())
    again, other = trainer_of(1, [Resume()]), lit(1)
    again.fit(other, data())
    seen["lr"] = again.optimizers[0].param_groups[0]["lr"]
    return seen


def test_a_checkpoint_of_a_callback_resumes_a_new_trainer_and_loads_into_a_plain_module(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "step")
    answers = run(2, fit_and_save, folder)
    for seen in answers:
        assert seen["progress"] == {"step": 2}
        assert seen["saved"].keys() == seen["resumed"].keys()
        assert all(torch.equal(seen["saved"][key], seen["resumed"][key]) for key in seen["saved"])
        assert seen["lr"] == 1e-2 * 0.5**3
    model = nn.ModuleDict({"net": network(2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    report = reknit.load(
        folder, {"model": model, "optimizer": optimizer}, strict=("!schedule*", "!progress*")
    )
    assert not report.missing
    true = answers[0]["saved"]
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, true[name])
        for key, state in optimizer.state[parameter].items():
            assert torch.equal(state, true[f"{name}/{key}"])
