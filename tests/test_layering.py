"""The order of the source tree: who may import whom, and how large a module and a folder may be.

The page about the architecture has the rules, as tables.  Here they become contracts of import-linter.
"""

from __future__ import annotations

import ast
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.way.house import counted, is_plugin

tomllib: Any = pytest.importorskip("tomllib")  # as import-linter, it needs Python 3.11
import_linter = pytest.importorskip("importlinter.cli")

grimp = pytest.importorskip("grimp")

ROOT = Path(__file__).parents[1]
BORDER = ROOT / "tests/border.txt"
OPEN = {
    f"reknit{name}"
    for name in ("", ".errors", ".keywords", ".locations", ".options", ".plugins", ".policies", ".transforms")
}
"""Modules of the core that plug-ins may import: public ones, and ones that every module may import."""
SOURCES = ROOT / "src/reknit"
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
LIBRARIES = ("torch", "jax", "grpc")
# These need no import statement, and so import-linter does not find them.
LOOKED_UP = re.compile(
    rf"(?:sys\.modules(?:\.get\(|\[)|import_module\(|__import__\()[\"']({'|'.join(LIBRARIES)})\b"
)


def table(page: str, *head: str) -> list[list[list[str]]]:
    """Return the rows of the table with this head: the words of each cell, without commas."""
    lines = page.partition(f"| {' | '.join(head)} |\n")[2].partition("\n\n")[0].splitlines()[1:]
    return [[re.findall(r"[^\s,`]+", cell) for cell in line.split("|")[1:-1]] for line in lines]


def module(name: str, below: bool = False) -> str:
    """Return the expression for a module of reknit, or for all modules below it if it is a package."""
    path = name.removesuffix(".py").rstrip("/").replace("/", ".")
    is_package = (SOURCES / path.replace(".", "/")).is_dir()
    return f"reknit.{path}.**" if below and is_package else f"reknit.{path}"


def homes(page: str) -> dict[str, list[str]]:
    """Return the modules that may import each library."""
    return {what[0]: [module(place) for place in places] for what, places in table(page, "what", "where")}


def contracts(page: str) -> list[dict[str, Any]]:
    """Return the contracts of import-linter that the tables of the page describe."""
    rows = table(page, "row", "package", "may import")
    layers: dict[str, list[str]] = {}
    for (number,), packages, _ in rows:
        layers.setdefault(number, []).extend(packages)
    for_now = [
        f"{module(source)} -> {module(target)}"
        for sources, targets in table(page, "module", "imports for now")
        for source in sources
        for target in targets
    ]
    made: list[dict[str, Any]] = [
        {
            "name": "an import points to a lower row, and packages of one row never import each other",
            "type": "layers",
            "containers": ["reknit"],
            "exhaustive": True,
            "layers": [" | ".join(packages) for packages in layers.values()],
            "ignore_imports": for_now,
        },
        {
            "name": "modules and folders of one package do not import each other in a circle",
            "type": "acyclic_siblings",
            "ancestors": ["reknit", "reknit.**"],
            "ignore_imports": for_now,
        },
    ]
    basics = {name for number in list(layers)[-3:] for name in layers[number]}
    extra = {
        (name, target)
        for names, targets in table(page, "module", "may also import")
        for name in names
        for target in targets
    }
    for (number,), packages, (*words,) in rows:
        below = {name for row, names in layers.items() if int(row) > int(number) for name in names}
        listed = below & set(words)
        forbidden = listed if "anything" in words else below - listed - (set() if "only" in words else basics)
        for name in packages if forbidden else ():
            made.append(
                {
                    "name": name,
                    "type": "forbidden",
                    "source_modules": [module(name)],
                    "forbidden_modules": [module(other) for other in sorted(forbidden)],
                    "allow_indirect_imports": True,
                    "ignore_imports": [
                        f"{module(source, below=True)} -> {module(target, below=True)}"
                        for source, target in sorted(extra)
                        if source.split(".")[0] == name and target.split(".")[0] in forbidden
                    ],
                }
            )
    made += [
        {"name": name, "type": "protected", "protected_modules": [name], "allowed_importers": importers}
        for name, importers in homes(page).items()
        if name in LIBRARIES
    ]
    return made


