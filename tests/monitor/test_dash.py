"""The dashboard: it shows events that are written while it runs, to permitted users."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from itertools import product
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("starlette", reason="the dashboard needs starlette")
pytest.importorskip("uvicorn", reason="the dashboard needs uvicorn")

from reknit.errors import UsageError
from reknit.events.to_file import JsonLines
from reknit.monitor import dash as live
from reknit.monitor import dash as web
from reknit.monitor.dash import app
from tests.faults.nursery import wait_until
from tests.monitor.records import of_rank as record
from tests.page_checks import bad_contrasts, sticking_out
from tests.running.examples import at_night

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, 1)
    return tmp_path


def write(folder: Path, step: int, slow_s: float = 1.0) -> None:
    """Let four ranks write the events of a save."""
    for rank in range(4):
        sink = JsonLines(str(folder / f"{rank}.jsonl"))
        seconds = slow_s if rank == 3 else 1.0
        sink.take([record("write", rank, step, seconds, step=step, path=f"run/{step}", nbytes=1 << 30)])


class Dash:
    """`reknit dash` in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "reknit", "dash", str(folder), "--port=0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found is not None, (line, self.end())
        self.url, _, self.token = found[0].partition("?token=")
        self.port = int(self.url.rstrip("/").rpartition(":")[2])

    def get(self, path: str, **headers: str) -> Any:
        with urlopen(Request(self.url + path, headers=headers), timeout=LIMIT_S) as answer:
            return answer.read()

    def status(self, path: str, **headers: str) -> int:
        try:
            self.get(path, **headers)
        except HTTPError as error:
            error.close()
            return error.code
        return 200

    def end(self) -> str:
        self.process.send_signal(signal.SIGINT)
        return self.process.communicate(timeout=LIMIT_S)[1]


@pytest.fixture
def dash(folder: Path) -> Iterator[Dash]:
    started = Dash(folder)
    yield started
    if started.process.returncode is None:
        assert "Traceback" not in started.end()


def test_a_save_that_is_written_meanwhile_is_told_and_shown(folder: Path, dash: Dash) -> None:
    with urlopen(dash.url, timeout=LIMIT_S) as index:
        assert b"EventSource" in index.read()
        assert "unsafe" not in index.headers["Content-Security-Policy"]
    with urlopen(dash.url + "changes", timeout=LIMIT_S) as changes:
        assert changes.readline() == b"data: 1\n"
        before = json.loads(dash.get("data"))
        assert [each["step"] for each in before["operations"]] == [1]
        write(folder, 2, slow_s=5.0)
        assert changes.readline() == b"\n"
        assert int(changes.readline().partition(b": ")[2]) > 1
    while (
        len((after := json.loads(dash.get("data")))["operations"]) < 2
        or not after["operations"][1]["remarks"]
    ):
        threading.Event().wait(0.05)
    assert "rank 3" in after["operations"][1]["remarks"][0]
    assert "detail" in after["operations"][1]
    assert "detail" not in after["operations"][0], "hidden parts are sent when they are asked for"
    picture = json.loads(dash.get(f"details/{after['version']}/0"))
    assert picture == before["operations"][0]["detail"]
    assert dash.status(f"details/{after['version'] - 1}/0") == 409
    assert dash.status(f"details/{after['version']}/2") == 409


@pytest.fixture
def one_save_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[live.LiveEvents]:
    """Events of three saves, of which only those of the last fit."""
    monkeypatch.setattr(live, "_LOOK_S", 0.01)
    monkeypatch.setattr(live, "_MOST_EVENTS", 4)
    events = live.LiveEvents([str(folder)], lambda _: None)
    try:
        for step in (2, 3):
            write(folder, step, slow_s=float(step))
            wait_until(lambda n=step: len(events.view.figures) == n, LIMIT_S)  # type: ignore[misc,union-attr]
        yield events
    finally:
        events.close()


def test_old_operations_stay_when_their_events_do_not_fit_any_more(
    one_save_in_memory: live.LiveEvents,
) -> None:
    view = one_save_in_memory.view
    assert view is not None
    shown = view.shown["operations"]
    assert [each["step"] for each in shown] == [1, 2, 3]
    assert [each.get("past", False) for each in shown] == [True, True, False]
    assert "rank 3 (dp 0, tp 3) 2.000 s" in shown[1]["remarks"][0]
    assert shown[1]["phases"][0][:2] == ["write", "4"]
    assert "detail" not in shown[1]
    assert view.figures[:2] == [None, None]
    version = view.version
    assert [answer(one_save_in_memory, f"/details/{version}/{n}") for n in range(4)] == [410, 410, 200, 409]


def answer(events: live.LiveEvents, path: str, query: bytes = b"", token: str | None = None) -> int:
    """Return the status of the answer to a request, as a server passes it to the application."""
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    headers = [(b"host", b"localhost"), (b"cookie", b"reknit_token=\xff%zz; \x00")]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query, "headers": headers}
    asyncio.run(app(events, token, lambda: True)(scope, receive, send))
    return statuses[0]


