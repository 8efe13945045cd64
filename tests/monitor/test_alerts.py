"""Alerts: their rules, the limit on their number, and channels that are slow or fail."""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import threading
from base64 import b64encode
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.alerts import (
    Alert,
    Alerts,
    CoolingBehind,
    Failures,
    GroupedAlert,
    Log,
    LongSave,
    NoCommit,
    Retries,
    SlowWrite,
    StorageFull,
    Stragglers,
    Webhook,
)
from reknit.errors import ShortageError
from reknit.monitor.alerts import alert_sink
from reknit.monitor.alerts.alert_groups import AlertGroups
from reknit.monitor.sinks.jsonl import JsonLines
from tests.faults.nursery import wait_until
from tests.monitor.records import BEGIN, operation, phase
from tests.monitor.test_outlet import ends

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from reknit.monitor.alerts.alert_rule import AlertRule
    from reknit.monitor.records import PhaseRecord, Record

WAIT_S = 60.0


class Clock:
    def __init__(self) -> None:
        self.now = BEGIN

    def __call__(self) -> float:
        return self.now


class Desk:
    """Alerts with a clock that is set by hand, and the alerts that they sent."""

    def __init__(self, *rules: AlertRule, **more: Any) -> None:
        self.clock = Clock()
        self.reported: list[GroupedAlert] = []
        known: dict[str, Any] = {"wait_s": 0, "cool_off_s": 1000, "every_s": 1e6, "clock": self.clock}
        if rules:
            known["rules"] = rules
        self.alerts = Alerts(more.pop("to", [self.reported.append]), **(known | more))

    def see(self, *records: Record) -> list[str]:
        """Return the alerts about records."""
        before = len(self.reported)
        self.alerts.take(records)
        self.alerts.look()
        self.alerts.flush(WAIT_S)
        return [str(one) for one in self.reported[before:]]


# Rules


def test_a_failure_is_told_with_place_and_phase() -> None:
    desk = Desk(Failures())
    assert desk.see(phase("write", outcome="StorageFullError")) == [
        "failures: save run/step_7 failed in write on rank 0, dp 1, tp 0 on host0: StorageFullError"
    ]
    assert desk.see(phase("write")) == []


def test_a_failure_is_told_with_its_remedy() -> None:
    desk = Desk(Failures())
    (reported,) = desk.see(phase("write", outcome="StorageFullError", detail="make room"))
    assert reported.endswith(": StorageFullError -> make room")


def cooling(action: str, step: int, **more: Any) -> PhaseRecord:
    return phase(action, action=action, step=step, path=f"run/{step}", **({"started": BEGIN} | more))


def test_old_steps_that_wait_to_move_are_told_when_they_are_many_or_have_waited_long() -> None:
    desk = Desk(CoolingBehind(steps=3, within_s=100))
    assert desk.see(cooling("cool_due", 1), cooling("cool_due", 2)) == []
    assert desk.see(cooling("cool", 1), cooling("cool_due", 3)) == []
    assert desk.see(cooling("cool", 2, outcome="StorageError"), cooling("drop", 2)) == []
    (reported,) = desk.see(cooling("cool_due", 4))
    assert reported == "cool-down behind: 3 steps wait to move to the cold store, run/2 for 0 s"
    desk.clock.now += 2000
    assert desk.see(cooling("cool_due", 5)) == [], "once until none waits"
    gone = [cooling("remove", 2), cooling("save", 3), cooling("cool", 4), cooling("cool", 5)]
    assert desk.see(*gone) == []
    assert desk.see(cooling("cool_due", 6, started=desk.clock.now)) == []
    desk.clock.now += 101
    (reported,) = desk.see()
    assert reported == "cool-down behind: 1 steps wait to move to the cold store, run/6 for 101 s"


def test_retries_are_told_when_there_are_many_in_a_short_time() -> None:
    desk = Desk(Retries(number=5, within_s=10))
    assert desk.see(*(operation("write", retries=1, started=BEGIN + 20 * n) for n in range(10))) == []
    reported = desk.see(*(operation("write", retries=2, started=BEGIN + 1000 + n) for n in range(3)))
    assert reported == ["retries: s3://bucket: 6 retries within 10 s, the last by rank 0 on host0"]


