"""Each option that a user sets is the one that its readers see, in the trainer and in the agent."""

from __future__ import annotations

import os
import socket
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.arguments import BACKGROUND_ONLY, NOT_FOR_OPEN, NOT_FOR_PROMOTE, NOT_FOR_VERIFY
from reknit.options import MIB, CommOptions, LoadOptions, SaveOptions
from reknit.storage.registry import register
from reknit.testing.world import run_ranks
from reknit.transforms import names, rename
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator, Mapping

    from reknit.comm.group import Group

    Seen = dict[str, list[tuple[str, Any]]]
    """By option, the places that read it, and the values that they got."""

ROOT = Path(reknit.__file__).parent
NO_USE: Mapping[str, tuple[str, ...] | None] = {
    "options.py": None,
    "keywords.py": None,
    "arguments.py": ("_check_used",),
    "stage_for_agent.py": ("_begin", "<dictcomp>"),
}
"""Functions, or all of a module, that only check options, or hand them to the agent."""

SAVE: dict[str, Any] = {
    "check_replicas": "all",
    "allow_pickle": True,
    "max_file_nbytes": 5 * MIB,
    "durability": "process",
    "timeout_s": 111.0,
    "on_error": "warn",
    "reuse": False,
    "promote_to": "optional://b",
    "threads": 3,
    "inflight_nbytes": 48 * MIB,
    "stage": "lazy",
    "when_busy": "skip",
    "host_nbytes": 128 * MIB,
    "piece_nbytes": 8 * MIB,
    "priority": "normal",
    "exit_wait_s": 222.0,
    "events": "events.jsonl",
    "progress": False,
    "comm": CommOptions(generation=77),
}
LOAD: dict[str, Any] = {
    "only": ("model/*",),
    "transforms": (rename("old", "a"),),
    "cast": True,
    "allow_shape_mismatch": ("model/a",),
    "allow_pickle": True,
    "verify": "off",
    "replicas": ("optional://b",),
    "timeout_s": 111.0,
    "threads": 3,
    "inflight_nbytes": 48 * MIB,
    "gap_nbytes": 1234,
    "share": "always",
    "events": "events.jsonl",
    "progress": False,
    "comm": CommOptions(generation=77),
}
COMM: dict[str, Any] = {
    "bind": "127.0.0.1",
    "interface": None,
    "tls": None,
    "fan_out": 5,
    "connect_timeout_s": 33.0,
    "max_message_nbytes": 12 * MIB,
    "generation": 99,
}

register("optional", lambda url, durability: ProcessMemory("options").sub(url.partition("://")[2]))


