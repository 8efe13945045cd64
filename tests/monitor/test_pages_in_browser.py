"""Pages in a browser: nothing sticks out, every text can be read, keys are enough, nothing is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from reknit.events.to_file import JsonLines
from reknit.monitor.operations import read_operations
from reknit.monitor.page import report_page
from tests.monitor.records import SLOW, recorded, sixteen_ranks
from tests.monitor.records import of_rank as record
from tests.monitor.records import operation as storage_record
from tests.page_checks import bad_contrasts, sticking_out

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_MS = 60_000


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a report of two saves, the last of which failed on one rank, with storage and a run."""
    folder, more = tmp_path_factory.mktemp("report"), tmp_path_factory.mktemp("more")
    sink = JsonLines(str(more / "more.jsonl"))
    sink.take(
        [record("write", rank, -60, 1, step=6, path="run/step_6", nbytes=1 << 30) for rank in range(16)]
    )
    sink.take([storage_record("write", seconds=0.01 * n, rank=n) for n in range(9)])
    sink.take([record("remove", 0, 9, 0, action="remove", path="run/step_1")])
    sixteen_ranks(folder)
    found = read_operations([str(folder), str(more)])
    shown = folder / "report.html"
    shown.write_text(report_page(found.operations, run=found.run))
    return shown.as_uri()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A new tab; at its end, no script has failed and the policy has refused nothing."""
    opened = browser.new_page()
    opened.set_default_timeout(LIMIT_MS)
    problems: list[str] = []
    opened.on("pageerror", lambda error: problems.append(str(error)))
    opened.on(
        "console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None
    )
    yield opened
    opened.close()
    assert problems == []


def test_the_checks_notice_a_wide_element_and_a_pale_text(tab: Any) -> None:
    tab.set_viewport_size({"width": 390, "height": 900})
    tab.set_content("<p id=wide>wide</p><p id=pale>pale</p><p id=fine>fine</p>")
    tab.evaluate("document.getElementById('wide').style.width = '500px'")
    tab.evaluate("document.getElementById('pale').style.color = '#999'")
    assert [found.split(":")[0] for found in sticking_out(tab)] == ["page", "P wide"]
    assert [found.split(":")[0] for found in bad_contrasts(tab)] == ["P pale"]


def test_nothing_sticks_out_and_every_text_is_readable(tab: Any, report: str) -> None:
    for width, scheme in ((390, "light"), (390, "dark"), (1280, "light"), (3840, "dark")):
        tab.set_viewport_size({"width": width, "height": 900})
        tab.emulate_media(color_scheme=scheme)
        tab.goto(report)
        tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        assert sticking_out(tab) == [], (width, scheme)
        assert bad_contrasts(tab) == [], (width, scheme)


def test_the_summary_comes_first_and_the_tables_last(tab: Any, report: str) -> None:
    tab.goto(report)
    assert tab.locator("#headline").text_content() == "save run/step_7 (step 7): failed on 1 rank"
    assert "rank 13 (dp 3, tp 1) on host1 finished its work last" in tab.locator("#words").text_content()
    assert tab.locator("h2").all_text_contents() == [
        "Timeline",
        "Heat map of the ranks",
        "Throughput over time",
        "Steps of the run",
        "Storage operations, all ranks together",
        "Tables",
    ]
    row = tab.locator("#phases tr", has_text="write (agent)").locator("td").all_text_contents()
    assert row == ["write (agent)", "16", "1.000", "1.000", "3.000", "3.000", "16.0 GiB"]
    assert "bright is 3 s" in tab.locator("#scale").get_attribute("aria-label")
    assert tab.locator("#told td").all_text_contents()[1:] == ["remove", "7", "run/step_1", "ok"]


def test_another_save_is_chosen_from_the_list_and_from_the_strip_of_steps(tab: Any, report: str) -> None:
    tab.goto(report)
    tab.get_by_label("Save or load").select_option("0")
    assert tab.locator("#headline").text_content() == "save run/step_6 (step 6): saved"
    strip = tab.locator("#steps .u-over")
    box = strip.bounding_box()
    strip.click(position={"x": box["width"] * 0.75, "y": box["height"] / 2})
    assert tab.locator("#headline").text_content().startswith("save run/step_7 (step 7)")


def test_keys_are_enough_to_read_the_timeline_and_the_heat_map(tab: Any, report: str) -> None:
    tab.goto(report)
    tab.locator("#rows").select_option("hosts")
    tab.locator("#time").focus()
    for key in ("ArrowDown", "ArrowLeft"):
        tab.keyboard.press(key)
    assert re.match(r"host1, 8 ranks, at 1\.\d+ s: write \(agent\) on 1", tab.locator("#at").text_content())
    tab.keyboard.press("Enter")
    assert tab.locator("#rows").evaluate("each => each.selectedOptions[0].text") == "ranks of host1"
    for key in ("+", "ArrowRight", "Home"):
        tab.keyboard.press(key)
    assert re.match(r"rank 8 \(dp 2, tp 0\) on host1, at", tab.locator("#at").text_content())
    tab.locator("#heat").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight"):
        tab.keyboard.press(key)
    assert (
        tab.locator("#tip").text_content().startswith(f"rank {SLOW} (dp 3, tp 1) on host1: 3 s. All phases: ")
    )


def test_a_print_is_on_white_and_has_all_tables(tab: Any, report: str) -> None:
    tab.emulate_media(color_scheme="dark")
    tab.goto(report)
    tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    paper = "getComputedStyle(document.body).backgroundColor"
    assert tab.evaluate(paper) == "rgb(255, 255, 255)"
    assert tab.locator("details:not([open])").count() == 0
    tab.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate(paper) != "rgb(255, 255, 255)"
    assert tab.locator("details:not([open])").count() > 0


def test_thousands_of_ranks_are_shown_by_host_and_one_by_one(tab: Any, tmp_path: Path) -> None:
    names = ("collect", "plan", "stage", "write")
    events = [
        record(name, rank, n, 0.5, nbytes=1 << 20 if name == "write" else 0)
        for rank in range(3_000)
        for n, name in enumerate(names)
    ]
    shown = tmp_path / "report.html"
    shown.write_text(report_page([recorded(*events)]))
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.goto(shown.as_uri())
    assert tab.locator("#rows").input_value() == "hosts"
    assert tab.evaluate("lines.length") <= 160
    assert tab.evaluate("cells.length") == 3_000
    tab.locator("#rows").select_option("last")
    assert tab.locator("#shown").text_content() == "1 to 40 of 3000"
    assert sticking_out(tab) == []
