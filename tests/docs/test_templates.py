"""The templates of issues and pull requests are whole, and name files that exist."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.docs.pages import ROOT

if TYPE_CHECKING:
    from pathlib import Path

FOLDER = ROOT / ".github"
FORMS = sorted(path for path in (FOLDER / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
FILES = re.compile(r"`((?:docs|scripts|changelog\.d|[A-Z]+\.md)[\w./-]*)`")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_questions_with_names_of_their_own(path: Path) -> None:
    form: dict[str, Any] = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    questions = [part for part in form["body"] if part["type"] != "markdown"]
    assert all(part["attributes"]["label"] for part in questions)
    names = [part["id"] for part in questions]
    assert len({*names}) == len(names) > 0
    assert any(part.get("validations", {}).get("required") for part in questions)


@pytest.mark.parametrize("path", [*FORMS, FOLDER / "PULL_REQUEST_TEMPLATE.md"], ids=lambda path: path.stem)
def test_the_files_that_a_template_names_exist(path: Path) -> None:
    assert [name for name in FILES.findall(path.read_text()) if not (ROOT / name).exists()] == []


def test_there_is_a_form_for_each_kind_of_issue() -> None:
    assert [path.stem for path in FORMS] == ["bug", "feature", "question"]
    assert yaml.safe_load((FOLDER / "ISSUE_TEMPLATE/config.yml").read_text()) == {
        "blank_issues_enabled": False
    }