@contextmanager
def reading(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> Iterator[Seen]:
    """Note meanwhile who reads which option, and the value that is read."""
    seen: Seen = defaultdict(list)
    options = {field.name for field in fields(kind)}

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in options and (reader := _reader()) is not None:
            seen[name].append((reader, value))
        return value

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__getattribute__", read)
        yield seen


def _reader() -> str | None:
    """Return the place in reknit that reads an option, None where that is no use of it."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "promotions" or frame.f_code.co_filename == __file__:
        if frame.f_back is None or frame.f_code.co_name.startswith("test_"):
            return None
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    functions = NO_USE.get(path.name, ())
    if ROOT not in path.parents or functions is None or frame.f_code.co_name in functions:
        return None
    return f"{path.relative_to(ROOT)}:{frame.f_lineno}"


def check(seen: Seen, chosen: dict[str, Any], unread: Container[str] = ()) -> None:
    """Check that all readers have seen the chosen values, and that each has a reader, unless `unread`."""
    other = [
        (name, reader, value)
        for name, readers in seen.items()
        for reader, value in readers
        if name in chosen and value != chosen[name]
    ]
    assert other == []
    assert [name for name in chosen if (name in seen) == (name in unread)] == []


def less(values: dict[str, Any], without: Container[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in without}


def state(name: str = "old") -> dict[str, Any]:
    return {"model": {name: np.ones(3 << 20, np.float32)}, "extra": {"epoch": 7}}


def is_there(path: str) -> bool:
    with reknit.open(path) as checkpoint:
        return bool(checkpoint.read("model", "old").all())


@pytest.fixture(autouse=True)
def nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ProcessMemory.clear("options")


@pytest.mark.parametrize(("kind", "chosen"), [(SaveOptions, SAVE), (LoadOptions, LOAD), (CommOptions, COMM)])
def test_there_is_a_value_for_each_option_other_than_the_usual(kind: type[Any], chosen: Any) -> None:
    assert {field.name for field in fields(kind)} == chosen.keys()
    usual = [name for name, value in chosen.items() if value == getattr(kind(), name)]
    assert usual == (["interface", "tls"] if kind is CommOptions else [])


def test_a_save_that_waits_sees_each_option(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = less(SAVE, BACKGROUND_ONLY)
    with reading(monkeypatch, SaveOptions) as seen:
        reknit.save("optional://a", state(), options=SaveOptions(**chosen))
        assert reknit.close(60)
    check(seen, chosen)
    assert is_there("optional://a")
    assert is_there("optional://b")


def test_a_save_in_the_background_sees_each_option_and_so_do_its_agent_and_its_promotion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = SAVE | {"events": [os.path.abspath("events.jsonl")]}
    with reading(monkeypatch, SaveOptions) as seen:
        reknit.save("optional://a", state(), wait=False, options=SaveOptions(**chosen)).result(60)
        assert reknit.close(60)
    check(seen, chosen, unread={"progress"})
    assert is_there("optional://a")
    assert is_there("optional://b")


def test_a_promotion_by_itself_sees_each_option_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    reknit.save("optional://a", state())
    chosen = less(SAVE, NOT_FOR_PROMOTE)
    with reading(monkeypatch, SaveOptions) as seen:
        reknit.promote("optional://a", "optional://b", options=SaveOptions(**chosen))
    check(seen, chosen)


def load_in(load: Callable[..., object], group: Group) -> None:
    load(state("a"), group=group)


def test_a_load_sees_each_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("optional://a", "optional://b"):
        reknit.save(path, state())
    full = {"verify": "full", "gap_nbytes": None}
    for each, unread in ({}, set[str]()), (full, {"gap_nbytes"}):
        chosen = LOAD | each
        with reading(monkeypatch, LoadOptions) as seen:
            load = partial(reknit.load, "optional://a", options=LoadOptions(**chosen))
            load(state("a"))
            run_ranks(2, partial(load_in, load))
        check(seen, chosen, unread)


def test_a_checkpoint_that_is_opened_sees_each_option_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("optional://a", "optional://b"):
        reknit.save(path, state())
    chosen = less(LOAD, NOT_FOR_OPEN) | {"transforms": (names({"model/old": "model/a"}),)}
    with (
        reading(monkeypatch, LoadOptions) as seen,
        reknit.open("optional://a", options=LoadOptions(**chosen)) as checkpoint,
    ):
        assert checkpoint.read("model", "a").all()
    check(seen, chosen)


def test_a_checkpoint_that_is_verified_sees_each_option_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    reknit.save("optional://a", state())
    chosen = less(LOAD, NOT_FOR_VERIFY)
    with reading(monkeypatch, LoadOptions) as seen:
        assert reknit.verify("optional://a", "data", options=LoadOptions(**chosen)).ok
    check(seen, chosen)
    assert reknit.sinks.flush(10)
    assert '"action":"verify"' in (tmp_path / "events.jsonl").read_text().replace(" ", "")


def test_ranks_that_connect_see_each_option_and_so_do_their_agents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loopback = {"bind": None, "interface": socket.if_nameindex()[0][1]}
    for each, unread in ({}, {"interface"}), (loopback, set[str]()):
        options = CommOptions(**(COMM | each))
        connect = partial(reknit.connect, size=2, at=tmp_path / str(len(each)), options=options)

        def save(group: Group, options: CommOptions = options) -> None:
            chosen = SaveOptions(comm=options)
            reknit.save("optional://a", state(), wait=False, overwrite=True, group=group, options=chosen)

        with reading(monkeypatch, CommOptions) as seen, ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(connect, range(2)))
            try:
                run_ranks(2, save, groups=groups)
            finally:
                reknit.close(60)
                for group in groups:
                    group.close()
        check(seen, COMM | each, unread)
        assert is_there("optional://a")
