"""A training with Accelerate, for its tests: every kind of prepared object, and a shuffled data set."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import reknit
from tests.integrations.random_death import death

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES = 24


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


class Noisy(Numbers):
    """Numbers that differ each time that they are read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 0.4 * torch.rand(()) + random.random() / 4


class Drawing(Sampler[int]):
    """Draws from the generators of the process, and has none of its own; half of the samples one by one."""

    def __init__(self, one_by_one: int = SAMPLES // 2) -> None:
        self.one_by_one = one_by_one

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES).tolist()[self.one_by_one :]
        for _ in range(self.one_by_one):
            yield random.randrange(SAMPLES)


class Stream(IterableDataset[torch.Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (torch.tensor(float(index)) for index in range(SAMPLES))


class Seen:
    """A registered object: the number of samples."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Job:
    """All objects of a training, prepared; `loader` is a kind of loader, `optimizer` makes the optimizer."""

    def __init__(
        self, loader: str = "shuffled", batch: int = 2, seed: int = 0, optimizer: Any = torch.optim.AdamW
    ) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        config = DataLoaderConfiguration(
            use_seedable_sampler=loader == "seedable",
            use_stateful_dataloader=loader == "stateful",
            dispatch_batches=loader in ("dispatched", "stream"),
            split_batches=loader == "split",
        )
        self.accelerator = Accelerator(cpu=True, dataloader_config=config)
        model = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 1))
        made = optimizer(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(made, 3, gamma=0.5)
        data = Stream() if loader == "stream" else Numbers()
        if loader in ("drawing", "persistent"):
            workers: dict[str, Any] = (
                {"num_workers": 1, "persistent_workers": True} if loader == "persistent" else {}
            )
            data = Noisy() if loader == "drawing" else Numbers()
            # Workers read ahead, so that numbers that are drawn one by one come at other moments.
            sampler = Drawing() if loader == "drawing" else Drawing(0)
            feed = DataLoader(data, batch_size=batch, sampler=sampler, **workers)
        else:
            feed = DataLoader(data, batch_size=batch, shuffle=None if loader == "stream" else True)
        prepared = self.accelerator.prepare(model, made, schedule, feed)
        self.model, self.optimizer, self.schedule, self.loader = prepared
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=True)
        self.seen = Seen()
        self.accelerator.register_for_checkpointing(self.seen)
        self.samples: list[list[int]] = []

    def end(self) -> dict[str, Any]:
        """Return all that a resume has to bring back."""
        model = self.accelerator.unwrap_model(self.model)
        states = {f"{n}/{k}": v for n, s in enumerate(self.optimizer.state.values()) for k, v in s.items()}
        return {
            "tensors": {k: torch.as_tensor(v).clone() for k, v in {**model.state_dict(), **states}.items()},
            "schedule": self.schedule.state_dict()["last_epoch"],
            "scale": self.accelerator.scaler.get_scale(),
            "seen": self.seen.count,
            "random": (random.random(), float(np.random.random()), torch.rand(2)),
            "samples": self.samples,
        }

    def train(self, first: int, steps: int, after: Any) -> None:
        """Train from step `first` on, over epochs."""
        step = first
        while step < steps:
            for batch in self.loader:
                with self.accelerator.accumulate(self.model):
                    loss = (self.model(batch[:, None]) - batch[:, None].sin()).square().mean()
                    self.accelerator.backward(loss)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                everyone = self.accelerator.gather(batch).tolist()
                self.samples.append(sorted(map(int, everyone)))
                self.seen.count += len(everyone)
                self.accelerator.scaler.update(new_scale=float(step + 1))
                random.random(), np.random.random()
                after(step)
                step += 1
                if step == steps:
                    return


def train(
    root: str, steps: int, *, loader: str = "shuffled", batch: int = 2, dies: int | None = None, seed: int = 0
) -> dict[str, Any]:
    """Resume, train to step `steps`, and save every step in the background."""
    from reknit.integrations import accelerate as checkpoints

    job = Job(loader, batch, seed)
    dying = (lambda _: None) if dies is None else death(dies, 2, 7)
    with reknit.Checkpointer(root, keep=reknit.policies.latest(3)) as checkpointer:
        first = checkpoints.resume(job.accelerator, checkpointer)

        def after(step: int) -> None:
            checkpoints.save(job.accelerator, checkpointer, step)
            dying(step)

        job.train(first, steps, after)
    return {"first": first, **job.end()}
