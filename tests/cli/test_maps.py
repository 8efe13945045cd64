"""The picture of a checkpoint, and the reads of a load into another layout."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from reknit.cli.maps import boxes, layout_reads, map_data, planned_ranks, target_layout
from reknit.errors import UsageError
from reknit.integrations.formats.export import tensors_of
from reknit.types.box import Box
from tests.integrations.formats.checkpoints import columns, save_in_boxes
from tests.page_checks import bad_contrasts, sticking_out

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Command

MIB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of a matrix of 16 MiB that is cut by columns, and a vector."""
    arrays: dict[str, Any] = {"w": np.zeros((2048, 2048), np.float32), "norm": np.ones(2048, np.float32)}
    save_in_boxes(tmp_path / "c", arrays, {"w": columns((2048, 2048), 4)})
    return tmp_path / "c"


def test_a_layout_is_a_number_or_axes_and_another_text_is_refused_with_an_example() -> None:
    for text, words, num_ranks in [
        ("4", "fsdp 4 (cuts dimension 0)", 4),
        ("tp=2,dp=3", "tp 2 (cuts dimension 1), dp 3 (cuts dimension 0)", 6),
        ("tp=2:0,replicate=2", "tp 2 (cuts dimension 0), replicate 2 (copies)", 4),
        ("a=2:replicate", "a 2 (copies)", 2),
    ]:
        layout = target_layout(text)
        assert (str(layout), layout.num_ranks) == (words, num_ranks)
    for text in ("", "0", "tp", "tp=0", "tp=2;dp=2", "pp=2", "tp=2:x", "1000000000", "²"):
        with pytest.raises(UsageError) as raised:
            target_layout(text)
        assert raised.value.remedy, text


def test_the_parts_of_all_ranks_cover_a_tensor() -> None:
    shapes: list[tuple[int, ...]] = [(8, 6), (5, 7), (1,), (4, 4, 4), ()]
    layouts = ("1", "3", "7", "tp=2,dp=2", "tp=3,dp=2", "dp=2,tp=2:0", "dp=9")
    for text, shape in product(layouts, shapes):
        layout, seen = target_layout(text), np.zeros(shape, np.int64)
        for rank in range(layout.num_ranks):
            if (box := layout.box(shape, rank)) is not None:
                assert box.fits(shape), text
                seen[box.slices()] += 1
        assert (seen >= 1).all(), (text, shape)
        assert len(np.unique(seen)) == 1, f"{text}, {shape}: each element is wanted equally often"


