"""An HDFS that requires Kerberos: saves, loads, ways to join sub-files, and refusals.

Starts a realm, a NameNode and a DataNode, from the files of ``scripts/servers up hdfs``; the DataNode
requires SASL.

Needs: scripts/servers up hdfs.  Run: python -m tests.nightly.hdfs_kerberos
"""

from __future__ import annotations

import base64
import faulthandler
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from hdfs_native import Client

import reknit
from reknit.errors import StoragePermissionError
from reknit.options import MIB
from reknit.stores.hdfs.store import HdfsStorage, open_hdfs
from reknit.testing.storage_suite import pattern
from tests.nightly.kerberos import REALM, Kerberos
from tests.stores.hdfs_probes import Cluster, hdfs_server

if TYPE_CHECKING:
    from collections.abc import Callable

NBYTES = 9 * MIB + 77
TIMEOUT_S = 5
"""The longest time of one request."""
LIMIT_S = 4 * TIMEOUT_S
HANGS_S = 240.0


class Secured:
    """The cluster, and Alice, who may write below ``/open``."""

    def __init__(self, folder: Path) -> None:
        (port,) = hdfs_server().free_ports(1)
        self.kerberos = Kerberos(folder / "kerberos", port)
        os.environ["KRB5_CONFIG"] = str(self.kerberos.config)
        os.environ["KRB5CCNAME"] = str(folder / "no-ticket")
        os.environ["JAVA_TOOL_OPTIONS"] = f"-Djava.security.krb5.conf={self.kerberos.config}"
        keys = {name: self.kerberos.new_key(f"{name}/localhost") for name in ("nn", "dn", "HTTP")}
        self.alice = self.kerberos.new_key("alice")
        self.cache = self.kerberos.ticket("alice", self.alice)
        self.cluster = Cluster(folder / "hdfs", 1, **settings(keys))
        self.cluster.wait()
        os.environ["HADOOP_CONF_DIR"] = self.cluster.server["conf"]
        self.root = self.cluster.server["endpoint"].replace("127.0.0.1", "localhost")
        admin = Client(self.root, kerberos_principal=f"nn/localhost@{REALM}", kerberos_keytab=keys["nn"])
        admin.mkdirs("/open", 0o777, True)
        admin.set_permission("/open", 0o777)

    def url(self, name: str, **options: Any) -> str:
        """Return a URL with Alice as the user, unless `options` name another."""
        reported = {
            "principal": f"alice@{REALM}",
            "keytab": self.alice,
            "part_mib": 1,
            "timeout_s": TIMEOUT_S,
        }
        words = (
            f"{key}={quote(str(value))}" for key, value in (reported | options).items() if value is not None
        )
        return f"{self.root}/open/{name}?{'&'.join(words)}"

    def token(self) -> str:
        """Return a delegation token of Alice's, as Hadoop's own tool gets it."""
        path = Path(self.cluster.server["folder"], "token")
        java = self.cluster.server["nodes"]["namenode"]
        command = [*java[:-1], "org.apache.hadoop.hdfs.tools.DelegationTokenFetcher", "--renewer", "root"]
        environment = {**os.environ, "KRB5CCNAME": self.cache}
        subprocess.run(
            [*command, path.as_uri()], env=environment, check=True, timeout=60, capture_output=True
        )
        data = path.read_bytes()
        # A mark and a version, the number of tokens, the length of a name, the name; at the end, no secrets.
        assert data[:6] == b"HDTS\x00\x01", data[:6]
        assert data[6] < 0x80
        assert data[-1] == 0
        return base64.urlsafe_b64encode(data[7 + data[6] : -1]).decode().rstrip("=")

    def end(self) -> None:
        self.cluster.end()
        self.kerberos.end()


def settings(keys: dict[str, str]) -> dict[str, str]:
    """Return the configuration for Hadoop."""
    return {
        "hadoop.security.authentication": "kerberos",
        "hadoop.security.authorization": "true",
        "hadoop.security.auth_to_local": "RULE:[2:$1](nn|dn)s/.*/root/\nDEFAULT",
        "dfs.namenode.kerberos.principal": f"nn/localhost@{REALM}",
        "dfs.namenode.keytab.file": keys["nn"],
        "dfs.datanode.kerberos.principal": f"dn/localhost@{REALM}",
        "dfs.datanode.keytab.file": keys["dn"],
        "dfs.web.authentication.kerberos.principal": f"HTTP/localhost@{REALM}",
        "dfs.web.authentication.kerberos.keytab": keys["HTTP"],
        "dfs.block.access.token.enable": "true",
        "dfs.data.transfer.protection": "authentication",
        "ignore.secure.ports.for.testing": "true",
    }


