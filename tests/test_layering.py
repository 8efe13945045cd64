"""The order of the source tree: who may import whom, and which modules are the only home of some things."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCES = Path(__file__).parents[1] / "src" / "reknit"

# An import points to a lower row, and packages of one row never import each other.
ROWS = (
    ("__main__",),
    ("cli", "integrations", "testing"),
    ("runs", "interop"),
    ("api",),
    ("stored", "phases", "sinks", "alerts"),
    ("calls",),
    ("arguments", "ranks"),
    ("engine",),
    ("planner", "frameworks", "dataloader", "transforms"),
    ("storage", "comm", "format", "processes"),
    ("monitor", "policies"),
    ("types",),
    ("options", "environment", "system"),
    ("keywords", "locations"),
    ("errors",),
)
ROW = {package: number for number, packages in enumerate(ROWS) for package in packages}

# Below the door a package may not use all that lies lower.  A dotted name is one module of a package.
LOWEST = {"options", "environment", "system", "keywords", "locations", "errors"}
MAY_IMPORT = {
    "api": {
        "stored",
        "calls",
        "arguments",
        "ranks",
        "engine",
        "frameworks",
        "dataloader",
        "planner",
        "transforms",
        "storage.registry",
        "comm",
        "format",
        "monitor",
        "types",
        "policies",
    }
    | LOWEST,
    "stored": {
        "calls",
        "arguments",
        "engine",
        "frameworks",
        "transforms",
        "storage.registry",
        "monitor",
    }
    | LOWEST,
    "phases": {"ranks", "monitor"} | LOWEST,
    "sinks": {"monitor"} | LOWEST,
    "alerts": {"monitor"} | LOWEST,
    "calls": {"arguments", "engine", "storage.registry", "comm", "monitor", "types"} | LOWEST,
    "arguments": {"engine", "storage.registry"} | LOWEST,
    "ranks": {"frameworks", "comm"} | LOWEST,
    "engine": {
        "planner",
        "transforms",
        "storage.base",
        "comm.base",
        "format",
        "processes",
        "monitor",
        "types",
    }
    | LOWEST,
    "planner": {"types"} | LOWEST,
    "frameworks": {"types"} | LOWEST,
    "dataloader": {"format", "processes", "types"} | LOWEST,
    "transforms": {"types"} | LOWEST,
    "storage": {"monitor"} | LOWEST,
    "comm": {"monitor", "types"} | LOWEST,
    "format": {"monitor", "types"} | LOWEST,
    "processes": LOWEST,
    "monitor": {"types"} | LOWEST,
    "policies": {"types", "keywords", "errors"},
    "types": {"errors"},
    "options": {"errors", "keywords", "locations"},
    "keywords": {"errors"},
    "locations": {"errors"},
    "environment": {"errors"},
    "system": {"errors"},
    "errors": set(),
}

# The agent is a process of its own, and a door: it picks the stores and the tree as `api` does.  Agents are
# a tree, whatever group their trainers are, and so is the group in which trainers form it.
DOORS = {
    "reknit.engine.background.agent": {"comm"},
    "reknit.engine.background.agent_job": {"storage.registry"},
    "reknit.engine.background.side_group": {"comm"},
    "reknit": {"runs"},  # the names that users import
}


class Room(NamedTuple):
    """Names that only some files may use: `homes` are files, or folders that end in a slash."""

    names: tuple[str, ...]
    homes: tuple[str, ...]


ROOMS = {
    "torch": Room(
        ("torch",),
        (
            "frameworks/",
            "engine/memory/elements.py",
            "engine/memory/sample.py",
            "engine/memory/sources.py",
            "engine/memory/staging.py",
            "engine/sharing/exchange.py",
            "integrations/",
            "interop/",
            "dataloader/",
            "testing/accelerator/",
            "types/devices.py",
        ),
    ),
    "jax": Room(
        ("jax", "jaxlib"),
        (
            "frameworks/jax/",
            "integrations/",
        ),
    ),
    "grpc": Room(
        ("grpc",),
        (
            "comm/serving.py",
            "comm/tree/client.py",
            "comm/tree/server.py",
            "comm/tls.py",
            "comm/meeting/address_store.py",
            "comm/meeting/address_server.py",
        ),
    ),
    "environment": Room(
        ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"),
        ("environment.py",),
    ),
    "clock": Room(
        (
            "time.perf_counter",
            "time.perf_counter_ns",
            "time.monotonic",
            "time.monotonic_ns",
            "time.clock_gettime",
            "time.clock_gettime_ns",
        ),
        ("monitor/",),
    ),
    "threads": Room(
        (
            "threading.Thread",
            "threading.Timer",
            "_thread",
            "queue",
            "concurrent.futures",
            "multiprocessing",
            "asyncio",
        ),
        (
            "engine/memory/workers.py",
            "engine/background/agent.py",
            "engine/background/lanes.py",
            "storage/hdfs/threads.py",
            "storage/object/upload.py",
            "system.py",
            "comm/",
            "monitor/dash/server.py",
            "runs/run_folder.py",
            "runs/under_way.py",
            "testing/",
        ),
    ),
    "pickle": Room(
        ("pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve"), ("format/values/blob_codec.py",)
    ),
}


class Import(NamedTuple):
    """An import of one module of reknit by another; `for_types` when it is not carried out."""

    source: str
    target: str
    line: int
    for_types: bool


def modules(tree: dict[str, str]) -> dict[str, str]:
    """Return the path of every module, by dotted name."""
    named = {}
    for path in tree:
        parts = ["reknit", *path.removesuffix(".py").split("/")]
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def package(module: str) -> str:
    """Return the part of the tree that a module belongs to; what users import belongs to the door."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "api"


def statements(node: ast.AST, for_types: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Yield every import below a node, at whatever depth, and whether it is for types only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, for_types
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            checked = not isinstance(child.test, ast.UnaryOp)
            yield from statements(ast.Module(child.body, []), for_types or checked)
            yield from statements(ast.Module(child.orelse, []), for_types or not checked)
        else:
            yield from statements(child, for_types)


def imported(statement: ast.Import | ast.ImportFrom, path: str) -> list[tuple[str, str]]:
    """Return the local and the dotted name of everything that a statement of the file `path` imports."""
    if isinstance(statement, ast.Import):
        return [(a.asname or a.name.split(".")[0], a.name) for a in statement.names]
    base = statement.module or ""
    if statement.level:
        folder = ["reknit", *path.split("/")[:-1]]
        base = ".".join([*folder[: len(folder) - statement.level + 1], *filter(None, [base])])
    return [(a.asname or a.name, f"{base}.{a.name}") for a in statement.names]


def imports(tree: dict[str, str]) -> list[Import]:
    """Return all imports between modules of the tree."""
    known = modules(tree)
    found = []
    for module, path in known.items():
        for statement, for_types in statements(ast.parse(tree[path])):
            for _, dotted in imported(statement, path):
                if dotted.split(".")[0] != "reknit":
                    continue
                target = (
                    dotted
                    if dotted in known or isinstance(statement, ast.Import)
                    else dotted.rpartition(".")[0]
                )
                found.append(Import(module, target, statement.lineno, for_types))
    return found


def breaches(tree: dict[str, str]) -> list[str]:
    """Return every import that points to where it must not."""
    known, told = modules(tree), []
    for source, target, line, for_types in imports(tree):
        here, there = package(source), package(target)
        at = f"{known[source]}:{line}: {source} imports {target}"
        if here not in ROW or there not in ROW:
            told.append(f"{at}, and {here if here not in ROW else there} has no row")
        elif here == there:
            continue
        elif for_types:
            if ROW[there] < ROW[here] and there not in DOORS.get(source, set()):
                told.append(f"{at} for its types, which lies higher")
        elif ROW[there] <= ROW[here] and there not in DOORS.get(source, set()):
            told.append(f"{at}, which does not lie lower")
        elif here in MAY_IMPORT and not allowed(target, MAY_IMPORT[here] | DOORS.get(source, set())):
            told.append(f"{at}; {here} may import only {', '.join(sorted(MAY_IMPORT[here])) or 'nothing'}")
    return told


def circles(tree: dict[str, str]) -> list[list[str]]:
    """Return the rooms within one package that import each other, in whatever number of steps.

    A room is a folder, or a module beside the folders.  Imports for types count: whoever reads one of the
    rooms has to know the other.
    """
    graphs: dict[str, dict[str, set[str]]] = {}
    for source, target, _, _ in imports(tree):
        here, there = (room(module, tree) for module in (source, target))
        if here != there and package(source) == package(target):
            graphs.setdefault(package(source), {}).setdefault(here, set()).add(there)
    found = []
    for graph in graphs.values():
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            found.append(list(error.args[1]))
    return found


def room(module: str, tree: dict[str, str]) -> str:
    """Return the folder of a module within its package, or the module where it lies in none."""
    parts = module.split(".")[1:]
    return "/".join(parts[:2]) if len(parts) > 1 else parts[0] if parts else "api"


def allowed(target: str, names: set[str]) -> bool:
    """Tell whether a module is one of the named packages or modules, or inside one."""
    inside = target.removeprefix("reknit.")
    return any(inside == name or inside.startswith(f"{name}.") for name in names)


def cycle(tree: dict[str, str]) -> list[str]:
    """Return the modules of an import cycle, lazy imports and those for types included, or nothing."""
    graph: dict[str, set[str]] = {}
    for source, target, _, _ in imports(tree):
        graph.setdefault(source, set()).add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def dotted_name(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return what `a.b.c` stands for, given what the file calls its imports."""
    if isinstance(node, ast.Attribute):
        inner = dotted_name(node.value, names)
        return None if inner is None else f"{inner}.{node.attr}"
    return names.get(node.id) if isinstance(node, ast.Name) else None


def looked_up(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return the module that an expression fetches by its name as text, if it does."""
    if isinstance(node, ast.Subscript) and dotted_name(node.value, names) == "sys.modules":
        key = node.slice
    elif isinstance(node, ast.Call) and node.args:
        called = dotted_name(node.func, names) or ast.unparse(node.func)
        if called not in ("sys.modules.get", "importlib.import_module", "__import__"):
            return None
        key = node.args[0]
    else:
        return None
    return key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


@cache
def uses(source: str, path: str) -> list[tuple[str, int]]:
    """Return the dotted name of everything foreign that a file imports or mentions, with the line."""
    parsed = ast.parse(source)
    names: dict[str, str] = {}
    found = []
    for statement, _ in statements(parsed):
        for local, dotted in imported(statement, path):
            found.append((dotted, statement.lineno))
            plain = isinstance(statement, ast.Import) and "." in dotted and local == dotted.split(".")[0]
            names[local] = local if plain else dotted
    for node in ast.walk(parsed):
        name = dotted_name(node, names) or looked_up(node, names)
        if name is not None and isinstance(node, ast.expr):
            found.append((name, node.lineno))
    return found


def strays(tree: dict[str, str], room: Room) -> list[str]:
    """Return every use of a room's names outside its homes."""
    told: dict[str, None] = {}
    for path, source in tree.items():
        if any(path == home or (home.endswith("/") and path.startswith(home)) for home in room.homes):
            continue
        for dotted, line in uses(source, path):
            for name in room.names:
                if dotted == name or dotted.startswith(f"{name}."):
                    told[f"{path}:{line}: {name} belongs in {', '.join(room.homes)}"] = None
    return list(told)


@pytest.fixture(scope="module")
def tree() -> dict[str, str]:
    return {path.relative_to(SOURCES).as_posix(): path.read_text() for path in sorted(SOURCES.rglob("*.py"))}


def test_the_source_tree_is_found(tree: dict[str, str]) -> None:
    assert {"__init__.py", "api.py", "engine/saving/save.py", "types/box.py"} <= tree.keys()
    assert len(imports(tree)) > 100


def test_every_import_points_to_a_lower_row(tree: dict[str, str]) -> None:
    assert breaches(tree) == []


def test_rooms_of_a_package_import_one_way(tree: dict[str, str]) -> None:
    assert circles(tree) == []


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


def test_no_modules_import_each_other_in_a_circle(tree: dict[str, str]) -> None:
    assert cycle(tree) == []


@pytest.mark.parametrize("name", ROOMS)
def test_single_things_stay_in_their_rooms(tree: dict[str, str], name: str) -> None:
    assert strays(tree, ROOMS[name]) == []


def test_importing_reknit_imports_no_framework_and_no_grpc() -> None:
    heavy = {"torch", "jax", "grpc", "rich", "duckdb", "opentelemetry"}
    code = f"import reknit, sys; print(*{heavy} & sys.modules.keys())"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


# From here on the checker itself is checked: each small tree breaks one rule.

LIBRARY = {
    "__init__.py": "",
    "api.py": "",
    "engine/__init__.py": "",
    "engine/saving/save.py": "",
    "planner/save.py": "",
    "storage/base.py": "",
    "storage/local/store.py": "",
    "comm/base.py": "",
    "types/box.py": "",
    "options.py": "",
    "environment.py": "",
    "errors.py": "",
    "testing/world.py": "",
}


def with_source(path: str, source: str) -> dict[str, str]:
    return LIBRARY | {path: source}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("types/box.py", "import reknit.engine.saving.save"),
        ("types/box.py", "from reknit.engine import save"),
        ("types/box.py", "from reknit.engine.saving.save import save"),
        ("types/box.py", "from reknit import api"),
        ("types/box.py", "import reknit"),
        ("types/box.py", "from ..engine import save"),
        ("types/box.py", "def f():\n    from reknit.engine import save"),
        ("types/box.py", "if TYPE_CHECKING:\n    from reknit.engine import save"),
        ("types/box.py", "if TYPE_CHECKING:\n    x = 1\nelse:\n    from reknit.engine import save"),
        ("types/box.py", "if typing.TYPE_CHECKING:\n    from reknit.engine import save"),
        ("types/box.py", "try:\n    import reknit.engine.saving.save\nexcept ImportError:\n    pass"),
        ("types/box.py", "from reknit.options import SaveOptions"),
        ("errors.py", "from reknit.options import SaveOptions"),
        ("storage/local/store.py", "from reknit.comm.base import Group"),
        ("engine/saving/save.py", "from reknit.storage.local.store import LocalStorage"),
        ("engine/saving/save.py", "from reknit.storage import local"),
        ("planner/save.py", "from reknit.storage.base import Storage"),
        ("engine/saving/save.py", "from reknit.testing.world import World"),
        ("helpers/text.py", "from reknit.types.box import Box"),
        ("engine/saving/save.py", "from reknit.helpers import text"),
    ],
)
def test_an_import_against_the_rows_is_noticed(path: str, source: str) -> None:
    assert len(breaches(with_source(path, source))) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engine/saving/save.py", "from reknit.storage.base import Storage"),
        ("engine/saving/save.py", "from reknit.storage import base"),
        ("engine/saving/save.py", "from reknit.types.box import Box"),
        ("engine/saving/save.py", "from reknit.engine import pipeline"),
        (
            "engine/saving/save.py",
            "if TYPE_CHECKING:\n    from reknit.storage.local.store import LocalStorage",
        ),
        ("storage/local/store.py", "if TYPE_CHECKING:\n    from reknit.comm.base import Group"),
        ("testing/world.py", "import reknit"),
        ("testing/world.py", "from reknit.storage.local.store import LocalStorage"),
        ("options.py", "from reknit.errors import UsageError"),
    ],
)
def test_an_import_along_the_rows_is_let_through(path: str, source: str) -> None:
    assert breaches(with_source(path, source)) == []


@pytest.mark.parametrize("back", ["def f():\n    {}", "if TYPE_CHECKING:\n    {}", "{}"])
def test_a_circle_of_imports_is_noticed_also_when_one_is_lazy_or_for_types(back: str) -> None:
    circle = LIBRARY | {
        "engine/saving/save.py": "from reknit.engine.loading import load",
        "engine/loading/load.py": back.format("from reknit.engine.saving.save import save"),
    }
    assert set(cycle(circle)) == {"reknit.engine.saving.save", "reknit.engine.loading.load"}


@pytest.mark.parametrize(
    ("room", "source"),
    [
        ("torch", "import torch"),
        ("torch", "import torch.distributed as dist"),
        ("torch", "from torch import nn"),
        ("torch", "def f():\n    import torch"),
        ("torch", "if TYPE_CHECKING:\n    import torch"),
        ("torch", "import sys\ntorch = sys.modules['torch']"),
        ("torch", "import sys\ntorch = sys.modules.get('torch.nn')"),
        ("torch", "from importlib import import_module\nx = import_module('torch')"),
        ("torch", "x = __import__('torch')"),
        ("jax", "import jax.numpy as jnp"),
        ("grpc", "import grpc"),
        ("environment", "import os\nx = os.environ['HOME']"),
        ("environment", "import os\nx = os.environ.get('HOME')"),
        ("environment", "import os as o\nx = o.getenv('HOME')"),
        ("environment", "from os import environ"),
        ("environment", "import os.path\nx = os.environ"),
        ("clock", "import time\nx = time.monotonic()"),
        ("clock", "from time import perf_counter as tick"),
        ("threads", "import threading\nthreading.Thread(target=f).start()"),
        ("threads", "from threading import Timer"),
        ("threads", "import queue"),
        ("threads", "from concurrent.futures import ThreadPoolExecutor"),
        ("threads", "from concurrent import futures"),
        ("pickle", "import pickle"),
        ("pickle", "from pickle import loads"),
    ],
)
def test_a_thing_outside_its_room_is_noticed(room: str, source: str) -> None:
    assert len(strays(with_source("types/box.py", source), ROOMS[room])) == 1
    assert all(
        strays(with_source("types/box.py", source), ROOMS[other]) == [] for other in ROOMS if other != room
    )


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("frameworks/plain.py", "import torch"),
        ("engine/memory/staging.py", "import sys\ntorch = sys.modules['torch']"),
        ("comm/tree/client.py", "import grpc, threading\nthreading.Thread()"),
        ("environment.py", "import os\nx = os.environ"),
        ("monitor/phase.py", "import time\nx = time.monotonic()"),
        ("engine/memory/workers.py", "import threading\nthreading.Thread()"),
        ("format/values/blob_codec.py", "import pickle"),
        ("engine/saving/save.py", "import threading\nlock = threading.Lock()\nlocal = threading.local()"),
        (
            "engine/saving/save.py",
            "import os, time\nx = os.path.join('a', 'b')\ntime.sleep(1)\ny = time.time()",
        ),
        ("engine/saving/save.py", "torch = 1\nx = torch"),
        ("engine/saving/save.py", "import sys\nx = sys.modules['numpy']"),
    ],
)
def test_a_thing_in_its_room_is_let_through(path: str, source: str) -> None:
    assert all(strays(with_source(path, source), room) == [] for room in ROOMS.values())
