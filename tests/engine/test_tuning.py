from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.memory.write import PIECES, THREADS, Settings, Tuner
from reknit.errors import UsageError
from tests.running.cases import one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
GRID = [Settings(threads, piece) for threads in THREADS for piece in PIECES]


def tune(tuner: Tuner, rate: Callable[[Settings], float]) -> list[Settings]:
    """Measure a simulated store to the end, and return the settings that were tried."""
    tried: list[Settings] = []
    while tuner.measuring:
        assert len(tried) <= len(GRID), "it never ends"
        settings, nbytes = tuner.settings, tuner.window_nbytes
        tried.append(settings)
        assert tuner.observe(settings, nbytes, nbytes / rate(settings)) == tuner.settings
    return tried


@given(
    rates=st.lists(st.floats(1e6, 1e11), min_size=len(GRID), max_size=len(GRID)),
    share=st.integers(1, 4),
    threads=st.sampled_from([None, None, *THREADS]),
    piece=st.sampled_from([None, None, *PIECES]),
)
def test_whatever_the_store_the_choice_is_close_to_the_best_and_no_candidate_is_tried_twice(
    rates: list[float], share: int, threads: int | None, piece: int | None
) -> None:
    table = {
        **{Settings(3, size): 5e8 for size in PIECES},  # a share of three is tried as it is
        **dict(zip(GRID, rates, strict=True)),
    }
    tuner = Tuner(threads=threads, piece_nbytes=piece, share=share)
    tried = tune(tuner, table.__getitem__)
    assert len(tried) == len(set(tried)) <= len(GRID) + 1
    if tried:
        assert tuner.settings == tuner.best
        assert table[tuner.best] >= 0.9 * max(table[s] for s in tuner.candidates)
    assert threads in (None, tuner.settings.threads)
    assert piece in (None, tuner.settings.piece_nbytes)


def test_where_all_are_equally_fast_one_thread_with_small_pieces_is_kept() -> None:
    tuner = Tuner(share=4)
    assert len(tune(tuner, lambda settings: 1e9 + settings.threads * 1e7)) == len(GRID)
    assert tuner.settings == Settings(1, PIECES[0])


def test_a_gain_that_is_worth_its_threads_is_taken() -> None:
    tuner = Tuner(share=4)
    tune(tuner, lambda settings: settings.threads * (2e8 if settings.piece_nbytes >= 16 * MIB else 1e8))
    assert tuner.settings == Settings(4, 16 * MIB)


def test_what_is_given_is_not_measured() -> None:
    tuner = Tuner(threads=7, piece_nbytes=16 * MIB, share=1)
    assert not tuner.measuring
    assert tuner.settings == tuner.best == Settings(7, 16 * MIB)


def test_two_threads_are_tried_where_the_share_of_the_cores_is_one_and_four_only_where_it_is_four() -> None:
    for share, expected in ((1, {1, 2}), (2, {1, 2}), (4, {1, 2, 4})):
        assert {threads for threads, _ in Tuner(share=share).candidates} == expected


@given(share=st.integers(1, 4), window=st.integers(1, 1 << 30))
def test_a_window_gives_every_thread_several_pieces(share: int, window: int) -> None:
    tuner = Tuner(share=share, window_nbytes=window)
    while tuner.measuring:
        threads, piece = tuner.settings
        assert tuner.window_nbytes >= max(window, 4 * threads * piece)
        tuner.observe(tuner.settings, 1, 1.0)


def test_settings_that_make_no_sense_are_refused() -> None:
    cases: list[dict[str, int]] = [{"threads": 0}, {"piece_nbytes": 12 * MIB}, {"piece_nbytes": 0}]
    for wrong in one_by_one(cases):
        with pytest.raises(UsageError):
            Tuner(**wrong)
