"""The page of a report: its data are bounded, its policy lets nothing else run, its pictures are right."""

from __future__ import annotations

import base64
import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reknit.events.to_file import JsonLines
from reknit.monitor import page as report_page
from reknit.monitor.operations import read_operations
from reknit.monitor.page import content_policy, detail, page_file, with_data
from reknit.monitor.page import report_page as page
from reknit.monitor.summary import figures_of
from tests.monitor.records import SLOW, recorded, sixteen_ranks
from tests.monitor.records import of_rank as record

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

MIB = 1 << 20


def data_of(text: str) -> dict[str, Any]:
    """Return the data in a page."""
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text)
    found: dict[str, Any] = json.loads(block)
    return found


def column(text: str, dtype: str) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text), dtype)


def bars_of(picture: dict[str, Any]) -> set[tuple[int, str, float, float]]:
    """Return the bars of a picture: rank, lane, start and seconds."""
    bars, unit = picture["bars"], picture["seconds"] / 65_535
    columns = [column(bars[name], dtype) for name, dtype in
               (("rank", "<u2"), ("lane", "u1"), ("start", "<u2"), ("length", "<u2"))]  # fmt: skip
    return {
        (int(rank), picture["lanes"][lane & 63]["name"], round(start * unit, 2), round(length * unit, 2))
        for rank, lane, start, length in zip(*columns, strict=True)
    }


def test_a_page_of_very_many_names_steps_and_axes_stays_small(tmp_path: Path) -> None:
    own: dict[str, Any] = {"action": "training", "path": ""}
    lines = [record(f"name {number}", 0, number, 1, step=7) for number in range(66_000)]
    lines += [record("eat", 0, number, 1, step=number, **own) for number in range(2_500)]
    lines += [record("eat", 1, 0, 1, step=1, coordinate={f"axis {k}": k for k in range(9_000)}, **own)]
    JsonLines(str(tmp_path / "e.jsonl")).take(lines)
    operations, *_ = read_operations([str(tmp_path)])
    assert len(operations) == 2_501
    assert len(page(operations)) < 2 * MIB
    last = [each for each in operations if each.action == "save"]
    assert len(page(last)) < 2 * MIB


def test_a_page_of_thousands_of_ranks_in_many_phases_stays_small() -> None:
    events = [record(name, rank, n, 0.5) for n, name in enumerate("abcdefgh") for rank in range(4_000)]
    older = [recorded(*(record("a", rank, 0, 1) for rank in range(1_000)))] * 20
    text = page([*older, recorded(*events)])
    assert len(text) < 2 * MIB
    operations = data_of(text)["operations"]
    last = operations[-1]["detail"]["bars"]
    assert len(column(last["rank"], "<u2")) == 32_000
    assert last["left_out"] == 0
    assert "detail" in operations[-2]


def test_pictures_are_for_the_last_operations_where_the_page_has_no_room_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report_page, "_DETAIL_LETTERS", 100_000)
    events = [record("write", rank, n % 7, 0.1) for n in range(7) for rank in range(300)]
    text = page([recorded(*events)] * 25)
    has = ["detail" in each for each in data_of(text)["operations"]]
    assert has[-1]
    assert not has[0]
    assert has == sorted(has)
    monkeypatch.setattr(report_page, "_DETAIL_LETTERS", 0)
    only_last = data_of(page([recorded(*events)] * 2))["operations"]
    assert ["detail" in each for each in only_last] == [False, True]


def test_bars_that_touch_are_one_and_bars_apart_are_two() -> None:
    events = [
        record("write", 0, 0.0, 1.0),
        record("write", 0, 1.0, 1.0),
        record("write", 0, 5.0, 1.0),
        record("write", 1, 2.0, 1.0),
        record("plan", 0, 0.5, 0.5),
    ]
    picture = detail(figures_of(recorded(*events)))
    assert bars_of(picture) == {
        (0, "write", 0.0, 2.0),
        (0, "write", 5.0, 1.0),
        (1, "write", 2.0, 1.0),
        (0, "plan", 0.5, 0.5),
    }


def test_very_many_bars_of_a_rank_are_joined_and_none_is_lost() -> None:
    events = [record("write", rank, 0.01 * n, 0.005) for rank in range(130) for n in range(930)]
    bars = detail(figures_of(recorded(*events)))["bars"]
    assert len(column(bars["rank"], "<u2")) <= 120_000
    assert bars["left_out"] == 0
    assert set(column(bars["rank"], "<u2").tolist()) == set(range(130))


