"""Runs of transformers' Trainer whose samplers, transforms and streams draw random numbers of the process."""

from __future__ import annotations

import logging
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler

from tests.integrations.hf_runs import Stopped, after_each_step, same, training_state

if TYPE_CHECKING:
    from collections.abc import Iterator

SAMPLES = 20


class Tiny(nn.Module):
    """A model with dropout that a trainer takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, idx: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


class Numbers(torch.utils.data.Dataset[Any]):
    """Samples; `noisy` ones differ each time that they are read."""

    def __init__(self, noisy: bool = False) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= SAMPLES:
            raise IndexError
        x = torch.arange(3.0) + index
        if self.noisy:
            x = x + torch.rand(3) + random.random() + float(np.random.random())
        return {"x": x, "idx": torch.tensor(index), "input_ids": [0] * (1 + index % 5)}


class Stream(IterableDataset[Any]):
    """Samples in a random order without a length, each with noise."""

    def __iter__(self) -> Iterator[Any]:
        for index in torch.randperm(SAMPLES).tolist():
            yield Numbers(noisy=True)[index]


class Drawing(Sampler[int]):
    """Draws one number after the other, from all generators of the process."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        for _ in self.data:
            number = random.randrange(SAMPLES) + np.random.randint(SAMPLES) + int(torch.randint(SAMPLES, ()))
            yield int(number) % SAMPLES


class Owning(Sampler[int]):
    """Has random generators of its own, whose state goes on from epoch to epoch."""

    def __init__(self, data: Any) -> None:
        self.data, self.one, self.other = data, random.Random(3), np.random.default_rng(4)

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[int]:
        order = self.other.permutation(SAMPLES).tolist()
        self.one.shuffle(order)
        return iter(order)


def collated(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in ("x", "idx")}


def weighted(*_: Any) -> Any:
    return WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)


def _plain(trainer: Any) -> Any:
    return DataLoader(Numbers(noisy=True), batch_size=2, sampler=weighted(), collate_fn=collated)


WORKERS = {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "fork"}

# The data, the sampler (None for that of the trainer), and arguments.
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "seedable": (Numbers(noisy=True), None, {}),
    "length": (Numbers(), None, {"train_sampling_strategy": "group_by_length"}),
    "random": (Numbers(), None, {"accelerator_config": {"use_seedable_sampler": False}}),
    "weighted": (Numbers(noisy=True), weighted, {"gradient_accumulation_steps": 2}),
    "drawing": (Numbers(), Drawing, {}),
    "owning": (Numbers(), Owning, {}),
    "workers": (Numbers(), weighted, WORKERS),
    "persistent": (Numbers(), weighted, {**WORKERS, "dataloader_persistent_workers": True}),
    "stream": (Stream(), None, {"max_steps": 24}),
    "plain": (Numbers(), None, {}),
}


def trainer(folder: str, kind: str, stop: int = 0, batch: int = 2) -> tuple[Any, list[Any]]:
    """Return a trainer of three epochs that saves a step, and the samples that it takes."""
    from transformers import TrainingArguments

    from reknit.integrations.transformers import ReknitTrainer

    data, sampler, options = KINDS[kind]
    seen: list[Any] = []

    class Recorded(ReknitTrainer):
        def compute_loss(  # type: ignore[override]
            self, model: Any, inputs: Any, **others: Any
        ) -> Any:
            seen.append((inputs["idx"].tolist(), inputs["x"].sum().item()))
            return super().compute_loss(model, inputs, **others)

        if sampler is not None:

            def _get_train_sampler(self, *_: Any) -> Any:
                return sampler(self.train_dataset)

        if kind == "plain":
            get_train_dataloader = _plain

    args = TrainingArguments(
        folder, **{
            "num_train_epochs": 3, "save_strategy": "steps" if stop else "no", "save_steps": stop or 1,
            "use_cpu": True, "report_to": [], "disable_tqdm": True,
            "per_device_train_batch_size": batch, "learning_rate": 1e-2, "remove_unused_columns": False,
            "logging_strategy": "no", **options,
        },
    )  # fmt: skip
    made = Recorded(
        model=Tiny(), args=args, train_dataset=data, data_collator=collated, checkpoints={"wait": True}
    )
    made.log = lambda *_, **__: None  # type: ignore[method-assign]
    return made, seen


def until(made: Any, step: int, **options: Any) -> None:
    """Train until the step is saved, then end the training as an error does."""

    def stop(number: int) -> None:
        if number == step + 1:
            raise Stopped

    made.add_callback(after_each_step(stop))
    try:
        made.train(**options)
    except Stopped:
        return
    raise AssertionError("nothing stopped the run")


def _end_workers_soon() -> None:
    """Let loaders wait 0.2 s, not 5 s, for workers that have not looked at their queue yet."""
    vars(torch.utils.data._utils)["MP_STATUS_CHECK_INTERVAL"] = 0.2


def differing_alone(folder: str, stops: dict[str, tuple[int, ...]]) -> list[str]:
    """Do the same in a process that no launcher has started, which needs no group."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    return differing(folder, stops)


def differing(folder: str, stops: dict[str, tuple[int, ...]]) -> list[str]:
    """Return the kinds and stops with which a resumed run takes other samples, or ends with other bits."""
    _end_workers_soon()
    found = []
    for kind, steps in stops.items():
        whole, order = trainer(f"{folder}/{kind}", kind)
        whole.train()
        end = training_state(whole)
        per_step = whole.args.gradient_accumulation_steps
        for stop in steps:
            place = f"{folder}/{kind}-{stop}"
            until(trainer(place, kind, stop)[0], stop)
            again, rest = trainer(place, kind, stop)
            again.train(resume_from_checkpoint=f"{place}/_reknit/step_{stop:08}")
            state = training_state(again)
            if kind == "stream":  # whose epochs transformers does not count
                state["progress"] = end["progress"]
            if rest != order[stop * per_step :] or not same(end, state):
                found.append(f"{kind} after {stop}")
    return found


def saved(folder: str, kind: str, stop: int) -> list[list[int]]:
    """Train, and return the samples of this rank; another run is stopped after a step."""
    whole, order = trainer(f"{folder}/whole", kind)
    whole.train()
    until(trainer(f"{folder}/cut", kind, stop)[0], stop)
    return [samples for samples, _ in order]


def continued(folder: str, kind: str, stop: int, batch: int) -> tuple[list[list[int]], list[str]]:
    """Resume a step; return the samples of this rank, and the warnings."""
    logging.disable(logging.NOTSET)
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("reknit").addHandler(handler)
    made, order = trainer(f"{folder}/cut", kind, stop, batch)
    made.train(resume_from_checkpoint=f"{folder}/cut/_reknit/step_{stop:08}")
    return [samples for samples, _ in order], warnings