def test_what_is_no_number_in_a_path_is_a_bad_request(folder: Path) -> None:
    events = live.LiveEvents([str(folder)], lambda _: None)
    events.close()
    assert answer(events, "/details/1/0") == 200
    for wrong in ("9" * 5_000, "9" * 19, "-1", "1.5", "x", "²", "٣", "\0", "%", "a" * 100_000):
        assert answer(events, f"/details/{wrong}/0") == answer(events, f"/details/1/{wrong}") == 400
        assert answer(events, f"/{wrong}") == 404
        query = f"token={wrong}&%ff=%zz".encode() + b"\xff&"
        assert answer(events, "/data", query) == 200
        assert answer(events, "/data", query, token="secret") == 401


def test_it_goes_on_when_events_could_not_be_read_for_a_moment(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "_LOOK_S", 0.01)
    events = live.LiveEvents([str(folder)], lambda _: None)
    try:
        away = folder.rename(folder.with_name("away"))
        wait_until(lambda: "the page may lack events: there is no file or folder" in caplog.text, LIMIT_S)
        away.rename(folder)
        write(folder, 2)
        wait_until(lambda: events.view is not None and len(events.view.figures) == 2, LIMIT_S)
    finally:
        events.close()


def test_a_bad_file_hides_none_after_it_and_the_reader_goes_on_after_any_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "_LOOK_S", 0.01)
    (folder / "00.duckdb").write_bytes(b"not a database" * 1000)
    wrong: list[Exception] = [ValueError("a wrong cost")]

    def costs(_: object) -> None:
        if len(wrong) == 2:
            raise wrong.pop()

    events = live.LiveEvents([str(folder)], costs)
    try:
        assert "00.duckdb cannot be read" in caplog.text
        wrong.append(ValueError("another"))
        write(folder, 2)
        wait_until(lambda: events.view is not None and len(events.view.figures) == 2, LIMIT_S)
        assert not wrong[1:]
        (folder / "0.jsonl").rename(folder / "9.jsonl")
        write(folder, 3)
        wait_until(lambda: events.view is not None and len(events.view.figures) == 3, LIMIT_S)
    finally:
        events.close()


def test_a_page_of_another_site_reads_nothing_and_an_open_one_does_not_keep_it_from_ending(
    dash: Dash,
) -> None:
    assert dash.status("data") == 200
    assert dash.status("data", Host="evil.example") == 400
    packed = dash.get("data", **{"Accept-Encoding": "gzip"})
    assert json.loads(gzip.decompress(packed)) == json.loads(dash.get("data"))
    with urlopen(dash.url, timeout=LIMIT_S) as answer:
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
    with urlopen(dash.url + "changes", timeout=LIMIT_S) as changes:
        assert changes.readline() == b"data: 1\n"
        assert dash.end() == "reknit: interrupted\n"
    assert dash.process.returncode == 130


def test_other_machines_need_the_token(folder: Path) -> None:
    dash = Dash(folder, "--host=0.0.0.0")
    try:
        assert len(dash.token) > 20
        for path in ("", "data", "changes", "details/1/0"):
            assert dash.status(path) == dash.status(f"{path}?token=wrong") == 401
        assert dash.status(f"data?token={dash.token}") == 200
        assert dash.status("data", Cookie=f"reknit_token_{dash.port}={dash.token}") == 200
        with urlopen(f"{dash.url}?token={dash.token}", timeout=LIMIT_S) as answer:
            assert f"reknit_token_{dash.port}={dash.token}; HttpOnly" in answer.headers["Set-Cookie"]
    finally:
        assert "Traceback" not in dash.end()


def test_another_address_of_this_machine_is_served(folder: Path) -> None:
    dash = Dash(folder, "--host=127.0.0.2")
    try:
        assert dash.status("data") == 200
        assert dash.status("data", Host="evil.example") == 400
    finally:
        assert "Traceback" not in dash.end()