def breaches(page: str, folder: Path) -> int:
    """Check the imports by the rules of the page, and return the exit status; 0 if every import keeps them.

    import-linter would set up logging for the whole process, which turns off all loggers that exist.
    """
    lines = ["[tool.importlinter]", 'root_package = "reknit"', "include_external_packages = true"]
    for contract in contracts(page):
        lines += ["[[tool.importlinter.contracts]]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in contract.items()]
    (folder / "layers.toml").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_linter.logging_config, "dictConfig", lambda config: None)
        return int(import_linter.lint_imports(config_filename=str(folder / "layers.toml"), no_cache=True))


@pytest.fixture(scope="module")
def tree() -> dict[str, str]:
    return {path.relative_to(SOURCES).as_posix(): path.read_text() for path in sorted(SOURCES.rglob("*.py"))}


def test_every_import_keeps_the_rules_of_the_page(tmp_path: Path) -> None:
    assert breaches(PAGE, tmp_path) == 0
    assert not logging.getLogger("reknit").disabled


@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("| 10 | `types` | only `errors` |\n", ""),  # a package without a row
        ("| 6 | `engine` |", "| 7 | `engine` |"),
        ("| 8 | `storage` | `events` |", "| 8 | `storage` | |"),
        ("| `engine` | `comm.group`, `storage.base` |\n", ""),
        ("| `torch` | `frameworks/`, ", "| `torch` | "),
    ],
)
def test_a_breach_is_noticed(rule: str, broken: str, tmp_path: Path) -> None:
    assert PAGE.count(rule) == 1
    assert breaches(PAGE.replace(rule, broken), tmp_path) != 0


@pytest.fixture(scope="module")
def graph() -> Any:
    return grimp.build_graph("reknit", cache_dir=None)


def sides(graph: Any) -> tuple[set[str], set[str]]:
    """Return the modules of the core, and those of plug-ins."""
    plugins = set()
    for name in graph.modules:
        path = name.partition(".")[2].replace(".", "/")
        if is_plugin(f"{path}/" if (SOURCES / path).is_dir() else f"{path}.py"):
            plugins.add(name)
    return graph.modules - plugins, plugins


def test_the_core_imports_no_plug_in_but_for_the_start_of_the_command(graph: Any) -> None:
    core, plugins = sides(graph)
    assert plugins
    crossing = {(a, b) for a in core for b in graph.find_modules_directly_imported_by(a) if b in plugins}
    assert crossing == {("reknit.__main__", "reknit.cli.main")}


def test_plug_ins_import_no_more_of_the_core_than_is_listed(graph: Any) -> None:
    core, plugins = sides(graph)
    used = {b for a in plugins for b in graph.find_modules_directly_imported_by(a) if b in core}
    others = {name for name in used if name not in OPEN and not name.startswith("reknit.plugins.")}
    listed = set(BORDER.read_text().split())
    assert others - listed == set(), "export these names in a module of reknit.plugins"
    assert listed - others == set(), "nothing imports these any more: remove them from the list"
    reasons = table(PAGE, "module of the core", "for", "reason")
    assert {module(name) for (name,), _, reason in reasons if reason} == listed


def test_the_core_imports_no_interface_for_plug_ins(graph: Any) -> None:
    core, _ = sides(graph)
    used = {b for a in core for b in graph.find_modules_directly_imported_by(a)}
    assert {name for name in used if name.startswith("reknit.plugins.")} == set()


def test_a_library_is_looked_up_only_where_it_may_be_imported(tree: dict[str, str]) -> None:
    for path, source in tree.items():
        for found in LOOKED_UP.finditer(source):
            assert any(f"{module(path)}.".startswith(f"{home}.") for home in homes(PAGE)[found[1]]), path


