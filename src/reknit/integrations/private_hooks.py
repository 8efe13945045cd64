"""Which private attributes of trainers do the integrations use?  All of them, with the way out for each.

`tests/integrations/test_private_hooks.py` finds them in the installed versions.
"""

from __future__ import annotations

from typing import NamedTuple

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


def require_hooks(package: str, owner: type) -> None:
    """Raise `UsageError` if a class lacks an attribute in `HOOKS` that the package has had."""
    names = [hook.name for hook in HOOKS if hook.package == package and not hasattr(owner, hook.name)]
    if names:
        raise UsageError(
            f"this version of {package} has no {owner.__name__}.{names[0]}",
            remedy=f"install a version of {package} that docs/howto/trainers.md names",
        )
