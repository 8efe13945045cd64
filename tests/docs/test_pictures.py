"""Pictures suit light pages and dark ones, and diagrams are the drawings of `docs/diagrams/draw.py`."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from docs.diagrams import boxes
from docs.diagrams.draw import HERE, drawings
from tests.docs.links import links
from tests.docs.pages import ROOT, blocks

TEXT = "{http://www.w3.org/2000/svg}text"
COLUMN = 736  # the pages have a column of 46 em


def test_the_pictures_of_the_pages_are_those_that_the_code_draws() -> None:
    drawn = {path.name: content for path, content in drawings().items()}
    kept = {path.name: path.read_text() for path in HERE.glob("*.svg")}
    others = [name for name in kept.keys() | drawn.keys() if kept.get(name) != drawn.get(name)]
    assert others == [], "python -m docs.diagrams.draw draws them"


def test_a_picture_shows_each_text_of_its_source_inside_its_bounds() -> None:
    for source in HERE.glob("*.mmd"):
        said = re.findall(r"(?: as |: |loop )(.+)$", source.read_text(), re.MULTILINE)
        picture = ElementTree.fromstring(source.with_suffix(".svg").read_text())
        shown = "\n".join(str(each.text) for each in picture.iter(TEXT))
        assert len(said) > 10, source
        assert [line for line in said if not all(part in shown for part in line.split("<br/>"))] == [], source
        width, height = (float(picture.attrib[side]) for side in ("width", "height"))
        assert width < COLUMN, source
        places = [(float(each.attrib["x"]), float(each.attrib["y"])) for each in picture.iter(TEXT)]
        assert [(x, y) for x, y in places if not (0 < x < width and 0 < y < height)] == [], source


def test_every_picture_of_the_pages_has_a_variant_for_dark_pages() -> None:
    pages = [page for page in ROOT.glob("docs/**/*.md") if "![" in page.read_text()]
    pictures = [page.parent / link.target for page in pages for link in links(page.read_text())]
    pictures = [path for path in pictures if path.suffix in {".png", ".svg"}]
    assert len(pictures) > 5
    assert [path.name for path in pictures if not path.with_stem(f"{path.stem}-dark").exists()] == []


def test_every_diagram_is_on_a_page_as_a_picture() -> None:
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("architecture.md", "format.md"))
    sources = {path.stem for kind in ("mmd", "boxes") for path in HERE.glob(f"*.{kind}")}
    assert sources == set(re.findall(r"\]\(diagrams/([\w-]+)\.svg\)", pages))


def test_texts_of_a_map_fit_into_their_boxes_and_boxes_into_the_picture() -> None:
    for source in HERE.glob("*.boxes"):
        found = boxes.parse(source.read_text())
        assert found.width < COLUMN, source
        assert [box.text for box in found.boxes if box.room() < 0] == [], source
        assert all(
            b.x >= 0 and b.x + b.width <= found.width and b.y + b.height <= found.height for b in found.boxes
        ), source
        picture = ElementTree.fromstring(source.with_suffix(".svg").read_text())
        shown = {str(each.text) for each in picture.iter(TEXT)}
        texts = [*(box.text for box in found.boxes), *(arrow.text for arrow in found.arrows)]
        assert {line.strip() for text in texts for line in text if line.strip()} == shown, source


def test_the_layers_are_those_of_the_table_of_rows() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    table = re.findall(r"^\| (\d+) \| (.*?) \|", page, re.MULTILINE)
    rows: dict[str, list[str]] = {number: [] for number, _ in table}
    for number, cell in table:
        rows[number] += re.findall(r"`(\w+)`", cell)
    drawn = re.findall(r"^row \d+ \d+ (\d+): (.+)$", (HERE / "layers.boxes").read_text(), re.MULTILINE)
    assert {number: texts.split(" | ") for number, texts in drawn} == rows


def test_the_byte_map_has_the_numbers_of_the_example_byte_by_byte() -> None:
    page = (ROOT / "docs/format.md").read_text()
    header = re.search(r"^0008  (\{.*\})$", page, re.MULTILINE)
    assert header is not None
    *_, manifest = re.finditer(r"^(\{.*)(,\"digest\":\"\w{16}\"\})$", page, re.MULTILINE)
    found = {box.text[0]: box.text for box in boxes.parse((HERE / "format-map.boxes").read_text()).boxes}
    assert found[str(8 + len(header[1]))][1].startswith("spaces")
    assert found[f"{0x1000:,}"][1].startswith("the entries")
    assert found[str(len(manifest[1]))][1].startswith(',"digest"')
    assert found["manifest.json"][1] == f"{len(manifest[0])} bytes"
    assert found["index…parquet"][1] == "1,477 bytes"


def test_no_page_has_a_diagram_that_a_forge_or_the_site_would_show_as_its_source() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    found = [page.name for page in pages for block in blocks(page.read_text()) if "mermaid" in block.language]
    assert found == []
