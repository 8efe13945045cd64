"""A Prometheus server, in the version that Debian has; it asks what stands in a file, and loads our rules."""

from __future__ import annotations

import http.client
import shutil
from pathlib import Path

from _process import apt_unpack, free_ports, spawn

ABOUT = "Prometheus, a monitoring system"
AFTER = ()
TIMEOUT_S = 60

RULES = Path(__file__).parents[2] / "examples" / "monitoring" / "prometheus-rules.yml"
CONFIG = """global: {{scrape_interval: 500ms, scrape_timeout: 400ms, evaluation_interval: 500ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: training
    file_sd_configs: [{{files: [{home}/targets.json], refresh_interval: 500ms}}]
"""


def install(home: Path) -> None:
    """Get the program."""
    if not (home / "usr/bin/prometheus").exists():
        apt_unpack(home, "prometheus")


def start(home: Path, running: dict[str, dict]) -> dict:
    """Start it, empty."""
    shutil.rmtree(home / "data", ignore_errors=True)
    (port,) = free_ports(1)
    (home / "prometheus.yml").write_text(CONFIG.format(rules=RULES, home=home))
    (home / "targets.json").write_text("[]")
    command = [
        str(home / "usr/bin/prometheus"),
        f"--config.file={home / 'prometheus.yml'}",
        f"--storage.tsdb.path={home / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    return {
        "pids": [spawn(command, home / "log", cwd=home)],
        "log": str(home / "log"),
        "endpoint": f"http://127.0.0.1:{port}",
        "targets": str(home / "targets.json"),
    }


def ready(server: dict) -> None:
    """See that it says so."""
    connection = http.client.HTTPConnection(server["endpoint"].removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/-/ready")
        answer = connection.getresponse()
        answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise RuntimeError(f"it answers {answer.status}")
