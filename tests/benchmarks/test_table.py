"""The table of the benchmark: every group of rows runs, and the ratios are those of its figures."""

from __future__ import annotations

import argparse
import json
import os
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.aims import AIMS
from benchmarks.ranks import RanksFailedError
from benchmarks.reports import RESULTS, chosen
from benchmarks.rivals.background import DCP_QUICK_MODES
from benchmarks.table import (
    arrays,
    digests,
    first,
    formats,
    layout,
    loader,
    root,
    run,
    sharded,
    single,
    sinks,
    trainer,
)
from benchmarks.table.rounds import Row
from benchmarks.table.sizes import TINY
from benchmarks.table.summary import judged, markdown, summary
from benchmarks.timing import Bench
from benchmarks.turns import in_turn
from tests.ranks import run as on_ranks
from tests.running.examples import is_night

if TYPE_CHECKING:
    from pathlib import Path


class QuietBench(Bench):
    """A bench that leaves the disk alone."""

    def settle(self) -> None:
        """Leave dirty pages unflushed, as the tests do not measure times."""
        self.dist.barrier()


def _rows(folder: str, group: str) -> list[Row]:
    import warnings

    warnings.simplefilter("ignore")  # torch warns at every load
    bench = QuietBench(folder)
    if group == "first":
        return _first(bench)
    if group == "dtensors":
        return layout.rows(bench, TINY, DCP_QUICK_MODES[:1])
    if group == "trainer":
        return trainer.rows(bench, TINY, DCP_QUICK_MODES[:1])
    measured: list[Row] = {
        "sharded": sharded.rows,
        "single": single.rows,
        "small": layout.load_rows,
        "jax": arrays.rows,
        "formats": formats.rows,
        "loader": loader.rows,
        "digests": digests.rows,
        "sinks": sinks.rows,
    }[group](bench, TINY)
    return measured


def _first(bench: Bench) -> list[Row]:
    """Return the rows of first saves and loads, made one after another by the same processes."""
    os.makedirs(bench.folder, exist_ok=True)
    first.make(bench, TINY)
    loads: dict[str, Any] = {who: [first.load(bench, TINY, who)] for who in first.LOADERS}
    savers = ("reknit", "reknit, prepared", "reknit, lazy", DCP_QUICK_MODES[0].name, "memcpy")
    saves: dict[str, Any] = {who: [first.save(bench, TINY, who)] for who in savers}
    saves["torch_checkpointing"] = ["not installed"]
    return [first.load_row(loads, bench.world), *first.save_rows(saves, TINY)]


RANKS = {"single": 1, "small": 2, "sharded": 2, "first": 2, "trainer": 2, "dtensors": 2, "jax": 1}
BY_DAY = ("single", "small")


def test_each_group_with_an_aim_has_its_rows_compared_below() -> None:
    groups = {aim.bench.removeprefix("table ") for aim in AIMS if aim.bench.startswith("table ")}
    assert groups <= set(RANKS) & set(run.GROUPS)


@pytest.mark.parametrize(
    ("group", "ranks"), [each for each in RANKS.items() if is_night() or each[0] in BY_DAY]
)
def test_every_row_compares_reknit_with_who_is_there(group: str, ranks: int, tmp_path: Path) -> None:
    if group == "jax" and find_spec("orbax") is None:
        pytest.skip("Orbax is not installed")
    rows = on_ranks(ranks, _rows, str(tmp_path / group), group, timeout=240)[0]
    assert rows
    judgements = [each for row in rows for each in judged(summary(row, group))]
    assert {each.aim for each in judgements} == {aim for aim in AIMS if aim.bench == f"table {group}"}
    assert all(each.value is not None for each in judgements)
    for row in rows:
        reported = summary(row, group)
        assert reported["ours"]["name"].startswith("reknit"), row
        assert (reported["ours_over_rival"] is None) == row.name.startswith("`prepare`"), row
        without = row.name.startswith(("later saves, end to end", "JAX", "FSDP2"))
        assert (reported["ours_over_limit"] is None) == without, row
        assert all(who.startswith("torch_checkpointing") or "O_DIRECT" in who for who in row.missing), row


@pytest.mark.parametrize("group", ["formats", *(["loader"] if is_night() else []), "digests"])
def test_every_row_of_one_rank_has_a_figure_of_reknit(group: str, tmp_path: Path) -> None:
    for row in on_ranks(1, _rows, str(tmp_path / group), group, timeout=240)[0]:
        reported = summary(row)
        assert reported["ours"]["min"] > 0, row
        assert not row.missing


def test_each_save_beside_a_bad_sink_is_committed_and_measured(tmp_path: Path) -> None:
    rows = sinks.beside_sinks(tmp_path, 2, 1)
    kinds = ["none again", "good", "hanging", "failing", "full", "lying", "all of its own"]
    assert [row.name.partition(": ")[2] for row in rows] == [
        f"{kind}, {what}" for kind in kinds for what in ("time", "CPU time")
    ]
    assert all(summary(row)["ours_over_limit"] > 0 for row in rows)


def test_a_group_that_is_none_is_refused_with_the_names_of_all() -> None:
    assert chosen([], run.GROUPS) == list(run.GROUPS)
    with pytest.raises(SystemExit, match=r"did you mean formats\? There are: sharded, .*, root"):
        chosen(["first", "format"], run.GROUPS)
    for group in set(run.GROUPS) - {"first", "root"}:
        assert callable(run.rows_of(group))


