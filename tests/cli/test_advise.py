"""`reknit advise`."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import numpy as np

import reknit
from reknit.policies.save_policies import RunCosts

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.command import Command

TIMES = ("--stall", "0.5", "--write", "40", "--restart", "600")


def test_the_best_interval_and_what_others_cost(command: Command) -> None:
    ran = command("advise", *TIMES, "--mttf", "3.1", "--interval", "1800", "--step", "10", "--json").json
    costs = RunCosts(stall_s=0.5, write_s=40, restart_s=600, mttf_s=3.1 * 3600)
    assert ran["interval_s"] == costs.best_interval_s()
    assert ran["ettr"] == costs.ettr(costs.best_interval_s())
    assert 1800 in [row["interval_s"] for row in ran["intervals"]]
    text = command("advise", *TIMES, "--mttf", "3.1", "--step", "10").out
    assert "save every       105.3 s" in text
    assert "in steps         11" in text
    assert "a failure every  3.1 h" in text


def test_a_folder_tells_size_and_ranks(command: Command, tmp_path: Path) -> None:
    reknit.save(tmp_path / "step_5", {"model": {"w": np.zeros(1 << 18)}}, step=5)
    ran = command("advise", tmp_path, *TIMES, "--rank-mttf", "50000")
    assert ran.code == 0
    assert "size of a checkpoint       2.0 MiB" in ran.out
    assert "host memory per rank       2.0 MiB" in ran.out
    many = command("advise", tmp_path, *TIMES, "--rank-mttf", "50000", "--ranks", "16000", "--json").json
    assert (many["ranks"], many["mttf_h"]) == (16000, 3.125)
    assert command("advise", tmp_path / "typo", *TIMES, "--mttf", "3").code == 3


def test_what_it_cannot_reckon_with_is_said(command: Command) -> None:
    for wrong in ((), ("--rank-mttf", "3"), ("--mttf", "-1"), ("--mttf", "1", "--ranks", "0")):
        assert command("advise", *TIMES, *wrong).code == 2, wrong


def test_what_no_job_has_is_computed_or_refused(command: Command) -> None:
    for stall, mttf, ranks in product(("1e-6", "1e9"), ("1e-6", "1e9"), ("1", "1000000000")):
        given = ("--stall", stall, "--write", "1e-6", "--restart", "1", "--rank-mttf", mttf, "--ranks", ranks)
        ran = command("advise", *given, "--step", "1e-6", "--json").json
        shares = [row[name] for row in ran["intervals"] for name in row if name != "interval_s"]
        assert all(0 <= share <= 1 for share in shares), given
        assert command("advise", *given, "--step", "1e-6").code == 0, given
        for beyond in ("1e-300", "1.7e308", "nan", "inf"):
            assert command("advise", *given, "--interval", beyond).code == 2, (given, beyond)
