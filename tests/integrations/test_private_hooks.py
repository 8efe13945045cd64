"""The private attributes of trainers that integrations use are in the installed versions."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec

import pytest

from reknit.errors import UsageError
from reknit.integrations.private_hooks import HOOKS, PrivateHook, require_hooks


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.owner.split(':')[1]}.{hook.name}")
def test_the_installed_version_has_it(hook: PrivateHook) -> None:
    if find_spec(hook.package) is None:
        pytest.skip(f"{hook.package} is not installed")
    module, name = hook.owner.split(":")
    source = inspect.getsource(getattr(import_module(module), name))
    assert hook.name in source, f"{hook.package} {version(hook.package)} lacks it: {hook.when_gone}"


def test_a_class_without_one_is_an_error_about_the_version() -> None:
    names = {hook.name: None for hook in HOOKS if hook.package == "transformers"}
    del names["_load_rng_state"]
    with pytest.raises(UsageError, match=r"this version of transformers has no Later\._load_rng_state"):
        require_hooks("transformers", type("Later", (), names))
