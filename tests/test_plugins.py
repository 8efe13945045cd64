"""The rows of `reknit.plugins`, and the modules that a process imports for them."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import reknit
from reknit import plugins
from reknit.errors import CheckpointNotFoundError, MissingExtraError
from tests.way.house import is_plugin

tomllib: Any = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[1]


def test_the_project_declares_the_same_rows_as_entry_points() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    rows = {
        group: {key: row if isinstance(row, str) else row.module for key, row in table.items()}
        for group, table in plugins.ROWS.items()
    }
    assert declared == rows


@pytest.mark.parametrize(
    ("group", "key"), [(group, key) for group, rows in plugins.ROWS.items() for key in rows]
)
def test_the_value_of_a_row_is_there(group: str, key: str) -> None:
    row = plugins.ROWS[group][key]
    if (needs := getattr(row, "needs", "")) and find_spec(needs.partition(".")[0]) is None:
        pytest.skip(f"{needs} is not installed")
    try:
        assert plugins.find(group, key) is not None
    except (ImportError, MissingExtraError) as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "src/reknit/plugins").glob("*.pyi")))
def test_every_name_of_an_interface_is_there(name: str) -> None:
    pytest.importorskip("torch")
    stub = ast.parse((ROOT / f"src/reknit/plugins/{name}.pyi").read_text())
    names = [each.name for line in stub.body if isinstance(line, ast.ImportFrom) for each in line.names]
    interface = import_module(f"reknit.plugins.{name}")
    assert names
    for each in names:
        assert getattr(interface, each) is not None
    with pytest.raises(AttributeError, match="'absent'"):
        interface.absent  # noqa: B018


def test_a_name_of_an_interface_may_be_a_module() -> None:
    script = "from reknit.plugins.framework import tree; print(tree.__name__)"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["reknit.frameworks.tree"]


def test_a_row_whose_library_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    for name in [name for name in sys.modules if name.startswith("reknit.stores.hdfs")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"hdfs://a/b needs the package hdfs-native") as caught:
        plugins.find("reknit.storage", "hdfs", "hdfs://a/b")
    assert caught.value.remedy == "pip install 'reknit[hdfs]'"


@pytest.mark.parametrize("torch", [False, True])
def test_a_first_save_and_load_bring_no_plug_in(torch: bool, tmp_path: Path) -> None:
    array = "import torch; w = torch.zeros(9)" if torch else "import numpy; w = numpy.zeros(9)"
    script = (
        f"import sys; {array}; import reknit\n"
        "reknit.save(sys.argv[1], {'model': {'w': w}, 'step': 3})\n"
        "reknit.load(sys.argv[1], {'model': {'w': w}, 'step': 0})\n"
        "print(*(name for name in sys.modules if name.startswith('reknit.')))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "a")]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "reknit.engine.loading.load" in loaded
    paths = [name.partition(".")[2].replace(".", "/") for name in loaded]
    folders = [path for path in paths if (ROOT / "src/reknit" / path).is_dir()]
    found = [f"{path}/" if path in folders else f"{path}.py" for path in paths]
    assert [path for path in found if is_plugin(path)] == []


def install(folder: Path, name: str, group: str, key: str, target: str) -> None:
    """Write the metadata of an installed distribution with an entry point."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{key} = {target}\n")


def test_an_entry_point_with_a_name_of_reknit_is_ignored_with_an_error_that_names_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, "acme", "reknit.commands", "ls", "acme:ls")
    monkeypatch.syspath_prepend(tmp_path)
    assert "ls" not in plugins.installed("reknit.commands")
    assert plugins.find("reknit.commands", "ls").__name__ == "reknit.cli.ls"
    (line,) = caplog.messages
    assert line == (
        "the distribution acme brings 'ls' (acme:ls) to reknit.commands, which is a name of reknit, "
        "and is ignored"
    )


def test_of_two_distributions_with_one_name_the_first_is_used_and_the_other_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("acme", "zenith"):
        install(tmp_path / name, name, "reknit.storage", "vault", f"{name}:open")
        monkeypatch.syspath_prepend(tmp_path / name)
    assert plugins.installed("reknit.storage")["vault"].value == "zenith:open"
    (line,) = caplog.messages
    assert "the distribution acme brings 'vault'" in line
    assert "as the distribution zenith does" in line


def test_distributions_in_an_archive_and_of_another_finder_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("acme", "zenith"):
        install(tmp_path / name, name, "reknit.storage", f"{name}-vault", f"{name}:open")
    monkeypatch.syspath_prepend(shutil.make_archive(str(tmp_path / "packed"), "zip", tmp_path / "acme"))
    zenith = Distribution.at(tmp_path / "zenith" / "zenith-1.0.dist-info")
    finder = SimpleNamespace(find_distributions=lambda _: [zenith], find_spec=lambda *_: None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, finder])
    assert {"acme-vault", "zenith-vault"} <= plugins.installed("reknit.storage").keys()


def test_a_format_that_cannot_be_loaded_is_named_and_other_paths_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path / "site", "acme", "reknit.formats", "Acme", "acme_of_nobody:Acme")
    monkeypatch.syspath_prepend(tmp_path / "site")
    np.save(tmp_path / "a.npy", np.arange(3))
    with reknit.open(tmp_path / "a.npy") as checkpoint:
        assert checkpoint.tensors["model"]["array"].shape == (3,)
    with pytest.raises(CheckpointNotFoundError):
        reknit.open(tmp_path / "site")
    (line,) = {message for message in caplog.messages if "acme" in message}
    assert "the distribution acme brings 'Acme'" in line
