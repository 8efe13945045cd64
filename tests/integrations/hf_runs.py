"""Tiny runs of transformers' Trainer for tests: a model with dropout, data in a random order."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Samples(torch.utils.data.Dataset[Any]):
    """Forty samples of six tokens."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(6) * (index + 1) % 37
        return {"input_ids": ids, "labels": ids}


def llama(*, name: str | None = None, dropout: float = 0.2, width: int = 16) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=width, intermediate_size=width * 7 // 4, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, attention_dropout=dropout,
    )  # fmt: skip
    if name is not None:
        config._name_or_path = name
    return LlamaForCausalLM(config)


def with_lora(model: Any, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **options))


def trainer(folder: str, kind: Any = None, model: Any = None, **options: Any) -> Any:
    """Return a trainer of a kind, `ReknitTrainer` by default, that saves after every second step."""
    from transformers import TrainingArguments

    from reknit.integrations.transformers import ReknitTrainer

    given = {
        "max_steps": 8, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "use_cpu": True,
        "per_device_train_batch_size": 4, "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    more = {name: options.pop(name) for name in ("checkpoints", "eval_dataset") if name in options}
    args = TrainingArguments(output_dir=folder, **{**given, **options})
    if args.fsdp:
        accelerate: Any = import_module("accelerate")
        # Accelerate leaves FSDP out on the CPU, whose ranks it takes for those of another type.
        accelerate.PartialState._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_GPU
    made: Any = (kind or ReknitTrainer)(
        model=llama() if model is None else model, args=args, train_dataset=Samples(), **more
    )
    made.log = lambda *_, **__: None  # prints nothing
    return made


def after_each_step(call: Callable[[int], object]) -> Any:
    """Return a callback that calls a function with the number of each step."""
    from transformers import TrainerCallback

    class AfterEachStep(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            call(state.global_step)

    return AfterEachStep()


class Stopped(Exception):
    """The run was interrupted."""


def interrupted(made: Any, step: int, **options: Any) -> None:
    """Train until an exception after a step."""

    def stop(number: int) -> None:
        if number == step:
            raise Stopped

    made.add_callback(after_each_step(stop))
    try:
        made.train(**options)
    except Stopped:
        return
    raise AssertionError("nothing stopped the run")


def training_state(made: Any) -> dict[str, Any]:
    """Return all that a bitwise resume restores, in comparable form."""
    model = made.accelerator.unwrap_model(made.model_wrapped)
    parameters = [parameter for group in made.optimizer.param_groups for parameter in group["params"]]
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "moments": {
            f"{index}/{name}": torch.as_tensor(value).clone()
            for index, parameter in enumerate(parameters)
            for name, value in made.optimizer.state.get(parameter, {}).items()
        },
        "schedule": {"lr": torch.tensor(made.lr_scheduler.get_last_lr())},
        "random": {"torch": torch.get_rng_state()},
        "progress": {"step": torch.tensor(made.state.global_step), "epoch": torch.tensor(made.state.epoch)},
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two states have the same bits."""
    return all(
        one[part].keys() == other[part].keys()
        and all(torch.equal(tensor, other[part][name]) for name, tensor in one[part].items())
        for part in one
    )
