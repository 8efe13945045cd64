"""The site: pages fit into their window, pictures suit dark pages, and commands can be copied."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import pytest

pytest.importorskip("sphinx", reason="needs Sphinx")

from docs import serve
from docs.error_catalog import CATALOG
from tests.docs.pages import ROOT
from tests.page_checks import bad_contrasts
from tests.running.examples import is_night

if TYPE_CHECKING:
    from pathlib import Path

LIMIT_S = 240.0
WIDTHS = (1280, 390)
HEIGHT = 844

# Elements wider than the window, or than their own box where that should not scroll.
WIDE = """
() => {
    const root = document.documentElement;
    const found = root.scrollWidth > innerWidth ? [`the page: ${root.scrollWidth} px`] : [];
    if (innerWidth >= 1280)
        for (const box of document.querySelectorAll(".table-wrapper"))
            if (box.scrollWidth > box.clientWidth)
                found.push(`a table: ${box.scrollWidth} px in ${box.clientWidth}: ${box.textContent.trim()}`);
    return found;
}
"""
# One page of each kind, among them pages with pictures, tables, lists of parameters and long code.
KINDS = (
    "index",
    "search",
    "genindex",
    "tutorial",
    "howto/command-line",
    "reference/api",
    "reference/errors",
    "architecture",
    "comparison",
    "glossary",
    "decisions/0007-fencing",
    "format",
)
# The pictures that are shown, and the pictures that could not be read.
PICTURES = """
() => {
    const all = [...document.querySelectorAll("article img")].filter(each => each.offsetWidth > 0);
    return all.map(each => [each.src.split("/").pop(), each.naturalWidth > 0]);
}
"""


@pytest.fixture(scope="module")
def site() -> Path:
    """Build the pages that have changed since the last build, at night only: it takes ten seconds."""
    if not is_night():
        pytest.skip("at night: scripts/docs builds the pages of each change, as strictly")
    folder = ROOT / "docs/_build/html"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def pages(site: Path) -> list[Path]:
    """Return the built pages, without the files of an earlier build of pages that are gone."""
    found = [
        site / page.relative_to(ROOT / "docs").with_suffix(".html") for page in ROOT.glob("docs/**/*.md")
    ]
    assert len(found) > 60
    return [*sorted(found), site / "genindex.html", site / "search.html"]


def test_no_page_is_wider_than_a_desktop_or_a_telephone(site: Path, browser: Any) -> None:
    tab = browser.new_page(viewport={"width": WIDTHS[0], "height": HEIGHT})
    tab.set_default_timeout(1000 * LIMIT_S)
    found = []
    for page in pages(site):
        tab.goto(page.as_uri())
        for width in (tab.viewport_size["width"], *set(WIDTHS) - {tab.viewport_size["width"]}):
            tab.set_viewport_size({"width": width, "height": HEIGHT})
            name = page.relative_to(site).as_posix()
            found += [f"{name} at {width} px: {wide[:100]}" for wide in tab.evaluate(WIDE)]
    tab.close()
    assert not found, "\n".join(found)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_kind_of_page_fits_into_the_window_has_enough_contrast_and_pictures_that_suit_it(
    theme: str, site: Path, browser: Any
) -> None:
    tab = browser.new_page(color_scheme=theme)
    tab.set_default_timeout(1000 * LIMIT_S)
    found = []
    for name in KINDS:
        tab.goto((site / f"{name}.html").as_uri())
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": HEIGHT})
            found += [f"{name} at {width} px: {bad}" for bad in bad_contrasts(tab) + tab.evaluate(WIDE)]
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (theme == "light")
    assert found == []
    tab.add_style_tag(content="article p { color: rgb(120, 120, 120) }")
    tab.set_viewport_size({"width": WIDTHS[0], "height": HEIGHT})
    assert bad_contrasts(tab) != [], "the check sees the texts"
    tab.goto((site / "architecture.html").as_uri())
    suffix = "-dark" if theme == "dark" else ""
    names = ("processes", "layers", "save", "save-in-background", "load")
    assert tab.evaluate(PICTURES) == [[f"{name}{suffix}.svg", True] for name in names]
    tab.close()


def test_a_command_is_copied_without_its_prompt_and_its_output(site: Path, browser: Any) -> None:
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.set_default_timeout(1000 * LIMIT_S)
    tab.goto((site / "howto/command-line.html").as_uri())
    block = tab.locator(".highlight-console").first
    shown = block.locator("pre").text_content()
    block.hover()
    block.locator("button.copybtn").click()
    block.locator("button.copybtn.success").wait_for()
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert copied.splitlines() == [line[2:] for line in shown.splitlines() if line.startswith("$ ")]
    context.close()


def test_the_search_finds_pages_without_a_network(site: Path, browser: Any) -> None:
    context = browser.new_context(offline=True)
    tab = context.new_page()
    tab.set_default_timeout(1000 * LIMIT_S)
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(f"{(site / 'search.html').as_uri()}?q=generation+marker")
    tab.locator("#search-results li").first.wait_for()
    assert any("0007" in name for name in tab.locator("#search-results li a").all_text_contents())
    assert [url for url in asked if not url.startswith("file:")] == []
    context.close()


class Groups(HTMLParser):
    """The captions of the sidebar with the pages of each, without pages that are folded below another."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[str, list[str]] = {}
        self.in_caption = self.in_page = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.in_caption = given.get("class") == "caption-text"
        if tag == "li":
            self.in_page = "toctree-l1" in str(given.get("class"))
        if tag == "a" and self.pages and self.in_page and given.get("class") == "reference internal":
            self.pages[list(self.pages)[-1]].append(str(given["href"]))

    def handle_data(self, data: str) -> None:
        if self.in_caption:
            self.pages[data] = []
            self.in_caption = False