def test_the_root_of_many_ranks_has_rows() -> None:
    rows = {row.name: summary(row) for row in root.rows(TINY, 1)}
    assert len(rows) == 4
    assert all(reported["ours"]["min"] > 0 for reported in rows.values())
    assert [name for name, reported in rows.items() if reported["rival"]] == [next(iter(rows))]


def test_a_table_is_kept_as_data_text_and_picture(tmp_path: Path) -> None:
    rows = [Row("one row", "s"), Row("another", "x")]
    for row in rows:
        row.add("reknit", "ours", 1.0, 2.0)
    rows[0].add("DCP", "rival", 3.0, 5.0)
    result = {"run": {"sizes": "tiny"}, "rows": [summary(row) for row in rows], "failed": {"x": "it broke"}}
    run.keep(result, tmp_path)
    assert json.loads((tmp_path / "table.json").read_text()) == result
    text = (tmp_path / "table.md").read_text()
    assert text == markdown(result)
    assert all(f"| {row.name} |" in text for row in rows)
    assert "it broke" in text
    for picture in ("table.png", "table-dark.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_the_table_that_the_pages_show_is_that_of_the_figures_kept_and_has_the_rows_of_today() -> None:
    result = json.loads((RESULTS / "table.json").read_text())
    assert (RESULTS / "table.md").read_text() == markdown(result)
    assert not result["failed"]
    for _, name, _, _ in first.SAVE_ROWS:
        assert any(row["row"].startswith(name) for row in result["rows"]), name


def test_ratios_are_those_of_rounds_that_were_made_side_by_side() -> None:
    row = Row("a row", "s")
    row.add("reknit", "ours", 1.0, 20.0, 3.0)
    row.add("slow", "rival", 8.0, 80.0, 8.0)
    row.add("quick", "rival", 2.0, 40.0, 2.0)
    row.add("quickest, no sync", "beside", 0.1, 0.1, 0.1)
    row.add("memcpy", "limit", 1.5)
    reported = summary(row)
    assert (reported["rival"]["name"], reported["ours_over_rival"]) == ("quick", 0.5)
    assert (reported["limit"]["name"], reported["ours_over_limit"]) == ("memcpy", 2.0)
    assert (reported["ours"]["min"], reported["ours"]["median"]) == (1.0, 3.0)
    assert "a row: 0.1 (quickest, no sync) s" in markdown({"run": {}, "rows": [reported], "failed": {}})


def test_a_missed_aim_is_printed_with_its_ratio_and_the_reason() -> None:
    row = Row("20 tensors: CPU of a load", "s")
    row.add("reknit", "ours", 3.0, 5.0)
    row.add("safetensors + fsync", "rival", 1.0, 1.0)
    text = markdown({"run": {}, "rows": [summary(row, "single")], "failed": {}})
    (aim,) = (aim for aim in AIMS if aim.bench == "table single" and aim.over == "safetensors*")
    assert "4 of safetensors, aim <= 1.5: NOT met, 2.67 of the aim |" in text
    assert (
        f"- 20 tensors: CPU of a load: 4 of safetensors, aim <= 1.5: NOT met, 2.67 of the aim; {aim.why}"
        in text
    )


def test_a_group_that_is_measured_again_replaces_its_own_rows_alone() -> None:
    def result(size: str, *groups: tuple[str, float]) -> dict[str, Any]:
        rows = []
        for group, seconds in groups:
            row = Row(f"a row of {group}", "s")
            row.add("reknit", "ours", seconds)
            rows.append(summary(row, group))
        return {
            "run": {"sizes": size},
            "rows": rows,
            "failed": {},
            "measured": {group: "now" for group, _ in groups},
        }

    before, after = result("default", ("sharded", 1.0), ("root", 2.0)), result("default", ("root", 3.0))
    joined = run.joined(before, after)
    assert [(row["group"], row["ours"]["median"]) for row in joined["rows"]] == [
        ("sharded", 1.0),
        ("root", 3.0),
    ]
    assert list(joined["measured"]) == ["sharded", "root"]
    for other in (None, result("quick", ("sharded", 1.0))):
        assert run.joined(other, after) == after


def test_who_takes_very_long_has_one_turn_and_no_warm_up() -> None:
    taken: list[tuple[str, int]] = []

    def way(name: str, number: int) -> dict[str, float]:
        taken.append((name, number))
        return {"s": 1.0}

    figures = in_turn({name: partial(way, name) for name in ("a", "b")}, 2, seldom=("b",)).of("s")
    assert taken == [("a", -1), ("a", 0), ("b", 0), ("a", 1)]
    assert figures == {"a": [1.0, 1.0], "b": [1.0]}


def test_who_fails_in_a_round_has_no_figures_and_a_reason() -> None:
    row = Row("a row", "s")
    row.add("DCP", "rival", 1.0)
    row.fail("DCP", "rival", "it broke")
    reported = summary(row)
    assert reported["rival"] is None
    assert reported["missing"] == {"DCP": "it broke"}


def test_a_run_that_is_told_to_end_does_not_go_on_with_its_next_group(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ended(error: SystemExit) -> run.Run:
        def launch(*_: object) -> None:
            raise error

        monkeypatch.setattr(run, "launch", launch)
        return run.Run(argparse.Namespace(tiny=True, rounds=1, timeout=1.0), str(tmp_path))

    assert ended(RanksFailedError("rank 1 failed")).launched("sharded", 2) == "rank 1 failed"
    with pytest.raises(SystemExit) as reported:  # what SIGTERM raises
        ended(SystemExit(143)).launched("sharded", 2)
    assert reported.value.code == 143
