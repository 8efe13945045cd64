"""Every mutant can still be made: a change that moves its text has to move the mutant along."""

from __future__ import annotations

from collections import Counter

from tests.mutants.catalog import mutants
from tests.mutants.run import ROOT


def test_no_mutant_is_stale() -> None:
    reported = [(mutant.name, mutant.stale(ROOT)) for mutant in mutants()]
    assert [(name, why) for name, why in reported if why is not None] == []


def test_every_mutant_has_a_name_of_its_own_and_tests_that_must_notice_it() -> None:
    every = mutants()
    assert [name for name, count in Counter(mutant.name for mutant in every).items() if count > 1] == []
    assert [mutant.name for mutant in every if not mutant.tests] == []


def test_a_pattern_is_part_of_a_room_a_file_or_a_name() -> None:
    every = mutants()
    assert {mutant.room for mutant in mutants(patterns=["tiling: "])} == {"tiling"}
    assert {mutant.file for mutant in mutants(patterns=["types/box.py"])} == {"types/box.py"}
    assert mutants(patterns=[every[0].name]) == every[:1]
    assert mutants(patterns=["no such thing"]) == []