def test_the_page_names_the_modules_that_may_use_banned_features() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    ignored = " ".join(key for key, rules in config.items() if "TID251" in rules and key.startswith("src/"))
    spelled = re.sub(
        r"(\S+)\{(.+?)\}(\S+)", lambda m: " ".join(m[1] + n + m[3] for n in m[2].split(",")), ignored
    )
    allowed = {pattern.removeprefix("src/reknit/").removesuffix("**") for pattern in spelled.split()}
    shown = [row for row in table(PAGE, "what", "where") if row[0][0] not in LIBRARIES]
    assert {place for _, places in shown for place in places} == allowed


def test_no_module_is_too_large_to_read(tree: dict[str, str]) -> None:
    lines = {path: source.count("\n") for path, source in tree.items()}
    assert {path: number for path, number in lines.items() if number > 700} == {}


SMALL = {
    "__main__.py": "the entry of the command",
    "api/phases.py": "a call of users that no other call needs",
    "engine/loading/task.py": "the values of one load",
    "engine/saving/save.py": "the driver, whose steps are elsewhere",
    "engine/saving/task.py": "the values of one save",
    "engine/stored/at_path.py": "above recognising and hints, which need none of it",
    "format/checksum.py": "the rule of the digest, for all readers and writers",
    "integrations/model_maps.py": "public names; between two rooms, each of which needs the other's models",
    "plugins/events.py": "an interface: its names are in the stub",
    "plugins/format.py": "an interface: its names are in the stub",
    "plugins/framework.py": "an interface: its names are in the stub",
    "plugins/store.py": "an interface: its names are in the stub",
    "plugins/trainer.py": "an interface: its names are in the stub",
    "sinks.py": "public names",
    "stores/fsspec_protocols.py": "the protocols of fsspec, without the import of fsspec",
    "transforms/models.py": "the public name of rules that a plug-in has",
    "types/dtype.py": "the table of element types",
}
"""Modules of fewer than 60 code lines, and the reason of each."""


def test_a_small_module_has_a_reason(tree: dict[str, str]) -> None:
    small = {path for path, source in tree.items() if counted(source).code_lines < 60}
    packages = {path for path in small if path.endswith("__init__.py")}
    commands = {path for path in small if path.startswith("cli/")}
    assert small - packages - commands - SMALL.keys() == set()
    assert SMALL.keys() - tree.keys() == set()


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


FOREIGN = {"torch", "jax", "megatron", "deepspeed"}
"""Libraries whose names begin as those of modules of reknit."""
VARIABLES = {"tensor.data", "report.unread", "config.json"}
"""Parts of objects in docstrings whose names begin as those of modules of reknit."""
_POINTER = re.compile(r"(?<!`)`([a-z_]+(?:\.\w+)+)`(?!`)")


def test_every_module_that_a_docstring_names_is_there(tree: dict[str, str]) -> None:
    paths = {tuple(path.removesuffix(".py").removesuffix("/__init__").split("/")): path for path in tree}
    ends: dict[tuple[str, ...], list[str]] = {}
    for parts, path in paths.items():
        for begin in range(len(parts)):
            ends.setdefault(parts[begin:], []).append(path)
    lost = []
    for path, source in tree.items():
        for name in {*_POINTER.findall(source)} - VARIABLES:
            first, *_ = whole = tuple(name.split("."))
            if first in FOREIGN or (first,) not in ends or path.startswith("integrations/deepspeed"):
                continue
            longest = max(end for end in range(1, len(whole) + 1) if whole[:end] in ends)
            below = whole[longest:]
            texts = "".join(tree[each] for each in ends[whole[:longest]])
            if not all(re.search(rf"\b{part}\b", texts) for part in below):
                lost.append(f"{path}: {name}")
    assert sorted(lost) == []
