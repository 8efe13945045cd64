"""The pages are right about the repository: files exist, trees are complete, messages are real."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TYPE_CHECKING

from tests.docs.pages import ROOT, blocks

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

SOURCES = ROOT / "src" / "reknit"
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def texts() -> list[str]:
    """Return every text in the sources, with `\0` for each part that varies."""
    found = []
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                found.append("".join(str(part) for part in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def test_every_message_in_troubleshooting_is_one_of_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    headings = re.findall(r"^### (?:Warning: )?`(.+)`$", page, re.MULTILINE)
    known = texts()
    assert len(headings) > 15
    unknown = []
    for heading in headings:
        parts = heading.split("…")
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        if not any(pattern.search(text) for text in known if max(parts, key=len) in text):
            unknown.append(heading)
    assert unknown == []


def listed(tree: str) -> set[str]:
    """Return the paths of the folders in a drawn tree, which end in a slash."""
    folders: list[tuple[int, str]] = []
    paths = set()
    for line in tree.splitlines():
        bare = line.lstrip("│├└─ ")
        if not bare:
            continue
        depth, name = len(line) - len(bare), bare.split()[0]
        folders = [(d, f) for d, f in folders if d < depth]
        if name.endswith("/"):
            paths.add("".join(f for _, f in folders) + name)
            folders.append((depth, name))
    return paths


def test_the_tree_in_architecture_names_every_folder() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    tree = next(block.text for block in blocks(page) if block.text.startswith("src/reknit/"))
    folders = {path.parent.relative_to(ROOT).as_posix() + "/" for path in SOURCES.rglob("__init__.py")}
    assert listed(tree) == folders


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def swallowed(text: str) -> list[str]:
    """Return the lines that Markdown shows as a list item, or as text, though they are text, or a table."""
    found, before, in_code = [], "", False
    for line in text.splitlines():
        in_code ^= line.lstrip().startswith("```")
        item = re.match(r"(\d+[.)]|[-+*]) ", line) and not re.match(
            r"\s*(\d+[.)]|[-+*]) |\s{2,}|#|\||:::|```", before
        )
        table = line.startswith("|") and not before.startswith("|")
        if not in_code and before.strip() and (item or table):
            found.append(line)
        before = line
    return found


def test_text_that_wraps_into_a_list_is_noticed() -> None:
    assert swallowed("a byte, 0 or\n1. The next\n| a | b |\n") == ["1. The next", "| a | b |"]
    assert swallowed("text\n\n1. one\n2. two\n\n| a |\n|---|\n```\nx\n- y\n```\n") == []


def test_no_text_is_shown_as_a_list_and_no_table_as_text() -> None:
    assert {page: wrong for page in MARKDOWN if (wrong := swallowed(page.read_text()))} == {}


def test_every_file_that_a_page_names_exists() -> None:
    """`test_links.py` has the files that links name."""
    named = re.compile(r"`((?:src|tests|docs|scripts|benchmarks|examples)/[\w./-]+)`")
    found = [(page, name) for page in MARKDOWN for name in named.findall(page.read_text())]
    assert [(page, name) for page, name in found if not (ROOT / name).exists()] == []


def test_workflows_and_hooks_run_scripts_of_the_repository_only() -> None:
    files = [ROOT / ".pre-commit-config.yaml", *(ROOT / ".github/workflows").iterdir()]
    calls = [call for file in files for call in re.findall(r"\b(?:run|entry): (\S+)", file.read_text())]
    assert len(files) == 4
    assert [call for call in calls if call != "gh" and not (ROOT / call).is_file()] == []


def test_no_extra_of_a_store_is_empty_for_some_pythons() -> None:
    extras = re.findall(
        r"^(s3|gcs|azure|hdfs) = (\[.*)$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert len(extras) == 4
    assert [name for name, needs in extras if ";" in needs] == [], "pip would install nothing, and not say so"


def test_every_fault_of_the_matrix_has_its_number_and_tests_that_exist() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    rows = re.findall(r"^\| (\d+) \|(.*)\|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert lost_tests(row for _, row in rows) == []


def test_every_incident_has_tests_that_exist() -> None:
    page = (ROOT / "docs/reliability.md").read_text()
    _, section = page.split("## Incidents of other systems\n")
    rows = re.findall(r"^\| (?!incident)(.*) \|$", section.split("\n## ")[0], re.MULTILINE)
    assert len(rows) == 22
    assert lost_tests(rows) == []


def lost_tests(rows: Iterable[str]) -> list[str]:
    """Return the tests in the last of the three cells of each row that do not exist."""
    lost = []
    for row in rows:
        *others, last = row.split(" | ")
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", last)
        assert len(others) == 2, row
        assert tests, f"no test: {row}"
        lost += [f"{file}::{name}" for file, name in tests if name not in _functions(ROOT / "tests" / file)]
    return lost


@cache
def _functions(file: Path) -> frozenset[str]:
    """Return the names of the functions in a file, none if the file is missing."""
    if not file.exists():
        return frozenset()
    return frozenset(
        node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)
    )