def test_the_place_of_a_rank_is_counted_with_the_last_axis_fastest() -> None:
    layout = target_layout("dp=2,tp=2")
    assert [layout.coordinate(rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert layout.name(3) == "rank 3 (dp 1, tp 1)"
    assert layout.box((8, 6), 3) == Box((4, 3), (4, 3))
    assert layout.box((8,), 3) == Box((4,), (4,))


def test_reads_of_all_ranks_have_the_wanted_bytes_and_whole_blocks(path: Path) -> None:
    with tensors_of(path) as checkpoint:
        reads = layout_reads(checkpoint, target_layout("tp=2"))
        assert [each.wanted_nbytes for each in reads] == [8 * MIB + 8192, 8 * MIB + 8192]
        assert all(each.read_nbytes >= each.wanted_nbytes for each in reads)
        assert [int(each.by_file.sum()) for each in reads] == [each.read_nbytes for each in reads]
        (alone,) = layout_reads(checkpoint, target_layout("1"))
        assert alone.wanted_nbytes == 16 * MIB + 8192
        assert sum(box.numel for _, box in boxes(checkpoint.index, target_layout("1"), 0)) == 2048 * 2049


def test_of_very_many_ranks_some_are_planned_with_the_first_and_the_last() -> None:
    assert planned_ranks(target_layout("3"), 100) == [0, 1, 2]
    many = planned_ranks(target_layout("9000"), 100)
    assert (len(many), many[0], many[-1]) == (64, 0, 8999)
    assert len(planned_ranks(target_layout("9000"), 1_000_000)) == 6


def test_a_table_and_json_show_the_reads(command: Command, path: Path) -> None:
    ran = command("show", path, "--layout", "tp=2,dp=2")
    assert ran.code == 0
    first, heads, *rows = ran.out.splitlines()
    assert first == "4 ranks: tp 2 (cuts dimension 1), dp 2 (cuts dimension 0)"
    assert heads.split() == ["RANK", "WANTS", "READS", "REQUESTS", "FILES"]
    assert rows[0].startswith("rank 0 (tp 0, dp 0)  4.0 MiB")
    facts = command("show", path, "--layout", "2", "--json").json
    assert [each["rank"] for each in facts] == [0, 1]
    assert all((path / file).exists() for each in facts for file in each["files"])


def test_a_page_has_the_cuts_of_a_tensor_and_the_writers(
    command: Command, path: Path, tmp_path: Path
) -> None:
    ran = command("show", path, "--html", tmp_path / "map.html", "--layout", "2")
    assert (ran.code, ran.out) == (0, f"wrote {tmp_path}/map.html: 2 tensors\n")
    (block,) = re.findall(r'id="data">(.*?)</script>', (tmp_path / "map.html").read_text())
    data = json.loads(block)
    assert [each["name"] for each in data["tensors"]] == ["model/w", "model/norm"]
    chunks = data["tensors"][0]["chunks"]
    assert [chunk[:5] for chunk in chunks] == [[0, 2048, 512 * k, 512, 0] for k in range(4)]
    assert [each[4] for each in data["tensors"][0]["wanted"]] == ["rank 0", "rank 1"]
    assert sum(map(sum, data["writers"]["nbytes"])) >= 16 * MIB
    (file,) = data["files"]
    assert sum(nbytes for _, _, nbytes in file["parts"]) == 16 * MIB + 8192


def test_a_checkpoint_without_tensors_has_a_page_and_a_list_of_tensors_has_none(
    command: Command, path: Path, tmp_path: Path
) -> None:
    save_in_boxes(tmp_path / "none", {}, {})
    assert command("show", tmp_path / "none", "--html", tmp_path / "map.html").code == 0
    ran = command("show", path, "--tensors", "*", "--html", tmp_path / "map.html")
    assert (ran.code, ran.out) == (2, "")
    assert "leave --html and --layout out" in ran.err


def test_a_checkpoint_of_very_many_chunks_has_a_small_picture(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"w": np.zeros((20_000, 1), np.int8), "v": np.zeros((20, 20), np.int8)}
    rows = [Box((k, 0), (1, 1)) for k in range(20_000)]
    save_in_boxes(tmp_path / "c", arrays, {"w": rows})
    with tensors_of(tmp_path / "c") as checkpoint:
        data = map_data(checkpoint, target_layout("8"))
    assert len(json.dumps(data)) < MIB
    large, small = data["tensors"]
    assert large["num_chunks"] == 20_000
    assert sum(chunk[8] for chunk in large["chunks"]) == 20_000
    assert len(large["chunks"]) == 2_000
    assert len(small["wanted"]) == 7, "20 rows on 8 ranks are 3 for each, and none for the last"


@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_a_browser_draws_a_map_that_keys_can_read(
    command: Command, path: Path, tmp_path: Path, browser: Any, width: int, scheme: str
) -> None:
    assert command("show", path, "--html", tmp_path / "map.html", "--layout", "dp=2").code == 0
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
    tab.goto((tmp_path / "map.html").as_uri())
    tab.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    assert sticking_out(tab) == []
    assert bad_contrasts(tab) == []
    tab.locator("#boxes").focus()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowRight")
    said = tab.locator("#tip").text_content()
    assert said.startswith("chunk [0:2048, 512:1024]: written by rank 0, 4.0 MiB in model/")
    assert said.endswith("wanted by rank 0; rank 1")
    tab.locator("#matrix").focus()
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#from").text_content().startswith("rank 0 reads ")
    assert problems == []
    tab.close()
