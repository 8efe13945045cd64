"""The spelling check of `scripts/lint` finds a typo, and its list of exceptions has only used words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

codespell: Any = pytest.importorskip("codespell_lib", reason="needs codespell")
tomllib: Any = pytest.importorskip("tomllib")


def passes(*arguments: str | Path) -> bool:
    """Return whether codespell finds nothing with the settings of the project."""
    status: int = codespell.main("--toml", str(ROOT / "pyproject.toml"), *map(str, arguments))
    return status == 0


def test_a_typo_is_found_and_the_nearest_word_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # without another file of settings
    (tmp_path / "page.md").write_text("This is t" + "eh best.\n")
    assert not passes(tmp_path / "page.md")
    assert "==> the" in capsys.readouterr().out


def test_every_exception_is_a_word_of_the_repository() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["codespell"]
    words = set(settings["ignore-words-list"].split(","))
    files = [
        file
        for folder in ("src", "tests")
        for file in (ROOT / folder).rglob("*.py")
        if file != Path(__file__)
    ]
    used = {word.lower() for file in files for word in re.findall(r"[A-Za-z]+", file.read_text())}
    assert words - used == set()
