"""The private attributes that integrations use are in the installed versions; a missing package is named."""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from reknit.errors import MissingExtraError, UsageError
from reknit.integrations.private_hooks import HOOKS, private, require_hooks
from tests import ranks


@cache
def parsed(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text())


def test_the_installed_versions_have_them() -> None:
    for hook in HOOKS:
        try:
            installed = distribution(hook.package)
        except PackageNotFoundError:
            continue
        module, name = hook.owner.split(":")
        # The package is not imported, which takes seconds.
        tree = parsed(str(installed.locate_file(module.replace(".", "/") + ".py")))
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


PACKAGES = {
    "accelerate": ("accelerate",),
    "lightning": ("lightning", "pytorch_lightning"),
    "transformers": ("transformers",),
    "torchtitan.script": ("torchtitan.components", "tyro"),
    "torchft": ("torchft",),
}


def without_packages() -> dict[str, str]:
    """Import each integration without its package, and return the errors."""
    errors = {}
    for name, packages in PACKAGES.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.delitem(sys.modules, f"reknit.integrations.{name}", raising=False)
            for package in packages:
                patch.setitem(sys.modules, package, None)
            with pytest.raises(MissingExtraError) as caught:
                import_module(f"reknit.integrations.{name}")
        errors[name.partition(".")[0]] = str(caught.value)
    return errors


def test_without_its_package_an_integration_names_the_extra() -> None:
    (errors,) = ranks.run(1, without_packages, joined=False)
    assert [name for name, error in errors.items() if f"pip install 'reknit[{name}]'" not in error] == []


def without_accelerate() -> str:
    """Import the integration of transformers where only accelerate is missing, and return the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "reknit.integrations.transformers", raising=False)
        patch.setitem(sys.modules, "accelerate", None)
        with pytest.raises(MissingExtraError) as caught:
            import_module("reknit.integrations.transformers")
    return str(caught.value)


def test_transformers_without_accelerate_names_the_extra_as_well() -> None:
    (error,) = ranks.run(1, without_accelerate, joined=False)
    assert "pip install 'reknit[transformers]'" in error
