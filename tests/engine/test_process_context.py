"""A save in the background writes the same as a save that waits, after any change to the process."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import reknit
from reknit.api import checks, ranks
from reknit.engine.background import link, messages
from reknit.engine.background.agent_save import AgentState
from reknit.engine.background.messages import ProcessContext, process_context
from reknit.errors import AgentError, DeadlineError
from reknit.storage.registry import recipe, register
from reknit.system import identity, umask
from reknit.testing.world import run_ranks
from tests.engine.seen import HELD, Ours, noted, open_seen, seen
from tests.running.cases import one_by_one_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from reknit.comm.group import Group
    from reknit.engine.background.agent_save import AgentSave
    from reknit.engine.background.session import AgentSession

LIMIT_S = 60.0
STATE = {"model": {"weight": np.arange(1000.0)}}

register("seen", open_seen)
fsspec.register_implementation("ours", Ours)


class Mine(MemoryFileSystem):  # type: ignore[misc]
    """The memory of this process under another name."""

    protocol = "mine"
    store: dict[str, Any] = {}  # noqa: RUF012 - as fsspec has it
    pseudo_dirs = [""]  # noqa: RUF012


@pytest.fixture(scope="module", autouse=True)
def _one_agent() -> Iterator[None]:
    """Let all tests here use one agent, which has to keep up with the changes of the process."""
    assert reknit.close(LIMIT_S)
    yield
    assert reknit.close(LIMIT_S)


@pytest.fixture(autouse=True)
def _changed_back() -> Iterator[None]:
    mask, folder, variables, path = umask(), os.getcwd(), dict(os.environb), list(sys.path)
    temporary, settings = tempfile.tempdir, dict(fsspec.config.conf)
    yield
    os.umask(mask)
    os.chdir(folder)
    for name in os.environb.keys() - variables.keys():
        del os.environb[name]
    os.environb.update(variables)
    sys.path[:] = path
    tempfile.tempdir = temporary
    fsspec.config.conf.clear()
    fsspec.config.conf.update(settings)


def background(path: object, **more: Any) -> reknit.PendingSave:
    return reknit.save(cast("str", path), STATE, wait=False, **more)


def crew() -> AgentSession:
    agents = checks.backgrounds[ranks.alone()][False].supervisor.session
    assert agents is not None
    return agents


def agent() -> int:
    pid = crew().link.pid
    assert pid is not None
    return pid


def set_variable(name: str, value: str) -> Callable[[Path], object]:
    return lambda _: os.environ.update({name: value})


CHANGES: dict[str, Callable[[Path], object]] = {
    "umask": lambda _: os.umask(0o027),
    "working folder": os.chdir,
    "variable": set_variable("TRIED", "x"),
    "variable that is not text": lambda _: os.environb.update({b"TRIED": b"\xff"}),
    "variable of a store": set_variable("AWS_SESSION_TOKEN", "x"),
    "proxy": set_variable("HTTPS_PROXY", "http://127.0.0.1:9"),
    "search path": lambda folder: sys.path.append(f"{folder}:with a colon"),
    "temporary folder": lambda folder: setattr(tempfile, "tempdir", str(folder)),
    "settings of fsspec": lambda _: fsspec.config.conf.update(ftp={"username": "x"}),
}


def test_a_save_has_the_context_of_its_call(tmp_path: Path) -> None:
    url = f"seen:/{tmp_path}"
    os.environ["HTTPS_PROXY"] = "http://127.0.0.1:8"
    background(f"{url}/first").result(LIMIT_S)
    first = agent()
    assert noted(tmp_path / "first", first) == seen()
    for number, (change, make) in enumerate(CHANGES.items()):
        before = seen()
        make(tmp_path)
        assert seen() != before, change
        background(f"{url}/{number}").result(LIMIT_S)
        assert noted(tmp_path / str(number), agent()) == seen(), change
    for name in ("TRIED", "HTTPS_PROXY", "AWS_SESSION_TOKEN"):
        os.environ.pop(name, None)
    background(f"{url}/last").result(LIMIT_S)
    assert noted(tmp_path / "last", agent()) == seen()
    assert agent() == first, "no change needs a new agent"


def modes(folder: Path) -> dict[str, str]:
    """Return the permissions of a checkpoint's folders and files, which carry a write id in their names."""
    found = sorted(folder.rglob("*"))
    return {path.suffix or path.name: stat.filemode(path.lstat().st_mode) for path in [folder, *found]}


