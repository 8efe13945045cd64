"""The readers of each option, in the trainer and in the agent, get the value that the user has set."""

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
from reknit.options import MIB, CommOptions, LoadOptions, SaveOptions
from reknit.options.fields import CALLS, names_in, scopes_of
from reknit.storage.registry import register
from reknit.testing.world import run_ranks
from reknit.transforms import names, rename
from tests.storage.process_memory import ProcessMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from reknit.comm.group import Group
    from reknit.options.fields import Scope

    Seen = dict[str, list[tuple[str, Any, bool]]]
    """By option, the places that read it, the values that they got, and whether an agent received them."""

ROOT = Path(reknit.__file__).parent
NO_USE: Mapping[str, tuple[str, ...] | None] = {
    "__init__.py": None,
    "fields.py": None,
    "keywords.py": None,
    "begin_message.py": ("begin_message", "<dictcomp>"),
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

VALUES: dict[type[Any], dict[str, Any]] = {SaveOptions: SAVE, LoadOptions: LOAD, CommOptions: COMM}

NOT_SENT = SaveOptions().on_error
"""The value of an option in the objects that agents receive; the users of these tests set another."""

register("optional", lambda url, durability: ProcessMemory("options").sub(url.partition("://")[2]))


@contextmanager
def reading(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> Iterator[Seen]:
    """Record the readers of options within the block, and the values that they get."""
    seen: Seen = defaultdict(list)
    options = {field.name for field in fields(kind)}

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in options and (reader := _reader()) is not None:
            of_agent = kind is SaveOptions and object.__getattribute__(self, "on_error") == NOT_SENT
            seen[name].append((reader, value, of_agent))
        return value

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__getattribute__", read)
        yield seen


def _reader() -> str | None:
    """Return the place in reknit that reads an option, None if it only checks or hands on the option."""
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


def check(seen: Seen, chosen: dict[str, Any]) -> None:
    """Check that exactly the options in `chosen` were read, each time with its value."""
    read = [(name, *each) for name, readers in seen.items() for each in readers]
    assert [each for each in read if each[2] != chosen.get(each[0])] == []
    assert sorted(seen) == sorted(chosen)


def chosen_for(kind: type[Any], scope: Scope) -> dict[str, Any]:
    """Return an unusual value for each option that is read in a scope."""
    return {name: VALUES[kind][name] for name in names_in(kind, scope)}


def state(name: str = "old") -> dict[str, Any]:
    return {"model": {name: np.ones(3 << 20, np.float32)}, "extra": {"epoch": 7}}


def is_there(path: str) -> bool:
    with reknit.open(path) as checkpoint:
        return bool(checkpoint.read("model", "old").all())


@pytest.fixture(autouse=True)
def nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ProcessMemory.clear("options")


def test_there_is_a_value_for_each_option_other_than_the_usual() -> None:
    for kind in VALUES:
        assert scopes_of(kind).keys() == VALUES[kind].keys()
        usual = [name for name, value in VALUES[kind].items() if value == getattr(kind(), name)]
        assert usual == (["interface", "tls"] if kind is CommOptions else [])


def test_each_option_is_read_somewhere_and_those_of_agents_in_the_background() -> None:
    for kind in VALUES:
        for name, scopes in scopes_of(kind).items():
            assert scopes & CALLS.keys(), name
            assert kind is CommOptions or "background" in scopes or not scopes & {"agent", "start"}, name


REFUSING: dict[Scope, tuple[type[Any], Callable[..., object]]] = {
    "save": (SaveOptions, partial(reknit.save, "optional://b", {"model": {"old": 1}})),
    "promote": (SaveOptions, partial(reknit.promote, "optional://a", "optional://b")),
    "open": (LoadOptions, partial(reknit.open, "optional://a")),
    "verify": (LoadOptions, partial(reknit.verify, "optional://a")),
}


def test_a_call_refuses_each_option_that_it_does_not_read_and_names_the_calls_that_do() -> None:
    reknit.save("optional://a", {"model": {"old": 1}})
    for scope, (kind, call) in REFUSING.items():
        for name in sorted(VALUES[kind].keys() - names_in(kind, scope) - {"gap_nbytes"}):
            its_calls = [text for each, text in CALLS.items() if each in scopes_of(kind)[name]]
            said = f"{name}=.* means nothing to {CALLS[scope]}"
            with pytest.raises(reknit.UsageError, match=said) as caught:
                call(options=kind(**{name: VALUES[kind][name]}))
            remedy = f"leave {name} out of these options: it is for {' and '.join(its_calls)}"
            assert caught.value.remedy == remedy
    with pytest.raises(reknit.CheckpointNotFoundError):
        reknit.open("optional://b")


def test_a_save_that_waits_sees_each_option(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = chosen_for(SaveOptions, "save")
    with reading(monkeypatch, SaveOptions) as seen:
        reknit.save("optional://a", state(), options=SaveOptions(**chosen))
        assert reknit.close(60)
    check(seen, chosen)
    assert is_there("optional://a")
    assert is_there("optional://b")


def test_a_save_in_the_background_sees_each_option_and_so_do_its_agent_and_its_promotion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = chosen_for(SaveOptions, "background") | {"events": [os.path.abspath("events.jsonl")]}
    with reading(monkeypatch, SaveOptions) as seen:
        reknit.save("optional://a", state(), wait=False, options=SaveOptions(**chosen)).promoted(60)
    again = SaveOptions(**chosen | {"promote_to": "optional://d"})
    with reading(monkeypatch, SaveOptions) as later:
        reknit.save("optional://c", state(), wait=False, options=again).promoted(60)
        assert reknit.close(60)
    check(seen, chosen)
    once = {"comm"} | (seen.keys() - later.keys())  # later saves find the group, and do not connect
    assert sorted(once) == sorted(names_in(SaveOptions, "start"))
    of_agent = {name for name, readers in seen.items() if any(of_agent for _, _, of_agent in readers)}
    assert sorted(of_agent) == sorted(names_in(SaveOptions, "agent"))
    assert is_there("optional://a")
    assert is_there("optional://b")


def test_a_promotion_by_itself_sees_each_option_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    reknit.save("optional://a", state())
    chosen = chosen_for(SaveOptions, "promote")
    with reading(monkeypatch, SaveOptions) as seen:
        reknit.promote("optional://a", "optional://b", options=SaveOptions(**chosen))
    check(seen, chosen)


def load_in(load: Callable[..., object], group: Group) -> None:
    load(state("a"), group=group)


def test_a_load_sees_each_option(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("optional://a", "optional://b"):
        reknit.save(path, state())
    chosen = chosen_for(LoadOptions, "load")
    full = {name: value for name, value in chosen.items() if name != "gap_nbytes"} | {"verify": "full"}
    for each in (chosen, full):
        with reading(monkeypatch, LoadOptions) as seen:
            load = partial(reknit.load, "optional://a", options=LoadOptions(**each))
            load(state("a"))
            run_ranks(2, partial(load_in, load))
        check(seen, each)


def test_a_checkpoint_that_is_opened_sees_each_option_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("optional://a", "optional://b"):
        reknit.save(path, state())
    chosen = chosen_for(LoadOptions, "open") | {"transforms": (names({"model/old": "model/a"}),)}
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
    chosen = chosen_for(LoadOptions, "verify")
    with reading(monkeypatch, LoadOptions) as seen:
        assert reknit.verify("optional://a", "data", options=LoadOptions(**chosen)).ok
    check(seen, chosen)
    assert reknit.sinks.flush(10)
    assert '"action":"verify"' in (tmp_path / "events.jsonl").read_text().replace(" ", "")


def test_ranks_that_connect_see_each_option_and_so_do_their_agents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    chosen = chosen_for(CommOptions, "connect")
    loopback = chosen | {"bind": None, "interface": socket.if_nameindex()[0][1]}
    del chosen["interface"]  # is not read beside `bind`
    for each in (chosen, loopback):
        options = CommOptions(**each)
        connect = partial(reknit.connect, size=2, at=tmp_path / str(len(each)), options=options)

        def save(group: Group, options: CommOptions = options) -> None:
            of_save = SaveOptions(comm=options)
            reknit.save("optional://a", state(), wait=False, overwrite=True, group=group, options=of_save)

        with reading(monkeypatch, CommOptions) as seen, ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(connect, range(2)))
            try:
                run_ranks(2, save, groups=groups)
            finally:
                reknit.close(60)
                for group in groups:
                    group.close()
        check(seen, each)
        assert is_there("optional://a")
