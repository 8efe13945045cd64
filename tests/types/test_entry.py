"""A call that interrupts another one in its thread is refused at once; a turn comes within its time."""

from __future__ import annotations

import threading

import pytest

from reknit.errors import DeadlineError, UsageError
from reknit.types.entry import OneAtATime, entered, own_code, refuse_inside


def test_a_call_inside_of_a_call_is_refused_but_in_code_of_the_user() -> None:
    with entered("reknit.save"):
        for call in (entered("reknit.load").__enter__, lambda: refuse_inside("PendingSave.result")):
            with pytest.raises(UsageError, match=r"while the same thread is inside reknit\.save") as caught:
                call()
            assert "on_preemption" in (caught.value.remedy or "")
        with own_code(), entered("reknit.load"):
            pass
        with pytest.raises(UsageError):
            refuse_inside("reknit.load")
    with entered("reknit.save"):
        pass


def test_a_call_that_fails_is_over() -> None:
    with pytest.raises(ValueError, match="now"), entered("reknit.save"):
        raise ValueError("now")
    refuse_inside("reknit.load")


def test_another_thread_makes_calls_of_its_own() -> None:
    errors = []

    def call() -> None:
        try:
            with entered("reknit.load"):
                pass
        except UsageError as error:
            errors.append(error)

    with entered("reknit.save"):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert errors == []


def test_a_turn_is_refused_to_its_own_thread_and_to_another_one_after_its_time() -> None:
    turn, held, over = OneAtATime("a save"), threading.Event(), threading.Event()

    def keep() -> None:
        with turn.taken(10):
            held.set()
            over.wait(10)

    with turn.taken(0), pytest.raises(UsageError, match="a save was begun inside another one"):
        turn.taken(10).__enter__()
    thread = threading.Thread(target=keep)
    thread.start()
    held.wait(10)
    try:
        with pytest.raises(DeadlineError, match=r"another thread .* inside a save for 0.01 s"):
            turn.taken(0.01).__enter__()
    finally:
        over.set()
        thread.join()
    with turn.taken(0):
        assert turn.mine
    assert not turn.mine
