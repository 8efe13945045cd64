from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reknit.engine.memory.arena import SPAN_NBYTES
from reknit.engine.memory.tuning import PIECES, THREADS, Settings, Tuner
from reknit.errors import UsageError
from reknit.format.checksum import BLOCK_NBYTES

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


def test_fewer_threads_count_more_than_smaller_pieces() -> None:
    rates = {Settings(1, 32 * MIB): 0.97e9, Settings(2, 4 * MIB): 1e9}
    tuner = Tuner(share=2)
    tune(tuner, lambda settings: rates.get(settings, 5e8))
    assert tuner.settings == Settings(1, 32 * MIB)


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


def test_the_first_candidate_is_what_untuned_saves_use() -> None:
    tuner = Tuner(share=2)
    assert tuner.settings == tuner.best == Settings(2, 8 * MIB)


def test_a_tuner_that_is_half_done_writes_with_the_best_so_far() -> None:
    tuner = Tuner(share=2)
    tuner.observe(tuner.settings, 1000, 10.0)
    fast = tuner.settings
    tuner.observe(fast, 1000, 1.0)
    assert tuner.measuring
    assert tuner.best == fast != tuner.settings


def test_a_time_for_settings_that_are_no_candidate_changes_nothing() -> None:
    tuner = Tuner(share=2)
    assert tuner.observe(Settings(9, 4 * MIB), 1000, 1e-6) == tuner.settings
    assert tuner.best == Settings(2, 8 * MIB)


def test_a_clock_that_did_not_move_is_no_division_by_zero() -> None:
    tuner = Tuner(share=1)
    tuner.observe(tuner.settings, 1000, 0.0)
    assert tuner.best == Settings(1, 8 * MIB)


@given(share=st.integers(1, 4), window=st.integers(1, 1 << 30))
def test_a_window_gives_every_thread_several_pieces(share: int, window: int) -> None:
    tuner = Tuner(share=share, window_nbytes=window)
    while tuner.measuring:
        threads, piece = tuner.settings
        assert tuner.window_nbytes >= max(window, 4 * threads * piece)
        tuner.observe(tuner.settings, 1, 1.0)


def test_pieces_hold_whole_blocks_and_windows_whole_spans_of_an_arena() -> None:
    assert PIECES[-1] == SPAN_NBYTES
    for piece in PIECES:
        assert piece % BLOCK_NBYTES == 0
        assert PIECES[-1] % piece == 0


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"piece_nbytes": 12 * MIB}, {"piece_nbytes": 0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Tuner(**wrong)
