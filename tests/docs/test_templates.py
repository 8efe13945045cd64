"""The templates of issues and pull requests are whole, and name files that exist."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.docs.pages import ROOT

FOLDER = ROOT / ".github"
FORMS = sorted(path for path in (FOLDER / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
FILES = re.compile(r"`((?:docs|scripts|changelog\.d|[A-Z]+\.md)[\w./-]*)`")


def test_there_is_a_form_for_each_kind_of_issue_whose_questions_have_names_of_their_own() -> None:
    for path in FORMS:
        form: dict[str, Any] = yaml.safe_load(path.read_text())
        assert form["name"], path
        assert form["description"], path
        questions = [part for part in form["body"] if part["type"] != "markdown"]
        assert all(part["attributes"]["label"] for part in questions), path
        names = [part["id"] for part in questions]
        assert len({*names}) == len(names) > 0, path
        assert any(part.get("validations", {}).get("required") for part in questions), path
    assert [path.stem for path in FORMS] == ["bug", "feature", "question"]
    assert yaml.safe_load((FOLDER / "ISSUE_TEMPLATE/config.yml").read_text()) == {
        "blank_issues_enabled": False
    }


def test_the_files_that_a_template_names_exist() -> None:
    paths = [*FORMS, FOLDER / "PULL_REQUEST_TEMPLATE.md"]
    named = [(path.name, name) for path in paths for name in FILES.findall(path.read_text())]
    assert [(path, name) for path, name in named if not (ROOT / name).exists()] == []
