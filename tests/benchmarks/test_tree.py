"""Saves between hosts that are far from each other, over wires that lose packets and break."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.tree import model
from benchmarks.tree.run import TIMEOUT_S, hosts
from benchmarks.tree.wire import why_not
from reknit.comm.group import Topology
from tests.running.examples import is_night

if TYPE_CHECKING:
    from pathlib import Path


def test_saves_over_bad_wires_are_whole_and_a_cut_one_is_a_typed_error_in_time(tmp_path: Path) -> None:
    if not is_night():
        pytest.skip("at night; tests/comm/test_tree_loss.py has lost messages and ranks by day")
    if reason := why_not():
        pytest.skip(reason)
    found = hosts(tmp_path, 8)
    assert found["packets"]["lost"] > 0
    assert found["saved_on_bad_wires"]
    cut = found["cut"]
    assert cut["ranks_with_an_error"] == found["ranks"]
    assert set(cut["errors"]) <= {"CommError", "DeadlineError"}
    assert cut["latest_s"] <= 4 * TIMEOUT_S, cut  # beside other tests
    assert found["saved_after_mending"]
    assert found["committed"] >= 4
    assert found["all_sound"]


def test_the_model_of_a_round_counts_what_the_formula_of_a_star_counts_and_a_tree_needs_less() -> None:
    times = {"message_s": 1e-4, "travel_s": 1e-3}
    modelled = model.Model(Topology.flat(100, 100), **times).round()
    assert modelled == pytest.approx(model.star(100, **times))
    tree = model.Model(Topology([rank // 8 for rank in range(100)], 16), **times).round()
    assert tree.height == 2
    assert tree.most_messages == 2 * (7 + 12)  # the other ranks of the first host, and the other hosts
    assert tree.seconds < modelled.seconds