def test_a_slow_write_is_told_unless_it_was_short() -> None:
    desk = Desk(SlowWrite(mib_per_s=100, least_s=5))
    long = {"started": BEGIN, "ended": BEGIN + 10, "seconds": 40}
    assert desk.see(phase("write", nbytes=2000 << 20, **long)) == []
    assert desk.see(phase("write", nbytes=1 << 20, started=BEGIN, ended=BEGIN + 1)) == []
    assert desk.see(phase("write", nbytes=500 << 20, **long)) == [
        "slow write: rank 0, dp 1, tp 0 on host0 wrote to run/step_7 at 50 MiB/s"
    ]


def test_saves_that_take_longer_than_the_time_between_them_are_told() -> None:
    desk = Desk(LongSave())
    ends = [phase("save", started=BEGIN + 100 * n, ended=BEGIN + 100 * n + 90, seconds=90) for n in range(3)]
    assert desk.see(*ends) == []
    late = phase("save", started=BEGIN + 300, ended=BEGIN + 420, seconds=120)
    assert desk.see(late) == ["long save: the save to run/step_7 took 120 s; saves begin every 100 s"]
    desk = Desk(LongSave(longest_s=60))
    assert desk.see(ends[0]) == ["long save: the save to run/step_7 took 90 s, more than 60 s"]


def test_a_full_store_is_told_and_one_that_is_almost_full(tmp_path: Path) -> None:
    desk = Desk(StorageFull())
    assert desk.see(operation("write", outcome="StorageFullError")) == [
        "storage full: s3://bucket is full, says rank 0 on host0: run/step_7"
    ]
    desk = Desk(StorageFull(free_share=0.999999999))
    local = operation("write", store="file", path=str(tmp_path / "not" / "there"))
    (reported,) = desk.see(local)
    assert reported.startswith(f"storage full: {tmp_path} has ")
    assert desk.see(local) == [], "as long as it stays so"
    assert Desk(StorageFull(free_share=1e-12)).see(local) == []


def test_no_commit_for_long_is_told_once_until_there_is_one() -> None:
    desk = Desk(NoCommit(within_s=100), cool_off_s=0)
    assert desk.see(phase("collect", started=BEGIN)) == []
    desk.clock.now = BEGIN + 101
    assert desk.see() == ["no commit: nothing was committed for 101 s; no save has ended well yet"]
    assert desk.see() == []
    assert desk.see(phase("save", ended=BEGIN + 102)) == []
    assert desk.see(phase("save", ended=BEGIN + 103, outcome="CommitError")) == []
    desk.clock.now = BEGIN + 203
    assert desk.see() == ["no commit: nothing was committed for 101 s; the last was run/step_7"]


