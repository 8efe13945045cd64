"""Notices of cloud providers, from servers that answer as their metadata services do."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any

import pytest

import reknit
from reknit.errors import UsageError
from reknit.policies import every, on_preemption
from reknit.runs import preemption
from reknit.runs.preemption import CloudNotices
from tests.faults.nursery import wait_until
from tests.storage.local_server import LocalServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 60.0
ACTION = json.dumps({"action": "terminate", "time": "2026-11-22T08:22:00Z"})


def azure(kind: str, *resources: str) -> str:
    event = {"EventType": kind, "Resources": resources, "NotBefore": "Mon, 23 Nov 2026 18:29:47 GMT"}
    return json.dumps({"DocumentIncarnation": 1, "Events": [event]})


class Service(LocalServer):
    """A metadata service: `answers` by path; requests without the header that it wants are refused."""

    def __init__(self, header: tuple[str, str]) -> None:
        self.answers: dict[str, str | int] = {}
        self.asked: list[str] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                service.asked.append(self.path)
                answer = service.answers.get(self.path.partition("?")[0], 404)
                if self.headers.get(header[0]) != header[1]:
                    answer = 401
                self.send_response(answer if isinstance(answer, int) else 200)
                self.end_headers()
                if isinstance(answer, str):
                    self.wfile.write(answer.encode())

            def do_PUT(self) -> None:
                assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"token")

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        super().__init__(Handler)


HEADERS = {
    "aws": ("X-aws-ec2-metadata-token", "token"),
    "gcp": ("Metadata-Flavor", "Google"),
    "azure": ("Metadata", "true"),
}


@pytest.fixture
def service(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    monkeypatch.setattr(preemption, "POLL_S", 0.01)
    with Service(HEADERS[request.param]) as made:
        monkeypatch.setitem(preemption.SERVICES, request.param, made.address)
        yield made


GCP, AZURE = "/computeMetadata/v1/instance", "/metadata/scheduledevents"
AWS = "/latest/meta-data/spot/instance-action"


@pytest.mark.parametrize(
    ("service", "before", "after", "reported"),
    [
        ("aws", {}, {AWS: ACTION}, "a notice of AWS: terminate at 2026-11-22T08:22:00Z"),
        ("gcp", {f"{GCP}/preempted": "FALSE"}, {f"{GCP}/preempted": "TRUE"}, "Google Cloud: preempted"),
        (
            "gcp",
            {f"{GCP}/maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"},
            {f"{GCP}/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"},
            "Google Cloud: TERMINATE_ON_HOST_MAINTENANCE",
        ),
        (
            "azure",
            {AZURE: azure("Freeze", "me")},
            {AZURE: azure("Preempt", "me")},
            "Azure: Preempt at Mon, 23",
        ),
        ("azure", {AZURE: azure("Preempt", "you")}, {AZURE: azure("Reboot", "you", "me")}, "Azure: Reboot"),
    ],
    indirect=["service"],
)
def test_a_notice_is_seen_when_it_comes_and_not_before(
    service: Service,
    before: dict[str, str],
    after: dict[str, str],
    reported: str,
    request: pytest.FixtureRequest,
) -> None:
    service.answers.update({"/metadata/instance/compute/name": "me"}, **before)
    provider = request.node.callspec.params["service"]
    notices = CloudNotices(provider)
    try:
        wait_until(lambda: len(service.asked) > 6, LIMIT_S)
        assert notices.seen is None
        service.answers |= after
        wait_until(lambda: notices.seen is not None, LIMIT_S)
        assert reported in str(notices.seen)
    finally:
        notices.close()


@pytest.mark.parametrize("service", ["gcp"], indirect=True)
def test_a_service_that_fails_is_told_of_once_and_asked_again(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.answers = {f"{GCP}/preempted": 500}
    notices = CloudNotices("gcp")
    try:
        wait_until(lambda: len(service.asked) > 4, LIMIT_S)
        service.answers = {f"{GCP}/preempted": "TRUE"}
        wait_until(lambda: notices.seen is not None, LIMIT_S)
    finally:
        notices.close()
    (record,) = caplog.records
    assert "the metadata service of gcp gives no notices: HTTP Error 500" in record.getMessage()


@pytest.mark.parametrize("service", ["aws"], indirect=True)
def test_a_run_saves_and_ends_with_the_code_to_start_again(service: Service, tmp_path: Path) -> None:
    state = {"step": 0}
    with reknit.Checkpointer(tmp_path, save=every(steps=1000) | on_preemption(cloud="aws")) as run:
        for step in range(10_000_000):
            state["step"] = step
            run.save(step, state)
            if step == 3:
                assert run.exit_code == 0
                service.answers[AWS] = ACTION
            if run.preempted:
                break
        assert "AWS: terminate" in str(run.preempted)
        assert run.exit_code == 75
    with reknit.Checkpointer(tmp_path) as run:
        assert run.resume(state) == step + 1


def test_a_provider_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match="cloud is one of aws, gcp, azure, not 'ibm'"):
        on_preemption(cloud="ibm")  # type: ignore[arg-type]
