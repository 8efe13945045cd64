"""A real Prometheus asks the sink for its metrics, and understands dashboard and rules of the examples."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest

from reknit.events.records import WAITING
from reknit.sinks import Prometheus
from tests.faults.nursery import wait_until
from tests.monitor.records import of_rank, operation
from tests.servers import server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SITUATIONS = Path(__file__).with_name("prometheus-rules-test.yml")
EXAMPLES = Path(__file__).parents[2] / "examples" / "monitoring"
LIMIT_S = 40.0


def ask(address: str, path: str) -> Any:
    with urlopen(f"{address}/api/v1/{path}", timeout=LIMIT_S) as answer:
        found = json.loads(answer.read())
    assert found["status"] == "success"
    return found["data"]


def found(address: str, query: str) -> Any:
    return ask(address, f"query?query={quote(query)}")["result"]


def wait_for(condition: Callable[[], Any]) -> Any:
    wait_until(condition, LIMIT_S)
    return condition()


def send(sink: Prometheus, step: int) -> None:
    """Send records of a save and a load, of which a phase and a request failed."""
    now = time.time()
    for action in ("save", "load"):
        for phase in ("write", action):
            sink.take([of_rank(phase, 0, 0, 0.5, action=action, step=step, nbytes=1 << 20, ended=now)])
    sink.take([of_rank("commit", 1, 0, 0.5, outcome="StorageError")])
    for outcome in ("ok", "StorageError"):
        sink.take([operation("write", store="s3", step=step, nbytes=1 << 20, outcome=outcome, retries=1)])


@pytest.fixture
def address() -> Iterator[str]:
    """Return the address of a Prometheus that asks a process that saves and loads."""
    running = server("prometheus")
    client = pytest.importorskip("prometheus_client", reason="needs prometheus-client")
    registry = client.CollectorRegistry()
    serving, thread = client.start_http_server(0, "127.0.0.1", registry)
    sink, targets = Prometheus(registry), Path(running["targets"])
    send(sink, 1)
    targets.write_text(json.dumps([{"targets": [f"127.0.0.1:{serving.server_port}"]}]))
    try:
        wait_for(lambda: found(running["endpoint"], "reknit_last_step"))
        send(sink, 2)
        wait_for(lambda: found(running["endpoint"], "reknit_last_step == 2"))
        yield running["endpoint"]
    finally:
        targets.write_text("[]")
        serving.shutdown()
        serving.server_close()
        thread.join()


def test_each_panel_of_the_dashboard_shows_something_and_each_rule_is_one(address: str) -> None:
    dashboard = json.loads((EXAMPLES / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == 8
    places = [panel["gridPos"] for panel in panels]
    assert len({(place["x"], place["y"]) for place in places}) == len(panels)
    assert all(place["x"] + place["w"] <= 24 for place in places), "Grafana's grid has 24 columns"
    for panel in panels:
        for target in panel["targets"]:
            query = target["expr"].replace("$__rate_interval", "1m")
            wait_for(partial(found, address, query))

    def rules() -> list[Any]:
        found = [rule for group in ask(address, "rules")["groups"] for rule in group["rules"]]
        return found if all(rule["health"] == "ok" for rule in found) else []

    assert {rule["name"] for rule in wait_for(rules)} >= {"ReknitNoSaveCommitted", "ReknitSaveFailed"}

    def fired() -> list[Any]:
        alerts = ask(address, "alerts")["alerts"]
        return [each for each in alerts if each["labels"]["alertname"] == "ReknitSaveFailed"]

    (alert,) = wait_for(fired)
    assert alert["annotations"]["summary"] == "a save of training failed in phase commit: StorageError"


def test_each_alert_comes_in_its_situation_and_none_in_a_job_that_is_well(tmp_path: Path) -> None:
    promtool = Path(server("prometheus")["log"]).parent / "usr/bin/promtool"
    shutil.copy(EXAMPLES / "prometheus-rules.yml", tmp_path / "rules.yml")
    shutil.copy(SITUATIONS, tmp_path / "situations.yml")
    ran = subprocess.run(
        [promtool, "test", "rules", tmp_path / "situations.yml"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_no_alert_blames_a_rank_for_a_phase_in_which_ranks_wait() -> None:
    assert f'phase!~"{"|".join(WAITING)}"' in (EXAMPLES / "prometheus-rules.yml").read_text()