def test_a_straggler_among_all_ranks_is_told_from_their_folder(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    old = JsonLines(folder / "old.jsonl")
    old.take([phase("write", outcome="FromBefore")])
    desk = Desk(Failures(), Stragglers(), folder=folder)
    for rank in range(16):
        seconds = 30.0 if rank == 13 else 10.0
        sink = JsonLines(folder / f"{rank}.jsonl")
        for name in ("stage", "write", "commit"):
            took = 30.0 if name == "commit" else seconds if name == "write" else 1.0
            sink.take([phase(name, rank=rank, seconds=took, started=BEGIN, ended=BEGIN + took, step=1)])
    with (folder / "13.jsonl").open("ab") as file:
        file.write(b'{"phase": "torn')
    assert desk.see() == [
        "stragglers: rank 13, dp 1, tp 0 on host0 took 30 s for write of save run/step_7, "
        "the median rank 10 s"
    ]
    assert desk.see() == []
    assert desk.see(phase("write", outcome="Own")) == [], "it comes through the folder"


def test_a_torn_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    desk = Desk(Failures(), folder=tmp_path)
    JsonLines(tmp_path / "whole.jsonl").take([phase("write", outcome="KeyError")])
    line = (tmp_path / "whole.jsonl").read_bytes()
    (tmp_path / "whole.jsonl").unlink()
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(line[:20])
    assert desk.see() == []
    torn.write_bytes(line)
    assert len(desk.see()) == 1


def failed(number: int) -> PhaseRecord:
    return phase("write", outcome=f"Error{number}")


def reported_errors(desk: Desk) -> list[str]:
    return [text.rpartition(": ")[2] for text in desk.see()]


@pytest.mark.parametrize("change", ["renamed", "renamed within", "cut", "replaced", "removed"])
def test_a_file_that_is_rotated_or_written_anew_is_read(change: str, tmp_path: Path) -> None:
    desk, file = Desk(Failures(), folder=tmp_path), tmp_path / "events.jsonl"
    JsonLines(file).take([failed(number) for number in range(20)])
    assert len(reported_errors(desk)) == 20
    if change == "renamed":
        file.rename(tmp_path / "events.jsonl.1")
    elif change == "renamed within":
        JsonLines(file).take([failed(50)])
        file.rename(tmp_path / "events.1.jsonl")
    elif change == "cut":
        file.write_bytes(b"")
    elif change == "replaced":
        JsonLines(tmp_path / "new.tmp").take([failed(60 + number) for number in range(20)])
        (tmp_path / "new.tmp").replace(file)
    else:
        file.unlink()
    JsonLines(file).take([failed(99)])
    late = {"renamed within": ["Error50"], "replaced": [f"Error{60 + number}" for number in range(20)]}
    assert sorted(reported_errors(desk)) == [*late.get(change, []), "Error99"]
    assert reported_errors(desk) == []


def test_a_file_that_is_written_anew_in_place_is_read_from_its_start(tmp_path: Path) -> None:
    desk, file = Desk(Failures(), folder=tmp_path), tmp_path / "events.jsonl"
    JsonLines(file).take([failed(1)])
    assert reported_errors(desk) == ["Error1"]
    file.write_bytes(b"")
    JsonLines(file).take([phase("write", outcome="Another", started=BEGIN + 9), failed(2), failed(3)])
    assert len(reported_errors(desk)) == 3


def test_bad_files_in_the_folder_silence_no_alert(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").mkdir()
    (tmp_path / "d.jsonl").write_bytes(b'\xff\n{"phase": 3}\n[[[[\n\n{"operation":"x"}\n')
    (tmp_path / "e.jsonl").symlink_to("e.jsonl")
    desk = Desk(Failures(), folder=tmp_path)
    JsonLines(tmp_path / "f.jsonl").take([failed(1)])
    seen: list[str] = []
    assert ends(lambda: seen.extend(reported_errors(desk)))
    assert seen == ["Error1"]


class BrokenRule:
    """A rule of a user that fails with each record and at each look."""

    def watch(self) -> BrokenRule:
        return self

    def see(self, record: Record) -> list[Alert]:
        raise KeyError(record)

    def tick(self, now_s: float) -> list[Alert]:
        raise SystemExit(1)


def test_a_rule_that_fails_silences_no_other_rule(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(BrokenRule(), Failures())
    for _ in range(3):
        assert len(desk.see(phase("write", outcome="StorageError"))) <= 1
    assert len(desk.reported) == 1
    assert caplog.text.count("a rule fails: BrokenRule") == 1


def test_alerts_begin_later_where_no_thread_could_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[GroupedAlert] = []
    alerts = Alerts([reported.append], rules=[Failures()], wait_s=0, every_s=0.01)

    def refuse(*_: object) -> None:
        raise ShortageError("no further thread")

    with monkeypatch.context() as without_threads:
        without_threads.setattr(alert_sink, "start_thread", refuse)
        with pytest.raises(ShortageError):
            alerts.take([failed(1)])
    alerts.take([failed(2)])
    wait_until(lambda: len(reported) == 1, WAIT_S)


# No storms


def test_alerts_of_one_kind_are_one_and_then_wait() -> None:
    desk = Desk(Failures(), wait_s=10, cool_off_s=100)
    failure = phase("write", outcome="StorageError")
    assert desk.see(*[failure] * 500) == []
    desk.clock.now += 11
    (reported,) = desk.see(phase("commit", outcome="CommitError"))
    assert reported.endswith("StorageError (500 of the kind)")
    desk.clock.now += 50
    (reported,) = desk.see(failure, failure)
    assert "CommitError" in reported, "another kind has its own time"
    desk.clock.now += 51
    assert desk.see() == [
        "failures: save run/step_7 failed in write on rank 0, dp 1, tp 0 on host0: StorageError "
        "(2 of the kind)"
    ]
    desk.clock.now += 500
    assert desk.see() == []


def test_many_kinds_stay_within_bounds() -> None:
    groups = AlertGroups(wait_s=0, cool_off_s=1000)
    for number in range(5000):
        groups.add(Alert("failures", f"{number}", "text"), BEGIN)
    reported = groups.take_due(BEGIN)
    assert len(reported) == 1001
    assert sum(one.number for one in reported) == 5000
    assert groups.take_due(BEGIN + 2000) == []


def test_only_rank_0_tells() -> None:
    desk = Desk(Failures())
    assert desk.see(phase("write", rank=1, outcome="StorageError")) == []


def test_the_usual_rules_find_nothing_in_a_save_that_goes_well(tmp_path: Path) -> None:
    desk = Desk(rules=(Failures(), Retries(), SlowWrite(), Stragglers(), LongSave(), NoCommit(1e6)))
    usual = Desk()
    for step in range(3):
        options = reknit.SaveOptions(events=[desk.alerts, usual.alerts])
        reknit.save(tmp_path / f"{step}", {"x": np.ones(1000)}, step=step, options=options)
    desk.alerts.look()
    desk.alerts.flush(WAIT_S)
    assert desk.reported == []
    assert [one for one in usual.reported if one.alert.rule not in ("storage full", "long save")] == []


# Channels


class Hook(BaseHTTPRequestHandler):
    """A server that keeps posted data, or hangs."""

    got: list[dict[str, Any]]
    free: threading.Event

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.free.wait(WAIT_S):
            return
        self.got.append({**json.loads(body), "token": self.headers["Authorization"]})
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class ThreadedServer(socketserver.ThreadingMixIn, HTTPServer):
    daemon_threads = True


@pytest.fixture
def hook() -> Iterator[tuple[str, type[Hook]]]:
    handler: Any = type("OwnHook", (Hook,), {"got": [], "free": threading.Event()})
    handler.free.set()
    with ThreadedServer(("127.0.0.1", 0), handler) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}/hook", handler
        handler.free.set()
        served.shutdown()
        thread.join()


def test_a_webhook_gets_what_people_and_programs_read(hook: tuple[str, type[Hook]]) -> None:
    url, handler = hook
    desk = Desk(Failures(), to=[Webhook(url, {"Authorization": "token"})])
    desk.see(phase("write", outcome="StorageError"))
    (got,) = handler.got
    assert got["text"].startswith("failures: save run/step_7 failed")
    assert got["token"] == "token"
    assert (got["alerts"][0]["rank"], got["alerts"][0]["step"], got["alerts"][0]["number"]) == (0, 7, 1)


def test_a_webhook_that_hangs_delays_no_save_and_no_other_way(
    hook: tuple[str, type[Hook]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, handler = hook
    handler.free.clear()
    reported: list[GroupedAlert] = []
    alerts = Alerts(
        [Webhook(url, timeout_s=WAIT_S), reported.append],
        rules=[Failures()],
        wait_s=0,
        cool_off_s=0,
        every_s=0.01,
    )
    options = reknit.SaveOptions(events=alerts)
    reknit.save(tmp_path / "x", {"x": np.ones(10)}, options=options)
    for number in range(3):
        with pytest.raises(reknit.CheckpointExistsError):
            reknit.save(tmp_path / "x", {"x": np.ones(10)}, options=options)
        wait_until(lambda least=number: len(reported) > least, WAIT_S)  # type: ignore[misc]
    assert handler.got == []
    for n in range(500):
        alerts.take([phase("write", outcome=f"Error{n}")])
    wait_until(lambda: "alerts to Webhook(127.0.0.1): it does not keep up" in caplog.text, WAIT_S)
    handler.free.set()
    wait_until(lambda: bool(handler.got), WAIT_S)
    alerts.flush(WAIT_S)  # else it reports in the midst of the next test which alerts could not be sent


def test_a_server_that_is_gone_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://user:secret@localhost:{taken.getsockname()[1]}/secret"
        desk = Desk(Failures(), to=[Webhook(url)], cool_off_s=0)
        for _ in range(3):
            desk.see(phase("write", outcome="StorageError"))
    assert caplog.text.count("alerts to Webhook(localhost)") == 1
    assert "secret" not in caplog.text


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_webhook_that_redirects_is_a_failure_and_no_credentials_go_elsewhere(status: int) -> None:
    got: list[tuple[str, str | None]] = []

    class Redirecting(Hook):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            got.append(("POST", self.headers["Authorization"]))
            self.send_response(status)
            self.send_header("Location", f"http://localhost:{self.server.server_port}/other")  # type: ignore[attr-defined]
            self.end_headers()

        def do_GET(self) -> None:
            got.append(("GET", self.headers["Authorization"]))
            self.send_response(200)
            self.end_headers()

    with ThreadedServer(("127.0.0.1", 0), Redirecting) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        hook = Webhook(f"http://127.0.0.1:{served.server_port}/hook", {"Authorization": "token"})
        with pytest.raises(reknit.StorageError, match="redirects"):
            hook.take([GroupedAlert(Alert("failures", "", "text"), 1)])
        served.shutdown()
        thread.join()
    assert got == [("POST", "token")]


def test_a_user_and_a_password_in_the_url_of_a_webhook_identify_it() -> None:
    got: list[tuple[str | None, str]] = []

    class Identifying(Hook):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.headers["Authorization"], self.path))
            self.send_response(200)
            self.end_headers()

    with ThreadedServer(("127.0.0.1", 0), Identifying) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        hook = Webhook(f"http://user:p%40ss@127.0.0.1:{served.server_port}/hook?x=1")
        hook.take([GroupedAlert(Alert("failures", "", "text"), 1)])
        served.shutdown()
        thread.join()
    assert got == [(f"Basic {b64encode(b'user:p@ss').decode()}", "/hook?x=1")]


def test_a_webhook_that_answers_slowly_is_left_after_its_time() -> None:
    over = threading.Event()

    class Dripping(Hook):
        def do_POST(self) -> None:
            with suppress(OSError):
                for letter in b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000:
                    self.wfile.write(bytes([letter]))
                    if over.wait(0.01):
                        return

    with ThreadedServer(("127.0.0.1", 0), Dripping) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        hook = Webhook(f"http://127.0.0.1:{served.server_port}/", timeout_s=0.3)
        try:
            with pytest.raises(TimeoutError, match="no answer within"):
                hook.take([GroupedAlert(Alert("failures", "", "text"), 1)])
        finally:
            over.set()
            served.shutdown()
            thread.join()


@pytest.mark.parametrize(
    "hook",
    [
        Webhook("http://127.0.0.1:9/secret hook"),
        Webhook("http://127.0.0.1:secret/hook"),
        Webhook("http://user:secret@127.0.0.1:9/hook"),
        Webhook("http://secret@127.0.0.1:9/hook"),
        Webhook("http://127.0.0.1:9/", {"Authorization": "Bearer secret\n"}),
    ],
)
def test_an_address_or_a_header_that_is_not_valid_stays_secret(
    hook: Webhook, caplog: pytest.LogCaptureFixture
) -> None:
    Desk(Failures(), to=[hook]).see(phase("write", outcome="StorageError"))
    assert "events are lost: alerts to Webhook" in caplog.text
    assert "secret" not in caplog.text


def test_the_log_has_no_control_characters(caplog: pytest.LogCaptureFixture) -> None:
    Desk(Failures(), to=[]).see(phase("write", path="x\x1b]0;title\x07", outcome="StorageError"))
    assert "\x1b" not in caplog.text
    assert "x\\x1b]0;title" in caplog.text


def test_a_function_gets_each_alert_and_one_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    reported: list[GroupedAlert] = []

    def page(alert: GroupedAlert) -> None:
        raise OSError(f"nobody answers: {alert.alert.rule}")

    desk = Desk(Failures(), to=[reported.append, page])
    desk.see(phase("write", outcome="StorageError"), phase("write", outcome="KeyError"))
    assert [str(one)[:9] for one in reported] == ["failures:"] * 2
    assert "OSError: nobody answers: failures" in caplog.text


def test_the_log_is_where_alerts_go_unless_told_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    Desk(Failures(), to=[]).see(phase("write", outcome="StorageError"))
    (record,) = (one for one in caplog.records if "failed in write" in one.getMessage())
    assert (record.levelno, record.name) == (logging.WARNING, "reknit")


def test_it_looks_by_itself_from_time_to_time() -> None:
    reported: list[GroupedAlert] = []
    alerts = Alerts([reported.append], rules=[Failures()], wait_s=0, every_s=0.001)
    alerts.take([phase("write", outcome="StorageError")])
    wait_until(lambda: len(reported) == 1, WAIT_S)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Alerts(rules=[3]),  # type: ignore[list-item]
        lambda: Alerts([3]),
        lambda: Alerts(every_s=0),
        lambda: Webhook("file:///etc/passwd"),
        lambda: SlowWrite(mib_per_s=0),
        lambda: Retries(number=-1),
        lambda: StorageFull(free_share=2),
        lambda: NoCommit(within_s=float("nan")),
        lambda: LongSave(longest_s=True),
        lambda: Stragglers(ratio="2"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_refused(make: Any) -> None:
    with pytest.raises(reknit.UsageError):
        make()


def test_log_is_a_way() -> None:
    assert isinstance(Log(), reknit.sinks.Sink)