def test_the_pages_are_in_groups_and_the_front_page_does_not_list_them(site: Path) -> None:
    page = (site / "index.html").read_text()
    sidebar, _, article = page.partition("<article")
    groups = Groups()
    groups.feed(sidebar)
    captions = ["Start", "Train with", "Store on", "Run in production", "Look inside", "Reference"]
    captions += ["Design", "Contribute"]
    assert list(groups.pages) == captions
    assert {caption for caption, found in groups.pages.items() if not 3 <= len(found) <= 30} == set()
    assert article.partition("</article")[0].count('class="reference internal"') < 30


class Texts(HTMLParser):
    """The text of each section of a page, by the anchor of the section."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "section":
            self.open.append(str(dict(attrs).get("id")))

    def handle_endtag(self, tag: str) -> None:
        if tag == "section":
            self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data


def test_the_page_of_errors_shows_each_with_its_causes_and_remedies(site: Path) -> None:
    page = Texts()
    page.feed((site / "reference/errors.html").read_text())
    for code, explanation in CATALOG.items():
        section = " ".join(page.texts[code.lower()].split())
        for text in (*explanation.causes, *explanation.remedies):
            assert " ".join(text.replace("`", "").split()) in section, (code, text)


def test_no_page_offers_an_edit_that_leads_nowhere(site: Path) -> None:
    offers = re.compile("edit-this-page|view-this-page")
    assert [page.name for page in pages(site) if offers.search(page.read_text())] == []


def test_the_site_is_served_here_alone_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("a page")
    command = [sys.executable, str(ROOT / "docs/serve.py"), str(tmp_path), "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = re.match(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())
        assert address is not None
        with urlopen(address[0], timeout=LIMIT_S) as answer:
            assert answer.read() == b"a page"
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=LIMIT_S)
    assert errors == "\nscripts/docs: ended\n"
    assert server.returncode == 0


def test_a_port_that_is_taken_is_named_with_another_to_try(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert serve.main(str(tmp_path), str(port)) == 1
    message = capsys.readouterr().err
    assert f"cannot listen on port {port}: " in message
    assert "pass another: scripts/docs serve " in message


def test_a_wrong_call_is_answered_with_the_right_one() -> None:
    for arguments in (["show"], ["serve", "port"], ["serve", "1", "2"]):
        command = [str(ROOT / "scripts/docs"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert (done.returncode, done.stderr) == (2, "usage: scripts/docs [serve [PORT]]\n"), arguments
