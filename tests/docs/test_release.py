"""A release: its archives hold the right files and no others, and its files agree about the project."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

import reknit
from tests.docs.pages import ROOT

tomllib: Any = pytest.importorskip("tomllib")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FILES = [
    "src/reknit/__init__.py",
    "tests/test_api.py",
    "docs/index.md",
    "README.md",
    "pyproject.toml",
    "LICENSE",
]


def program(path: str) -> Any:
    """Return a file of Python that is in no package, as a module."""
    spec = spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


contents = program("scripts/release.d/contents.py")


def wheel(place: Path, **more: str) -> Path:
    """Return a wheel with the package of `FILES`, and more files, whose names have `__` for a slash."""
    archive = place / "reknit-1-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("reknit/__init__.py", "")
        for name in (*contents.METADATA, "licenses/LICENSE"):
            opened.writestr(f"reknit-1.dist-info/{name}", "")
        for name, text in more.items():
            opened.writestr(name.replace("__", "/") + ".py", text)
    return archive


def wrong(archive: Path) -> list[str]:
    """Return the problems of a wheel."""
    expected = contents.expected_in_wheel(FILES, ["LICENSE"])
    return [*contents.problems(contents.content(archive), expected, ["/home/ada/"])]


def test_tests_and_paths_of_a_machine_in_a_wheel_are_found(tmp_path: Path) -> None:
    assert wrong(wheel(tmp_path)) == []
    found = wrong(wheel(tmp_path, tests__test_api="", reknit__made="at = '/home/ada/clone'"))
    assert found == [
        "has reknit/made.py, which does not belong there",
        "has tests/test_api.py, which does not belong there",
        "names /home/ada/ in reknit/made.py",
    ]


def test_a_file_that_the_source_archive_lacks_is_found(tmp_path: Path) -> None:
    archive = tmp_path / "reknit-1.tar.gz"
    with tarfile.open(archive, "w:gz") as opened:
        for name in (*FILES[1:], "PKG-INFO", ".gitignore"):
            opened.addfile(tarfile.TarInfo(f"reknit-1/{name}"), io.BytesIO())
    found = contents.problems(contents.content(archive), contents.expected_in_sources(FILES), [])
    assert list(found) == ["lacks src/reknit/__init__.py"]


def test_metadata_without_a_field_or_a_description_are_found() -> None:
    fields = "".join(f"{name}: x\n" for name in contents.NEEDED[1:])
    assert list(contents.metadata_problems(fields.encode())) == [
        "has no Name in its metadata",
        "has no description",
    ]


def test_the_citation_has_the_version_and_the_license_of_the_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (reknit.__version__, PROJECT["license"])
    assert citation["authors"] == PROJECT["authors"]
    assert citation["keywords"] == PROJECT["keywords"]


def test_a_package_that_its_workflow_builds_names_the_addresses_of_its_repository() -> None:
    pytest.importorskip("hatchling", reason="needs hatchling")
    urls = program("hatch_build.py").urls
    assert urls({}) == {}
    found = urls({"GITHUB_REPOSITORY": "Ada/reknit", "GITHUB_SERVER_URL": "https://forge.example"})
    assert found["Source"] == "https://forge.example/Ada/reknit"
    assert found["Documentation"] == "https://ada.github.io/reknit/"
    assert all(address.startswith("https://") for address in found.values())


def test_every_classifier_exists() -> None:
    known = pytest.importorskip("trove_classifiers", reason="needs trove-classifiers")
    assert set(PROJECT["classifiers"]) - known.classifiers == set()


def test_the_classifiers_name_the_pythons_that_are_tested() -> None:
    named = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", line)}
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    quick = workflow["jobs"]["quick"]["strategy"]["matrix"]["python"]
    (whole,) = [step["with"] for step in workflow["jobs"]["all"]["steps"] if "with" in step]
    assert named == {*quick, whole["python-version"]}
    assert f">={min(named, key=lambda text: int(text[2:]))}" == PROJECT["requires-python"]


def test_a_wrong_call_of_the_release_script_is_answered_with_the_right_one() -> None:
    for arguments in ([], ["1.0"], ["--check", "--torch"], ["--check", "--fast", "1"]):
        command = [str(ROOT / "scripts/release"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (2, ""), arguments
        assert done.stderr.startswith("usage: scripts/release VERSION | --check"), arguments


def test_a_release_is_refused_while_its_changelog_lacks_fragments(tmp_path: Path) -> None:
    for name, text in {
        "scripts/release": (ROOT / "scripts/release").read_text(),
        "src/reknit/__init__.py": '__version__ = "9.9.9"\n',
        "CITATION.cff": "version: 9.9.9\n",
        "CHANGELOG.md": "## 9.9.9 (2026-01-31)\n\nIt is new.\n",
        "changelog.d/store.added.md": "A store is new.\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git = ["git", "-c", "user.name=Ada", "-c", "user.email=ada@forge.example", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Release 9.9.9"]):
        subprocess.run([*git, *command], check=True, timeout=60)
    release = ["bash", str(tmp_path / "scripts/release"), "9.9.9"]
    done = subprocess.run(release, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "changelog.d has fragments" in done.stderr
    assert "towncrier build --yes --version 9.9.9" in done.stderr