@pytest.fixture
def served(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server that has little patience and few connections."""
    monkeypatch.setattr(web, "HEAD_S", 0.2)
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 3)
    events = live.LiveEvents([str(folder)], lambda _: None)
    with web.listen("127.0.0.1", 0) as bound:
        port: int = bound.getsockname()[1]
        serving = web.server(events, None)
        thread = threading.Thread(target=serving.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield port
        finally:
            serving.should_exit = True
            thread.join(LIMIT_S)
            events.close()


def test_a_connection_without_a_request_ends(served: int) -> None:
    for begun in (b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: "):
        with socket.create_connection(("127.0.0.1", served), LIMIT_S) as waiting, suppress(ConnectionError):
            waiting.sendall(begun)
            assert waiting.recv(1) == b""
    with urlopen(f"http://127.0.0.1:{served}/changes", timeout=LIMIT_S) as changes:
        for _ in range(2):  # a stream goes on
            threading.Event().wait(0.3)
        assert changes.readline() == b"data: 1\n"


def test_only_so_many_connections_are_served(served: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HEAD_S", LIMIT_S)
    with ExitStack() as opened:
        held = [
            opened.enter_context(socket.create_connection(("127.0.0.1", served), LIMIT_S)) for _ in range(6)
        ]
        for refused in held[3:]:
            with suppress(ConnectionError):
                assert refused.recv(1) == b""


def test_wrong_arguments_say_what_is_wrong(folder: Path) -> None:
    from reknit.cli import dash
    from reknit.cli.main import parser

    for argument, text in (
        ("nowhere", "no file or folder nowhere"),
        ("--host=203.0.113.7", "cannot listen on 203.0.113.7"),
    ):
        with pytest.raises(UsageError, match=text):
            dash.run(parser().parse_args(["dash", str(folder), argument]))


def looks_wrong(tab: Any) -> list[str]:
    """Return the elements that are wider than the window, and the texts that are hard to read.

    The policy of the page keeps a browser from evaluating a condition by itself, so a test asks again.
    """
    return sticking_out(tab) + bad_contrasts(tab)


@at_night("the next test has a page that goes on to a save")
def test_a_browser_goes_on_to_the_newest_save_and_stays_at_a_chosen_one(
    folder: Path, dash: Dash, browser: Any
) -> None:
    tab = browser.new_page()
    tab.set_default_timeout(1000 * LIMIT_S)
    errors: list[str] = []
    tab.on("pageerror", lambda error: errors.append(str(error)))
    tab.goto(dash.url)
    tab.get_by_text("live").wait_for()
    headline, remarks = tab.locator("#headline"), tab.locator("#remarks")
    tab.get_by_text("save run/1 (step 1): saved", exact=True).wait_for()
    for scheme, width in product(("dark", "light"), (390, 1280)):
        tab.emulate_media(color_scheme=scheme)
        tab.set_viewport_size({"width": width, "height": 900})
        end = time.monotonic() + LIMIT_S
        while (found := looks_wrong(tab)) and time.monotonic() < end:
            tab.wait_for_timeout(50)  # colours and charts follow one after another
        assert not found, (scheme, width)
    write(folder, 2, slow_s=5.0)
    remarks.get_by_text("rank 3 (dp 0, tp 3) 5.000 s").wait_for()
    tab.get_by_label("Save or load").select_option("0")
    tab.get_by_text("save run/1 (step 1): saved", exact=True).wait_for()
    write(folder, 3)
    tab.locator("#history td", has_text="save run/3 (step 3)").wait_for(state="attached")
    assert "run/1" in headline.text_content()

    # By keys alone: from the select box on to the timeline and the heat map, and from rank to rank.
    tab.get_by_label("Save or load").press("End")
    tab.get_by_text("save run/3 (step 3): saved", exact=True).wait_for()
    reached = []
    while "heat" not in reached:
        tab.keyboard.press("Tab")
        reached.append(tab.evaluate("document.activeElement.id"))
    assert reached == ["rows", "out", "in", "whole", "time", "lane", "columns", "heat"]
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowUp"):
        tab.keyboard.press(key)
    assert tab.locator("#tip").text_content().startswith("rank 1 (dp 0, tp 1) on host0: 1 s")
    assert errors == []
    tab.close()


def test_a_page_without_events_says_so_and_shows_the_first_save(tmp_path: Path, browser: Any) -> None:
    dash = Dash(tmp_path)
    try:
        assert dash.status("data") == 404
        tab = browser.new_page()
        tab.set_default_timeout(1000 * LIMIT_S)
        tab.goto(dash.url)
        tab.get_by_text("There are no events of saves or loads yet.").wait_for()
        assert not any(tab.locator(place).is_visible() for place in ("#steps", "#history", "#time"))
        write(tmp_path, 1)
        tab.get_by_text("save run/1 (step 1): saved", exact=True).wait_for()
        assert tab.locator("#steps").is_visible()
        tab.close()
    finally:
        dash.end()


@at_night("test_pages_in_browser.py looks at the same pictures")
def test_each_axis_has_room_for_its_longest_label(folder: Path, dash: Dash, browser: Any) -> None:
    tab = browser.new_page()
    tab.set_default_timeout(1000 * LIMIT_S)
    tab.goto(dash.url)
    tab.get_by_text("save run/1 (step 1): saved", exact=True).wait_for()
    narrow = tab.evaluate(
        """() => [...charts.values()].flatMap((made) => made.axes.filter((axis) => axis.side % 2 === 1)
        .flatMap((axis) => {
          made.ctx.font = axis.font[0];
          const free = (axis._size - axis.ticks.size - axis.gap) * devicePixelRatio;
          return axis._values.filter((text) => made.ctx.measureText(text).width > free);
        }))"""
    )
    assert narrow == []
    tab.close()
