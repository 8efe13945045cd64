"""Fragments of the changelog are well formed, and a release moves them into the section under way."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.docs.pages import ROOT
from tests.optional import needs

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / "changelog.d"
WIDTH = 118  # of 120, since a bullet comes in front

needs_towncrier = needs("towncrier", "towncrier")


def problems(text: str) -> list[str]:
    """Return the reasons why the text of a fragment would not be one good entry."""
    found = []
    if not text.endswith(".\n") or text != text.strip() + "\n" or "\n\n" in text:
        found.append("it is one paragraph that ends with a full stop and a newline")
    if re.match(r"[-*#]", text):
        found.append("it begins with its first word: the release adds the bullet")
    if any(len(line) > WIDTH for line in text.splitlines()):
        found.append(f"a line has at most {WIDTH} characters")
    return found


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Gather the fragments of this folder as a release does."""
    command = [sys.executable, "-m", "towncrier", "build", "--version", "9.9.9", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a folder with the changelog of this project and its fragments."""
    shutil.copytree(FOLDER, tmp_path / "changelog.d")
    for name in ("CHANGELOG.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def test_every_fragment_is_one_good_entry() -> None:
    found = {path.name: problems(path.read_text()) for path in FOLDER.glob("*.md")}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@needs_towncrier
def test_a_release_moves_all_fragments_into_the_section_under_way(project: Path) -> None:
    (project / "changelog.d/first-store.added.md").write_text("A store\nis new.\n")
    (project / "changelog.d/first-store.fixed.md").write_text("A hang ends.\n")
    fragments = [path.read_text() for path in (project / "changelog.d").glob("*.md")]
    done = release(project, "--yes")
    assert done.returncode == 0, done.stderr
    section = re.split(r"^## .*$", (project / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    for text in fragments:
        assert "\n- " + text.replace("\n", "\n  ").rstrip(" ") in section
    assert section.index("\n- A store\n") < section.rindex("\n### Fixed\n\n") < section.index("\n- A hang")
    assert "\n\n\n" not in section
    assert [path.name for path in (project / "changelog.d").iterdir()] == ["template.jinja"]


@needs_towncrier
def test_a_fragment_with_another_name_is_an_error(project: Path) -> None:
    for name in ("store.new.md", "A_Store.added.md"):
        wrong = project / "changelog.d" / name
        wrong.write_text("A store is new.\n")
        done = release(project, "--draft")
        assert done.returncode != 0, name
        assert name.partition(".")[0] in done.stderr
        wrong.unlink()
