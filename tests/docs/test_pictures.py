"""Pictures suit light pages and dark ones, and diagrams are the drawings of `docs/diagrams/draw.py`."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from docs.diagrams.draw import HERE, Frame, Message, columns, drawings, parse
from tests.docs.links import links
from tests.docs.pages import ROOT, blocks

TEXT = "{http://www.w3.org/2000/svg}text"
HEAD = "sequenceDiagram\nparticipant A as one\nparticipant B as two<br/>lines\n"


def test_the_pictures_of_the_pages_are_those_that_the_code_draws() -> None:
    drawn = {path.name: content for path, content in drawings().items()}
    kept = {path.name: path.read_text() for path in HERE.glob("*.svg")}
    assert kept.keys() == drawn.keys(), "python docs/diagrams/draw.py draws them"
    assert [name for name in drawn if kept[name] != drawn[name]] == [], (
        "python docs/diagrams/draw.py draws them"
    )


@pytest.mark.parametrize("source", sorted(path.name for path in HERE.glob("*.mmd")))
def test_a_picture_shows_each_text_of_its_source_inside_its_bounds(source: str) -> None:
    text = (HERE / source).read_text()
    said = re.findall(r"(?: as |: |loop )(.+)$", text, re.MULTILINE)
    picture = ElementTree.fromstring((HERE / source).with_suffix(".svg").read_text())
    shown = [str(each.text) for each in picture.iter(TEXT)]
    assert len(said) > 10
    assert [line for line in said if not all(part in "\n".join(shown) for part in line.split("<br/>"))] == []
    width, height = (float(picture.attrib[side]) for side in ("width", "height"))
    assert width < 736, "the pages have a column of 46 em"
    for each in picture.iter(TEXT):
        assert 0 < float(each.attrib["x"]) < width
        assert 0 < float(each.attrib["y"]) < height


def test_every_picture_of_the_pages_has_a_variant_for_dark_pages() -> None:
    pages = [page for page in ROOT.glob("docs/**/*.md") if "![" in page.read_text()]
    pictures = [page.parent / link.target for page in pages for link in links(page.read_text())]
    pictures = [path for path in pictures if path.suffix in {".png", ".svg"}]
    assert len(pictures) > 5
    assert [path.name for path in pictures if not path.with_stem(f"{path.stem}-dark").exists()] == []


def test_every_diagram_is_on_a_page_as_a_picture() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    assert {path.stem for path in HERE.glob("*.mmd")} == set(
        re.findall(r"\]\(diagrams/([\w-]+)\.svg\)", page)
    )


def test_no_page_has_a_diagram_that_a_forge_or_the_site_would_show_as_its_source() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    found = [page.name for page in pages for block in blocks(page.read_text()) if "mermaid" in block.language]
    assert found == []


def test_a_source_becomes_messages_in_frames() -> None:
    diagram = parse(HEAD + "A->>B: ask\nloop each file\nB->>B: read\nB-->>A: answer\nend\n")
    assert diagram.participants == (("one",), ("two", "lines"))
    ask, loop = diagram.steps
    assert ask == Message(0, 1, ("ask",))
    assert isinstance(loop, Frame)
    assert loop.label == "loop: each file"
    assert loop.steps == [Message(1, 1, ("read",)), Message(1, 0, ("answer",), answer=True)]


def test_columns_leave_room_for_the_longest_text_between_them() -> None:
    short, _ = columns(parse(HEAD + "A->>B: ask\n"))
    long, _ = columns(parse(HEAD + f"A->>B: {'x' * 60}\n"))
    assert long[1] - long[0] > 60 * 6 > short[1] - short[0]


@pytest.mark.parametrize("source", ["graph TD\n", HEAD + "A->>B ask\n", HEAD + "end\n"])
def test_a_source_in_another_language_names_the_line(source: str) -> None:
    with pytest.raises(ValueError, match=f"line {source.count(chr(10))}"):
        parse(source)
