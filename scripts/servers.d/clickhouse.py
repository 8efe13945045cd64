"""A ClickHouse server, in the version that Debian has, for what is told about saves and loads."""

from __future__ import annotations

import http.client
import shutil
from typing import TYPE_CHECKING
from urllib.parse import quote

from _process import apt_install, free_ports, spawn

if TYPE_CHECKING:
    from pathlib import Path

ABOUT = "ClickHouse, a database"
AFTER = ()
TIMEOUT_S = 60

PACKAGES = ("clickhouse-server",)
CONFIG = """<yandex>
  <logger><level>warning</level><console>1</console></logger>
  <listen_host>127.0.0.1</listen_host>
  <http_port>{http}</http_port>
  <tcp_port>{tcp}</tcp_port>
  <path>{home}/data/</path>
  <tmp_path>{home}/data/tmp/</tmp_path>
  <format_schema_path>{home}/data/schemas/</format_schema_path>
  <users_config>{home}/users.xml</users_config>
  <default_profile>default</default_profile>
  <default_database>default</default_database>
  <mark_cache_size>268435456</mark_cache_size>
  <timezone>UTC</timezone>
</yandex>
"""
USERS = """<yandex>
  <profiles><default><max_memory_usage>1000000000</max_memory_usage></default></profiles>
  <users><default>
    <password></password>
    <networks><ip>127.0.0.1</ip></networks>
    <profile>default</profile>
    <quota>default</quota>
  </default></users>
  <quotas><default><interval><duration>3600</duration></interval></default></quotas>
</yandex>
"""


def install(home: Path) -> None:
    """Get the program."""
    if shutil.which("clickhouse-server") is None:
        apt_install(*PACKAGES)


def start(home: Path, running: dict[str, dict]) -> dict:
    """Start it, empty."""
    shutil.rmtree(home / "data", ignore_errors=True)
    for name in ("tmp", "schemas"):
        (home / "data" / name).mkdir(parents=True)
    ports = free_ports(2)
    (home / "config.xml").write_text(CONFIG.format(home=home, http=ports[0], tcp=ports[1]))
    (home / "users.xml").write_text(USERS)
    command = [str(shutil.which("clickhouse-server")), f"--config-file={home / 'config.xml'}"]
    return {
        "pids": [spawn(command, home / "log", cwd=home)],
        "log": str(home / "log"),
        "endpoint": f"http://127.0.0.1:{ports[0]}",
        "tcp_port": ports[1],
    }


def ready(server: dict) -> None:
    """See that it answers a query."""
    connection = http.client.HTTPConnection(server["endpoint"].removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", f"/?query={quote('SELECT sum(number) FROM numbers(10)')}")
        answer = connection.getresponse()
        text = answer.read().strip()
    except http.client.HTTPException as error:
        raise RuntimeError(f"it answers {error!r}") from error
    finally:
        connection.close()
    if answer.status != 200 or text != b"45":
        raise RuntimeError(f"it answers {answer.status}: {text[:200]!r}")
