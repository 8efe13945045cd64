"""The private attributes of trainers that integrations use are in the installed versions."""

from __future__ import annotations

import ast
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from reknit.errors import UsageError
from reknit.integrations.trainer_parts.private_hooks import HOOKS, PrivateHook, private, require_hooks


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.owner.split(':')[1]}.{hook.name}")
def test_the_installed_version_has_it(hook: PrivateHook) -> None:
    try:
        installed = distribution(hook.package)
    except PackageNotFoundError:
        pytest.skip(f"{hook.package} is not installed")
    module, name = hook.owner.split(":")
    # The package is not imported, which takes seconds.
    tree = ast.parse(Path(str(installed.locate_file(module.replace(".", "/") + ".py"))).read_text())
    (owner,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {node.name for node in ast.walk(owner) if isinstance(node, ast.FunctionDef)}
    found |= {node.attr for node in ast.walk(owner) if isinstance(node, ast.Attribute)}
    assert hook.name in found, f"{hook.package} {installed.version} lacks it: {hook.when_gone}"


def test_an_attribute_that_is_gone_is_an_error_about_the_version() -> None:
    class Accelerator:
        pass

    with pytest.raises(UsageError, match=r"this version of accelerate has no Accelerator\._models") as caught:
        private("accelerate", Accelerator(), "_models")
    assert "install an earlier version of accelerate, or a newer reknit" in (caught.value.remedy or "")


def test_a_class_without_one_is_an_error_about_the_version() -> None:
    names = {hook.name: None for hook in HOOKS if hook.package == "transformers"}
    del names["_load_rng_state"]
    with pytest.raises(UsageError, match=r"this version of transformers has no Later\._load_rng_state"):
        require_hooks("transformers", type("Later", (), names))