def test_files_of_a_background_save_have_the_permissions_of_a_save_that_waits(tmp_path: Path) -> None:
    for mask, folder in one_by_one_in(tmp_path, [0o027, 0o077]):
        os.umask(mask)
        background(folder / "a" / "step").result(LIMIT_S)
        reknit.save(folder / "b" / "step", STATE)
        permissions = modes(folder / "a" / "step")
        assert {".parquet", ".json", ".safetensors", "model"} <= permissions.keys()
        permissions["a"] = permissions.pop("step")
        other = modes(folder / "b" / "step")
        other["a"] = other.pop("step")
        assert permissions == other


@pytest.mark.parametrize("url", ["memory://runs/here", "simplecache::memory://runs/here", "mine://runs/here"])
def test_a_file_system_in_the_memory_of_this_process_is_written_by_it(url: str, tmp_path: Path) -> None:
    fsspec.register_implementation("mine", Mine, clobber=True)
    assert recipe(url) == (url, False, None)
    target: dict[str, Any] = {"model": {"weight": np.zeros(1000)}}
    try:
        background(url, overwrite=True).result(LIMIT_S)
        reknit.load(url, target)
        assert target["model"]["weight"][-1] == 999
        to = reknit.SaveOptions(promote_to=f"{url}/promoted")
        background(tmp_path / "step", options=to).promoted(LIMIT_S)
        assert reknit.verify(f"{url}/promoted").ok
    finally:
        MemoryFileSystem.store.clear()
        Mine.store.clear()


def test_what_is_prepared_is_where_promotions_are_made() -> None:
    assert reknit.close(LIMIT_S)
    options = reknit.SaveOptions(promote_to="memory://runs/promoted")
    reknit.prepare("mem://context", options=options)
    assert list(checks.backgrounds[ranks.alone()]) == [True]


def test_a_class_that_was_registered_with_fsspec_is_registered_by_the_agent(tmp_path: Path) -> None:
    url = f"ours:/{tmp_path}/step"
    assert recipe(url) == (url, True, f"ours={Ours.__module__}:Ours")
    assert "Ours" in (recipe(f"simplecache::{url}").factory or "")
    background(url).result(LIMIT_S)
    assert reknit.verify(tmp_path / "step").ok


def test_settings_of_fsspec_that_only_this_process_has_keep_its_saves_here() -> None:
    assert recipe("ftp://x").elsewhere
    fsspec.config.conf["ftp"] = {"session": object()}
    assert not recipe("ftp://x").elsewhere
    assert not recipe("seen://x").elsewhere, "its factory may use fsspec"
    assert recipe("/folder").elsewhere
    fsspec.config.conf["ftp"] = {"ports": (1, 2)}
    assert not recipe("ftp://x").elsewhere, "a list would come of it"


def test_a_factory_whose_module_no_other_process_finds_is_used_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "found_once.py").write_text("def factory(url, durability): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    import found_once  # type: ignore[import-not-found]

    register("once", found_once.factory)
    assert recipe("once://x").factory == "found_once:factory"
    sys.path.remove(str(tmp_path))
    assert recipe("once://x") == ("once://x", False, None)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "found_once.py").touch()
    sys.path.insert(0, str(tmp_path / "other"))
    assert not recipe("once://x").elsewhere, "the agent would find another module of that name"