def test_a_picture_of_nothing_and_of_one_event_is_drawn() -> None:
    one = detail(figures_of(recorded(record("write", 0, 0.0, 0.0))))
    assert [lane["name"] for lane in one["lanes"]] == ["write"]
    assert len(one["path"]) <= 1
    assert '"operations":[]' in page([])


def test_cells_have_the_seconds_of_each_rank_and_none_for_a_missing_phase(tmp_path: Path) -> None:
    picture = detail(figures_of(sixteen_ranks(tmp_path)))
    cells = {picture["lanes"][each["lane"]]["name"]: each for each in picture["cells"]}
    written = column(cells["write (agent)"]["of"], "<u2") / 65_534 * cells["write (agent)"]["most"]
    assert written[SLOW] == pytest.approx(3.0, abs=1e-3)
    assert written[0] == pytest.approx(1.0, abs=1e-3)
    assert np.sum(column(cells["commit"]["of"], "<u2") != 65_535) == 1
    assert picture["axes"] == ["dp", "tp"]
    assert [column(axis, "<i4")[SLOW] for axis in picture["places"]] == [3, 1]


def test_a_page_has_its_summary_and_asks_nobody(tmp_path: Path) -> None:
    text = page([sixteen_ranks(tmp_path)], limit_bytes_per_s=8 * 2**30)
    assert re.search(r"(src|href)=", text) is None
    assert set(re.findall(r"https?://[^\s\"')]*", text)) <= {"https://github.com/leeoniya/uPlot"}
    (operation,) = data_of(text)["operations"]
    facts = dict(operation["summary"]["facts"])
    assert facts["written"] == "16.0 GiB"
    assert facts["share of the limit"] == "65%"
    assert "rank 13 (dp 3, tp 1) on host1 finished its work last" in operation["summary"]["last"]
    assert len(operation["remarks"]) == 2


def test_only_the_scripts_of_the_package_may_run() -> None:
    text = page([])
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(scripts) == 5
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    assert "unsafe" not in policy
    assert policy.count("sha256-") == len(scripts) + 2
    assert "frame-ancestors" not in policy, "browsers refuse it in a page"
    assert "frame-ancestors 'none'" in content_policy(("report.js",))
    assert re.search(r"\sstyle=|\son\w+=\"", text.split("<script>")[0]) is None, "the policy refuses these"


def test_a_name_cannot_break_out_of_a_page(tmp_path: Path) -> None:
    bad = "</script><script>alert(1)</script>"
    JsonLines(str(tmp_path / "e.jsonl")).take([record("write", 0, 0, 1, path=bad, host=bad)])
    JsonLines(str(tmp_path / "e.jsonl")).take([record("remove", 0, 9, 0, action="remove", path=bad)])
    operations, *_, run = read_operations([str(tmp_path)])
    text = page(operations, run=run)
    assert text.count("</script>") == page([]).count("</script>")
    assert bad in data_of(text)["operations"][0]["name"]
    assert bad in data_of(text)["run"][0][3]
    assert "<!--DATA-->" not in with_data(page_file("map.html", ("map.js",)), {"a": "<!--STYLES-->"})


SEEN: dict[str, Any] = {
    "everybody": np.eye(3),
    "without red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "without green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "without blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
"""The human perception of linear red, green and blue (Machado, Oliveira and Fernandes, 2009)."""


def lab(linear: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return colours as lightness and two axes, in which distances are the visible ones."""
    xyz = linear @ np.array([[0.4339, 0.2127, 0.0178], [0.3762, 0.7152, 0.1095], [0.1899, 0.0722, 0.8730]])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=1)


def test_ten_phases_have_colours_that_people_tell_apart_and_see_on_white_and_on_black() -> None:
    (line,) = re.findall(r"const LANES = \[(.*)\]", page([]))
    colours = re.findall(r"#(\w{6})", line)
    assert len(colours) == 10
    shares = np.array([list(bytes.fromhex(colour)) for colour in colours]) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    for who, matrix in SEEN.items():
        seen = lab(np.clip(linear @ np.transpose(matrix), 0, 1))
        apart = np.linalg.norm(seen[:, None] - seen, axis=2)
        assert apart[~np.eye(10, dtype=bool)].min() > 15, who
    brightness = linear @ [0.2126, 0.7152, 0.0722]
    assert (1.05 / (brightness + 0.05)).min() > 1.5, "on white"
    assert ((brightness + 0.05) / 0.056).min() > 1.5, "on the black of a browser"
