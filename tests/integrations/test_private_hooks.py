"""The installed trainers still have the methods that the integrations need, though these are not public."""

from __future__ import annotations

import pytest

from reknit.errors import UsageError
from reknit.integrations.private_hooks import HOOKS, require_hooks
from tests.optional import needs
from tests.ranks import run


def named() -> None:
    from transformers import Trainer

    require_hooks("transformers", Trainer)


@needs("transformers", "transformers")
def test_the_trainer_of_transformers_has_them() -> None:
    # After a failure: find the new name in its Trainer.train, and adapt HOOKS and the integration.
    run(1, named, warm="trainers", joined=False)


def test_a_method_that_is_gone_is_named_before_training() -> None:
    left = {name: lambda _: None for name in HOOKS["transformers"] if name != "_load_rng_state"}
    with pytest.raises(UsageError, match=r"Later of transformers .*has no method _load_rng_state, which"):
        require_hooks("transformers", type("Later", (), left))
