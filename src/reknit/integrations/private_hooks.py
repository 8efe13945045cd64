"""Which methods of trainers that are not public do the integrations replace or call?

A release of a trainer may drop or rename one.  `require_hooks` then names it before training begins, and
`tests/integrations/test_private_hooks.py` fails with the installed release.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from reknit.errors import UsageError

HOOKS: dict[str, tuple[str, ...]] = {
    "transformers": (
        "_save_checkpoint",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_load_scaler",
        "_load_rng_state",
        "_load_best_model",
        "_get_output_dir",
        "_push_from_checkpoint",
    ),
}
"""The methods, by the package that has them in its trainer."""


def require_hooks(package: str, trainer: type) -> None:
    """Raise `UsageError` if a trainer does not have a method that the integration of its package needs."""
    if gone := [name for name in HOOKS[package] if not callable(getattr(trainer, name, None))]:
        try:
            release = f"{package} {version(package)}"
        except PackageNotFoundError:
            release = package
        raise UsageError(
            f"{trainer.__name__} of {release} has no method {', '.join(gone)}, which "
            f"reknit.integrations.{package} needs",
            remedy=f"install a release of {package} that docs/howto/trainers.md names, or a newer reknit",
        )
