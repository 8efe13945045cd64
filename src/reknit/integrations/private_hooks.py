"""Which private attributes of trainers do the integrations use?  All of them, with the way out for each.

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


_PREPARED = "take the objects from the arguments of Accelerator.prepare, or from its new accessor"
_PRE_HOOKS = "let users pass their hooks to save_state and load_state"

HOOKS: tuple[PrivateHook, ...] = (
    PrivateHook("accelerate", "accelerate.accelerator:Accelerator", "_models", _PREPARED),
    PrivateHook("accelerate", "accelerate.accelerator:Accelerator", "_optimizers", _PREPARED),
    PrivateHook("accelerate", "accelerate.accelerator:Accelerator", "_schedulers", _PREPARED),
    PrivateHook("accelerate", "accelerate.accelerator:Accelerator", "_dataloaders", _PREPARED),
    PrivateHook("accelerate", "accelerate.accelerator:Accelerator", "_custom_objects", _PREPARED),
    PrivateHook(
        "accelerate", "accelerate.accelerator:Accelerator", "_save_model_state_pre_hook", _PRE_HOOKS
    ),
    PrivateHook(
        "accelerate", "accelerate.accelerator:Accelerator", "_load_model_state_pre_hook", _PRE_HOOKS
    ),
)


def private(package: str, owner: Any, name: str) -> Any:
    """Return a private attribute in `HOOKS`.  Raises `UsageError` if the installed version lacks it."""
    assert any(hook.package == package and hook.name == name for hook in HOOKS)
    try:
        return getattr(owner, name)
    except AttributeError:
        raise UsageError(
            f"this version of {package} has no {type(owner).__name__}.{name}",
            remedy=f"install a version of {package} that docs/howto/trainers.md names",
        ) from None