def round_trip(secured: Secured, url: str) -> None:
    """Save, and load it again."""
    state = {"model": {"w": np.frombuffer(pattern(NBYTES), np.uint8)}}
    reknit.save(url, state, step=1)
    target = {"model": {"w": np.zeros(NBYTES, np.uint8)}}
    assert reknit.load(url, target).step == 1
    assert np.array_equal(target["model"]["w"], state["model"]["w"])
    assert reknit.verify(url, "data").ok


def attempts(url: str) -> int:
    """Write a file of several parts, and return the number of files that were begun for it."""
    storage: HdfsStorage = open_hdfs(url)
    writer = storage.create("parts", NBYTES)
    writer.write(0, memoryview(pattern(NBYTES)))
    writer.finish()
    assert storage.size("parts") == NBYTES
    return len(writer.upload.created)


def with_a_keytab(secured: Secured) -> None:
    """Check that a file is written in one stream, since no server can join sub-files."""
    round_trip(secured, secured.url("keytab"))
    assert attempts(secured.url("keytab-parts")) == 1
    owner = Client(secured.root, kerberos_principal=f"alice@{REALM}", kerberos_keytab=secured.alice)
    assert owner.get_file_info("/open/keytab/manifest.json").owner == "alice"


def with_a_ticket(secured: Secured) -> None:
    """Check that a ticket of kinit is found without options."""
    old = os.environ["KRB5CCNAME"]
    os.environ["KRB5CCNAME"] = secured.cache
    try:
        round_trip(secured, secured.url("ticket", principal=None, keytab=None))
    finally:
        os.environ["KRB5CCNAME"] = old


def with_a_delegation_token(secured: Secured) -> None:
    """Check that the web server joins sub-files for a user with a token."""
    address = f"http://{secured.cluster.server['http']}?delegation={secured.token()}"
    round_trip(secured, secured.url("token", webhdfs=address))
    assert attempts(secured.url("token-parts", webhdfs=address)) == -(-NBYTES // MIB)


def refused(secured: Secured) -> None:
    """Check that a user without credentials gets an error in time, and leaves no files."""
    web = f"http://{secured.cluster.server['http']}"
    nobody: dict[str, dict[str, str | None]] = {
        "no ticket": {"principal": None, "keytab": None},
        "a principal that is nobody": {"principal": f"mallory@{REALM}"},
        "no keytab there": {"keytab": "/nowhere/alice.keytab"},
        "joins without authentication": {"concat": "rpc"},
        "the web without a token": {"webhdfs": web},
        "the web with a wrong token": {"webhdfs": f"{web}?delegation=AAAA"},
    }
    for name, options in nobody.items():
        place, begin = f"refused-{name.replace(' ', '-')}", time.monotonic()
        error = refusal(secured, secured.url(place, **options))
        seconds = time.monotonic() - begin
        what = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        print(f"   {name}: {seconds:.1f} s, {what}", flush=True)
        assert seconds < LIMIT_S, seconds
        assert not list(open_hdfs(secured.url(place)).list()), name


def refusal(secured: Secured, url: str) -> StoragePermissionError:
    """Return the error of a save that is refused."""
    try:
        round_trip(secured, url)
    except StoragePermissionError as error:
        return error
    raise AssertionError(f"nothing was refused at {url}")


CHECKS: tuple[Callable[[Secured], None], ...] = (
    with_a_keytab,
    with_a_ticket,
    with_a_delegation_token,
    refused,
)


def main() -> int:
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    with tempfile.TemporaryDirectory(prefix="reknit-secured-") as folder:
        secured = Secured(Path(folder))
        try:
            for check in CHECKS:
                print(f"-- {check.__name__.replace('_', ' ')}", flush=True)
                check(secured)
        finally:
            secured.end()
    faulthandler.cancel_dump_traceback_later()
    print(f"{len(CHECKS)} checks passed", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
