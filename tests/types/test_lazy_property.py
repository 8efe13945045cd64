"""Properties that are computed at their first use, in threads and forks."""

from __future__ import annotations

import ast
import threading
from pathlib import Path

import reknit
from reknit.types.small import lazy_property


class Waiting:
    def __init__(self, until: threading.Event, begun: threading.Event) -> None:
        self.until, self.begun, self.times = until, begun, 0

    @lazy_property
    def value(self) -> int:
        self.times += 1
        self.begun.set()
        assert self.until.wait(60)
        return 7


def test_a_value_is_computed_once() -> None:
    now = threading.Event()
    now.set()
    one = Waiting(now, threading.Event())
    assert (one.value, one.value, one.times) == (7, 7, 1)
    assert isinstance(Waiting.__dict__["value"], lazy_property)


def test_a_value_does_not_wait_for_that_of_another_instance_as_a_forked_process_would_for_ever() -> None:
    until, begun, now = threading.Event(), threading.Event(), threading.Event()
    now.set()
    slow, other = Waiting(until, begun), Waiting(now, threading.Event())
    computing = threading.Thread(target=lambda: slow.value)
    computing.start()
    try:
        assert begun.wait(60)
        values: list[int] = []
        beside = threading.Thread(target=lambda: values.append(other.value), daemon=True)
        beside.start()
        beside.join(5)
        assert values == [7]
    finally:
        until.set()
        computing.join()


def test_no_property_of_reknit_has_a_lock_that_a_fork_would_leave_closed() -> None:
    root = Path(reknit.__file__).parent
    users = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.alias) and node.name == "cached_property")
        or (isinstance(node, ast.Attribute) and node.attr == "cached_property")
    }
    assert users == {"types/small.py"}