def test_a_save_is_refused_when_its_agent_is_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    background(tmp_path / "1").result(LIMIT_S)
    with monkeypatch.context() as changed:
        changed.setattr(link, "identity", lambda: identity()._replace(user=4711))
        with pytest.raises(AgentError, match=r"effective user of this process changed .* to 4711") as caught:
            background(tmp_path / "2").result(LIMIT_S)
        assert "reknit.close()" in (caught.value.remedy or "")
        with pytest.raises(AgentError, match="effective user"):
            reknit.prepare(tmp_path, STATE)
    assert not (tmp_path / "2").exists()
    background(tmp_path / "3").result(LIMIT_S)


def test_a_save_that_one_rank_refuses_is_refused_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(group: Group) -> str:
        background(tmp_path / "1", group=group).result(LIMIT_S)
        agents = checks.backgrounds[group][False].supervisor.session
        assert agents is not None
        if group.rank == 1:
            monkeypatch.setattr(agents.link, "_identity", identity()._replace(root=(0, 0)))
        with pytest.raises(AgentError) as caught:
            background(tmp_path / "2", group=group).result(LIMIT_S)
        return str(caught.value)

    for error in run_ranks(2, rank):
        assert "root folder" in error
        assert "rank 1" in error


def promotes(to: Path) -> dict[str, reknit.SaveOptions]:
    return {"options": reknit.SaveOptions(promote_to=f"seen:/{to}")}


def test_a_promotion_has_the_variables_of_its_save(tmp_path: Path) -> None:
    root = tmp_path / "slow"
    root.mkdir()
    (root / HELD).touch()
    saves = []
    for token in ("a", "b", "c"):
        os.environ["AWS_SESSION_TOKEN"] = token
        saves.append(background(tmp_path / token, **promotes(root / token)))
        saves[-1].result(LIMIT_S)
    (root / HELD).unlink()
    for token, save in zip(("a", "b", "c"), saves, strict=True):
        save.promoted(LIMIT_S)
        assert repr(token) in noted(root / token, agent())["variables"], "it waited for those before it"


def test_another_umask_waits_for_the_promotions_before_it(tmp_path: Path) -> None:
    root = tmp_path / "slow"
    root.mkdir()
    os.umask(0o022)
    (root / HELD).touch()
    first = background(tmp_path / "1", **promotes(root / "1"))
    first.result(LIMIT_S)
    os.umask(0o077)
    second = background(tmp_path / "2")
    assert not second.done()
    (root / HELD).unlink()
    second.result(LIMIT_S)
    first.promoted(LIMIT_S)
    assert modes(root / "1")[".safetensors"] == "-rw-r--r--"
    assert modes(tmp_path / "2")[".safetensors"] == "-rw-------"


def test_a_context_that_could_not_be_set_in_time_is_set_for_the_next_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    were_set: list[ProcessContext] = []
    monkeypatch.setattr(messages, "adopt", lambda new, old: were_set.append(new))
    asked: list[bool] = []

    def wait(timeout_s: float, *, promoted: bool) -> bool:
        asked.append(promoted)
        return over

    save = cast("AgentSave", SimpleNamespace(number=1, url="here", wait=wait, promotes=False))
    over, agent, first, second = (
        True,
        AgentState(lambda message: True),
        process_context(),
        process_context(),
    )
    second.umask ^= 0o7
    agent.adapt(first, [], 1.0)
    agent.adapt(None, [save], 1.0)
    assert (were_set, asked) == ([first], []), "nothing changed"
    over = False
    with pytest.raises(DeadlineError, match="the umask has changed, and save 1 to here"):
        agent.adapt(second, [save], 1.0)
    assert (were_set, asked) == ([first], [True])
    over = True
    agent.adapt(None, [save], 1.0)
    assert were_set == [first, second]


def test_what_is_said_of_context_shows_no_values() -> None:
    os.environ["AWS_SECRET_ACCESS_KEY"] = "secret"
    assert "secret" not in repr(process_context())


def test_the_umask_is_found_without_setting_another(monkeypatch: pytest.MonkeyPatch) -> None:
    os.umask(0o026)
    assert umask() == 0o026

    def none(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("builtins.open", none)
    assert umask() == 0o026
