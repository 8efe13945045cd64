"""The order of the source tree: who may import whom, and how large a module and a folder may be."""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

tomllib: Any = pytest.importorskip("tomllib")  # as import-linter, it needs Python 3.11
import_linter = pytest.importorskip("importlinter.cli")

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src/reknit"
LAYERS = ROOT / "tests/layers.toml"
# What needs no import statement, and so is not seen by import-linter.
LOOKED_UP = re.compile(r"(?:sys\.modules(?:\.get\(|\[)|import_module\(|__import__\()[\"'](torch|jax|grpc)\b")


def contracts() -> dict[str, dict[str, Any]]:
    """Return the contracts by name, the rows first."""
    config = tomllib.loads(LAYERS.read_text())["tool"]["importlinter"]
    return {contract["name"]: contract for contract in config["contracts"]}


def breaches(config: Path) -> int:
    """Return the exit status of the check; 0 if every import keeps the contracts.

    It would set up logging for the whole process, and so turn off all loggers that there are.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_linter.logging_config, "dictConfig", lambda config: None)
        return int(import_linter.lint_imports(config_filename=str(config), no_cache=True))


@pytest.fixture(scope="module")
def tree() -> dict[str, str]:
    return {path.relative_to(SOURCES).as_posix(): path.read_text() for path in sorted(SOURCES.rglob("*.py"))}


def test_every_import_keeps_the_contracts() -> None:
    assert breaches(LAYERS) == 0
    assert not logging.getLogger("reknit").disabled


@pytest.mark.parametrize(
    ("contract", "broken"),
    [
        ('"types",\n  "options', '"options'),  # a package without a row
        ('"engine",\n  "planner |', '"planner |\n  "engine",'),
        ('protected_modules = ["torch"]\nallowed_importers = [\n  "reknit.frameworks",', ""),
    ],
)
def test_a_breach_is_noticed(contract: str, broken: str, tmp_path: Path) -> None:
    text = LAYERS.read_text()
    assert text.count(contract) == 1
    (tmp_path / "layers.toml").write_text(text.replace(contract, broken))
    assert breaches(tmp_path / "layers.toml") != 0


def test_a_library_is_looked_up_only_where_it_may_be_imported(tree: dict[str, str]) -> None:
    known = contracts()
    for path, source in tree.items():
        module = f"reknit.{path.removesuffix('.py').replace('/', '.')}."
        for found in LOOKED_UP.finditer(source):
            homes = known[found[1]]["allowed_importers"]
            assert any(module.startswith(f"{home}.") for home in homes), f"{path}: {found[0]}"


def test_the_page_about_the_architecture_has_the_same_rows() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    shown = [re.findall(r"`(\w+)`", packages) for packages in re.findall(r"^\| \d+ \| (.*?) \|", page, re.M)]
    layers = next(iter(contracts().values()))["layers"]
    assert [sorted(row) for row in shown] == [sorted(layer.split(" | ")) for layer in layers]


def test_no_folder_and_no_module_is_too_large_to_read(tree: dict[str, str]) -> None:
    folders = Counter(path.rpartition("/")[0] for path in tree)
    assert {folder: number for folder, number in folders.items() if number > 16} == {}
    lines = {path: source.count("\n") for path, source in tree.items()}
    assert {path: number for path, number in lines.items() if number > 350} == {}


def test_no_two_classes_share_a_name(tree: dict[str, str]) -> None:
    homes: dict[str, list[str]] = {}
    for path, source in tree.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_importing_reknit_imports_no_framework_and_no_grpc() -> None:
    heavy = {"torch", "jax", "grpc", "rich", "duckdb", "opentelemetry"}
    code = f"import reknit, sys; print(*{heavy} & sys.modules.keys())"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []
