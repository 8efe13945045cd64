"""The modules that a fresh process imports before its first save or load ends."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

MOST_AT_IMPORT = 20
"""Modules of reknit that `import reknit` may bring; 7 at present."""
HEAVY = ("grpc", "google", "jax", "boto3", "botocore", "fsspec", "smtplib", "html", "rich")
NEVER = (*HEAVY, "reknit.runs", "reknit.cli", "reknit.monitor")
AT_IMPORT = (*NEVER, "email", "numpy", "pyarrow", "msgspec", "torch", "reknit.engine", "reknit.frameworks")
AT_BOTH = (
    *NEVER,
    "torch",
    "pyarrow",
    "numpy.random",
    "reknit.engine.background",
    "reknit.integrations.formats.entries",
    "reknit.integrations.formats.open",
    "reknit.integrations.torch_save",
)
AT_SAVE = (*AT_BOTH, "reknit.engine.loading", "reknit.engine.sharing")
AT_LOAD = (*AT_BOTH, "reknit.engine.saving", "reknit.transforms")
IN_AGENT = (
    *NEVER,
    "email",
    "torch",
    "pyarrow",
    "numpy",
    "reknit.frameworks",
    "reknit.api",
    "reknit.engine.saving",
)


def modules(script: str, *arguments: object) -> set[str]:
    """Return the modules that a fresh process has after a script."""
    script = f"import sys\nbefore = set(sys.modules)\n{script}\nprint(*sorted(set(sys.modules) - before))"
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def unwanted(names: set[str], kinds: tuple[str, ...]) -> list[str]:
    """Return the modules that are, or lie below, one of `kinds`."""
    return sorted(
        name for name in names if name.startswith(tuple(f"{kind}." for kind in kinds)) or name in kinds
    )


def test_the_import_brings_no_more_than_the_names() -> None:
    names = modules("import reknit")
    assert unwanted(names, AT_IMPORT) == []
    assert len([name for name in names if name.startswith("reknit")]) <= MOST_AT_IMPORT


def test_all_names_can_be_had_one_after_another_and_are_listed_before() -> None:
    script = (
        "import reknit\nassert set(dir(reknit)) == set(reknit.__all__)\nassert not hasattr(reknit, 'a.b')\n"
    )
    names = modules(f"{script}for name in dir(reknit):\n    getattr(reknit, name)")
    assert "reknit.runs.checkpointer" in names


def test_a_package_below_is_there_whatever_was_used_before() -> None:
    names = modules("import reknit\nassert reknit.storage.__name__ and reknit.options.SaveOptions")
    assert "reknit.api" not in names


def test_a_save_and_a_load_import_only_their_own_rooms(tmp_path: Path) -> None:
    state = "import numpy as np, reknit\nstate = {'model': {'w': np.zeros(9)}, 'step': 3}\n"
    saving = modules(f"{state}reknit.save(sys.argv[1], state)", tmp_path / "a")
    assert unwanted(saving, AT_SAVE) == []
    loading = modules(f"{state}reknit.load(sys.argv[1], state)", tmp_path / "a")
    assert unwanted(loading, AT_LOAD) == []


def test_an_agent_that_has_nothing_to_do_has_no_heavy_modules() -> None:
    names = modules("import reknit.engine.background.agent")
    assert unwanted(names, IN_AGENT) == []


@pytest.mark.parametrize("name", ["save", "load", "Checkpointer"])
def test_a_handler_that_interrupts_an_import_is_refused_with_what_to_do(name: str) -> None:
    script = (
        "import reknit\n"
        "from importlib import abc\n"
        "class Interrupts(abc.MetaPathFinder):\n"
        "    def find_spec(self, found, path, target=None):\n"
        "        if found == 'msgspec':\n"
        "            try:\n                reknit.save\n"
        "            except reknit.errors.UsageError as error:\n                refused.append(error)\n"
        "refused = []\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        f"reknit.{name}\n"
        "assert 'on_preemption' in refused[0].remedy, refused\n"
    )
    modules(script)
