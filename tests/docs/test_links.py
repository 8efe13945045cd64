"""Every link of every page has a text that a forge shows, and points to an existing place."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.docs.links import Link, anchors, links
from tests.docs.pages import ROOT

BUILT = {"_build", "build", "dist"}


def pages() -> list[str]:
    """Return every Markdown page of the repository."""
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [each for each in folders if not each.startswith(".") and each not in BUILT]
        found += [Path(folder, file).relative_to(ROOT).as_posix() for file in files if file.endswith(".md")]
    return sorted(found)


def test_every_link_has_a_text_and_points_to_a_file_and_a_heading_that_exist() -> None:
    wrong = []
    for page in pages():
        for link in links((ROOT / page).read_text()):
            if not link.text:
                wrong.append(f"{page}:{link.line}: [](…) has no text: {link.target}")
            if not exists(link.target, page):
                wrong.append(f"{page}:{link.line}: {link.target} does not exist")
    assert not wrong, "\n".join(wrong)


def exists(target: str, page: str) -> bool:
    """Return whether the target of a link exists; links out of the repository are taken to be right."""
    scheme, host, path, _, anchor = urlsplit(target)
    if scheme or host:
        return True
    file = (ROOT / page).parent / unquote(path) if path else ROOT / page
    if not anchor or file.suffix != ".md":
        return file.exists()
    return file.exists() and anchor in anchors_of(file)


@cache
def anchors_of(file: Path) -> set[str]:
    return anchors(file.read_text())


def test_links_are_found_with_their_lines_in_paragraphs_lists_and_tables() -> None:
    page = (
        "# A\n\n[one](a.md), [`two`](b.md#c)\n[](d.md)\n\n- ![four](e.png)\n\n| f |\n|---|\n| [ ](g.md) |\n"
    )
    assert links(page) == [
        Link(3, "one", "a.md"),
        Link(3, "two", "b.md#c"),
        Link(3, "", "d.md"),
        Link(6, "four", "e.png"),
        Link(10, "", "g.md"),
    ]
    assert links("```text\n[](a.md)\n```\n\n`[](b.md)`\n") == [], "code blocks have none"


def test_a_link_to_a_lost_file_or_heading_is_found() -> None:
    headings = "# `reknit ls`: A_b, c-d\n## Same\n## Same\n"
    assert anchors(headings) == {"reknit-ls-a_b-c-d", "same", "same-1"}
    there = ["glossary.md", "glossary.md#glossary", "#glossary", "https://example.org/nowhere"]
    targets = [*there, "glossary.md#nowhere", "nowhere.md"]
    assert [target for target in targets if exists(target, "docs/glossary.md")] == there
