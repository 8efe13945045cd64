"""All private attributes of trainers that the integrations use, with the way out for each.

`tests/integrations/test_private_hooks.py` finds them in the installed versions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from reknit.errors import UsageError


class PrivateHook(NamedTuple):
    """An attribute that a package does not document; `when_gone` is the work if a version lacks it."""

    package: str
    owner: str
    """Its class, as ``module:Class``."""
    name: str
    when_gone: str


def _hooks(package: str, owner: str, names: tuple[str, ...], when_gone: str) -> tuple[PrivateHook, ...]:
    return tuple(PrivateHook(package, owner, name, when_gone) for name in names)


HOOKS: tuple[PrivateHook, ...] = (
    *_hooks(
        "accelerate",
        "accelerate.accelerator:Accelerator",
        ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects"),
        "take the objects from the arguments of Accelerator.prepare, or from its new accessor",
    ),
    *_hooks(
        "accelerate",
        "accelerate.accelerator:Accelerator",
        ("_save_model_state_pre_hook", "_load_model_state_pre_hook"),
        "let users pass their hooks to save_state and load_state",
    ),
    *_hooks(
        "lightning",
        "lightning.pytorch.callbacks.model_checkpoint:ModelCheckpoint",
        ("_save_topk_checkpoint", "_save_last_checkpoint", "_save_checkpoint", "_monitor_candidates"),
        "derive ReknitCheckpoint from Checkpoint, and decide in its public hooks when to save",
    ),
    *_hooks(
        "lightning",
        "lightning.pytorch.callbacks.model_checkpoint:ModelCheckpoint",
        ("_last_global_step_saved", "_last_checkpoint_saved"),
        "keep the number of the last saved step in ReknitCheckpoint",
    ),
    *_hooks(
        "lightning",
        "lightning.pytorch.callbacks.model_checkpoint:ModelCheckpoint",
        ("_find_last_checkpoints",),
        "let users pass the folder of the run as ckpt_path, which works without it",
    ),
    *_hooks(
        "lightning",
        "lightning.pytorch.trainer.connectors.checkpoint_connector:_CheckpointConnector",
        ("_restore_modules_and_callbacks",),
        "raise the error of a damaged step, and let users pass the path of an older one",
    ),
    *_hooks(
        "lightning",
        "lightning.pytorch.loops.fit_loop:_FitLoop",
        ("_combined_loader_states_to_load", "_loaded_from_state_dict"),
        "keep the states of loaders in the strategy, and find the end of an epoch in the loops of the step",
    ),
    *_hooks(
        "ray",
        "ray.train.v2._internal.execution.storage:StorageContext",
        ("build_checkpoint_path_from_name",),
        "take the place of a checkpoint from the arguments of checkpoint_upload_fn, or from the user",
    ),
    *_hooks(
        "transformers",
        "transformers.trainer:Trainer",
        ("_save_checkpoint",),
        "save in TrainerCallback.on_save, and set save_only_model, so that its own folders stay small",
    ),
    *_hooks(
        "transformers",
        "transformers.trainer:Trainer",
        ("_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state"),
        "find the calls of Trainer.train that read its checkpoints, and replace those",
    ),
    *_hooks(
        "transformers",
        "transformers.trainer:Trainer",
        ("get_batch_samples", "set_initial_training_values"),
        "give the loader of Trainer.get_train_dataloader the position, and set ignore_data_skip",
    ),
    *_hooks(
        "transformers",
        "transformers.trainer:Trainer",
        ("_load_best_model",),
        "fill the model in TrainerCallback.on_train_end",
    ),
    *_hooks(
        "transformers",
        "transformers.trainer:Trainer",
        ("_get_output_dir", "_push_from_checkpoint"),
        "take args.output_dir, and let users push after the training",
    ),
)


def private(package: str, owner: Any, name: str) -> Any:
    """Return a private attribute in `HOOKS`.  Raises `UsageError` if the installed version lacks it."""
    assert any(hook.package == package and hook.name == name for hook in HOOKS)
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _gone(package, type(owner), name) from None


def require_hooks(package: str, owner: type) -> None:
    """Raise `UsageError` if a class lacks an attribute in `HOOKS` that the package has had."""
    for hook in HOOKS:
        if hook.package == package and not hasattr(owner, hook.name):
            raise _gone(package, owner, hook.name)


def _gone(package: str, owner: type, name: str) -> UsageError:
    return UsageError(
        f"this version of {package} has no {owner.__name__}.{name}",
        remedy=f"install an earlier version of {package}, or a newer reknit that supports this one",
    )
