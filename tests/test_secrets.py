"""Passwords and tokens in URLs: no error, text of an object, line of the log or event shows them."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import reknit
from reknit.errors import ReknitError, from_wire, without_secrets
from reknit.events.phase import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STATE: dict[str, Any] = {"model": {"w": np.zeros(3)}}
SECRET = "s3cr3t"
IN_S3 = f"s3://bucket/run?endpoint=http://user:{SECRET}@127.0.0.1:9&retry_s=0"


def test_a_text_for_people_has_the_urls_without_their_secrets() -> None:
    cases: list[tuple[str, str]] = [
        ("http://user:pw@host/x", "http://user:***@host/x"),
        ("at https://token@host/x, and", "at https://***@host/x, and"),
        (
            "s3://b/x?endpoint=http://u:p&w@host:9&retry_s=0",
            "s3://b/x?endpoint=http://u:***@host:9&retry_s=0",
        ),
        ("'http://u:8080@host'", "'http://u:***@host'"),
        ("http://u:a/b@host", "http://u:***@host"),
        ("http://u:a@b@host/c", "http://u:***@host/c"),
        ("http://u:a@host/b@c", "http://u:***@host/b@c"),
        ("https://x.blob/c?sv=1&sig=abc%3D&se=2", "https://x.blob/c?sv=1&sig=***&se=2"),
        ("tcp://host:1?token=abc", "tcp://host:1?token=***"),
        ("http://host/?user=u&password=p q", "http://host/?user=u&password=*** q"),
        *(
            (same, same)
            for same in (
                "http://host:8080/a@b",
                "http://[::1]:80/x",
                "gs://bucket/path:with@signs",
                "hdfs://user@host:9/x",
                "abfs://container@account/x",
                "'http://h:80' and 'a@b'",
                "monkey=1 and key=2",
                "s3://b/x?part_mib=8",
            )
        ),
    ]
    for text, shown in cases:
        assert without_secrets(text) == shown


def test_an_error_has_no_secrets() -> None:
    cases: list[Callable[[], object]] = [
        lambda: reknit.latest(IN_S3 + "&other=1"),
        lambda: reknit.latest(f"none://user:{SECRET}@host/x"),
        lambda: reknit.latest(f"az://container/x?sig={SECRET}"),
        lambda: reknit.SaveOptions(events=f"http://user:{SECRET}@host/x"),
        lambda: reknit.connect(0, 2, at=f"tcp://user:{SECRET}@127.0.0.1:9", job="j", token="x" * 40),
        lambda: reknit.Tier(IN_S3, bytes_per_s=-1.0),
        lambda: reknit.save("/x", STATE, overwrit=f"http://user:{SECRET}@host"),  # type: ignore[call-arg]
    ]
    for call in cases:
        with pytest.raises(ReknitError) as caught:
            call()
        for error in (caught.value, from_wire(caught.value.to_wire())):
            assert SECRET not in f"{error!r} {error}", call


def test_the_path_of_an_error_is_whole_and_its_text_is_not() -> None:
    error = reknit.StorageError("cannot read", path=f"ftp://user:{SECRET}@host/x")
    assert SECRET in (error.path or "")
    assert SECRET not in str(error)


def test_the_text_of_an_object_has_no_secrets() -> None:
    options = reknit.SaveOptions(promote_to=IN_S3, events=())
    assert options.promote_to == IN_S3
    for each in (
        options,
        reknit.LoadOptions(replicas=(IN_S3,)),
        reknit.Tier(IN_S3),
        reknit.options.PromotionTarget(IN_S3),
    ):
        assert SECRET not in repr(each)
        assert "s3://bucket/run" in repr(each)


def test_the_text_of_a_run_has_no_secrets() -> None:
    with reknit.Checkpointer(IN_S3) as run:
        assert SECRET not in f"{run!r} {run._repr_html_()}"
        assert "s3://bucket/run" in repr(run)


def test_a_line_of_the_log_and_an_event_have_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("reknit").warning("%s: list is tried again", f"hdfs://user:{SECRET}@host:9/x")
    logging.getLogger("reknit").warning("%d of %s", 5, "a path")
    assert caplog.messages == ["hdfs://user:***@host:9/x: list is tried again", "5 of a path"]
    assert caplog.records[1].args == (5, "a path")
    recorder = Recorder("save", path=f"ftp://user:{SECRET}@host/x")
    with recorder.phase("write"):
        pass
    assert recorder.records[0].path == "ftp://user:***@host/x"


class Printing(logging.Handler):
    """Keeps the text of each line, with its traceback, as a stream would show it."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.failed: list[object] = []

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.lines.append(self.format(record))
        except Exception:
            self.failed.append((record.msg, record.args))


@pytest.fixture
def printing() -> Iterator[Printing]:
    handler, loggers = Printing(), [logging.getLogger(name) for name in LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler
    for logger in loggers:
        logger.removeHandler(handler)


SOURCE = Path(reknit.__file__).parent
LOGGERS = sorted(
    {
        name
        for path in SOURCE.rglob("*.py")
        for name in re.findall(r'getLogger\("(reknit[^"]*)"\)', path.read_text())
    }
)


@pytest.mark.parametrize("name", LOGGERS)
def test_no_logger_shows_secrets_of_lines_tracebacks_and_stacks(name: str, printing: Printing) -> None:
    logger, url = logging.getLogger(name), f"ftp://user:{SECRET}@host/x"
    logger.propagate, before = False, logger.propagate
    try:
        try:
            raise OSError(url) from ValueError(f"of {url}")
        except OSError as error:
            logger.exception("a look failed")
            logger.warning("%s", "again", exc_info=error)
        exec(f"logger.warning('%s', 'here', stack_info='{url}')", {"logger": logger})
        try:
            raise OSError("no secret")
        except OSError:
            logger.exception("as it is")
    finally:
        logger.propagate = before
    assert [line.partition("\n")[0] for line in printing.lines] == [
        "a look failed",
        "again",
        "here",
        "as it is",
    ]
    assert not any(SECRET in line for line in printing.lines)
    assert all("OSError: ftp://user:***@host/x" in line for line in printing.lines[:2])
    assert "OSError: no secret" in printing.lines[3]


def test_a_wrong_line_of_the_log_raises_nothing_and_shows_no_secrets(printing: Printing) -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    logger, odd = logging.getLogger("reknit"), Odd()
    logger.propagate = False  # the handler of pytest raises
    try:
        logger.warning("%d of %s", f"http://user:{SECRET}@host")
        logger.warning("%s at %s", odd, f"http://user:{SECRET}@host")
    finally:
        logger.propagate = True
    assert printing.lines == []
    shown = "http://user:***@host"
    assert printing.failed == [("%d of %s", (shown,)), ("%s at %s", (odd, shown))]


def test_a_long_text_with_many_beginnings_of_a_secret_is_searched_once() -> None:
    for text in ("s3://x &" + "key" * 200_000, "s3://x ?" + "token-" * 100_000, "http://" * 50_000):
        assert without_secrets(text) == text
