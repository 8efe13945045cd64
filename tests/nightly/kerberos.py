"""A Kerberos of a test's own, on loopback: MIT's, from Debian's packages, in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import time
from typing import TYPE_CHECKING

from tests.servers import STATE

if TYPE_CHECKING:
    from pathlib import Path

REALM = "REKNIT"
PACKAGES = (
    "krb5-admin-server",
    "krb5-kdc",
    "krb5-user",
    "libev4",
    "libgssrpc4",
    "libkadm5clnt-mit12",
    "libkadm5srv-mit12",
    "libkdb5-10",
    "libverto-libev1",
    "libverto1",
)
_HOME = STATE / "kerberos"
_UP_S = 20.0


class Kerberos:
    """A realm; `new_key` adds its principals."""

    def __init__(self, folder: Path, port: int) -> None:
        _install()
        folder.mkdir()
        self._folder, libraries = folder, _HOME / "usr/lib/x86_64-linux-gnu"
        self.config = folder / "krb5.conf"
        self.config.write_text(
            f"[libdefaults]\n default_realm = {REALM}\n dns_lookup_kdc = false\n dns_lookup_realm = false\n"
            " rdns = false\n dns_canonicalize_hostname = false\n udp_preference_limit = 1\n"
            f"[realms]\n {REALM} = {{\n  kdc = 127.0.0.1:{port}\n }}\n"
            f"[domain_realm]\n localhost = {REALM}\n 127.0.0.1 = {REALM}\n"
            f"[dbmodules]\n db_module_dir = {libraries}/krb5/plugins/kdb\n"
        )
        (folder / "kdc.conf").write_text(
            f"[kdcdefaults]\n kdc_listen = 127.0.0.1:{port}\n kdc_tcp_listen = 127.0.0.1:{port}\n"
            f"[realms]\n {REALM} = {{\n  database_name = {folder}/principal\n"
            f"  key_stash_file = {folder}/stash\n  acl_file = {folder}/acl\n"
            "  supported_enctypes = aes256-cts:normal aes128-cts:normal\n }\n"
            f"[logging]\n kdc = FILE:{folder}/kdc.log\n"
        )
        self._environment = {
            **os.environ,
            "LD_LIBRARY_PATH": str(libraries),
            "KRB5_CONFIG": str(self.config),
            "KRB5_KDC_PROFILE": str(folder / "kdc.conf"),
        }
        self._call("sbin/kdb5_util", "create", "-s", "-r", REALM, "-P", os.urandom(8).hex())
        self._kdc = subprocess.Popen(
            [_HOME / "usr/sbin/krb5kdc", "-n"], env=self._environment, stdin=subprocess.DEVNULL
        )

    def new_key(self, principal: str) -> str:
        """Add a principal, and return the path of its keytab."""
        path = self._folder / f"{principal.replace('/', '-')}.keytab"
        self._call("sbin/kadmin.local", "-q", f"addprinc -randkey {principal}")
        self._call("sbin/kadmin.local", "-q", f"ktadd -norandkey -k {path} {principal}")
        return str(path)

    def ticket(self, principal: str, keytab: str) -> str:
        """Wait for a ticket, and return the path of its cache."""
        cache, end = self._folder / f"{principal.replace('/', '-')}.cache", time.monotonic() + _UP_S
        while True:
            try:
                self._call("bin/kinit", "-c", f"FILE:{cache}", "-k", "-t", keytab, principal)
                return str(cache)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.1)

    def end(self) -> None:
        """End it."""
        self._kdc.kill()
        self._kdc.wait()

    def _call(self, tool: str, *arguments: str) -> None:
        done = subprocess.run(
            [_HOME / "usr" / tool, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode or "rror" in done.stderr or "while" in done.stderr:
            raise RuntimeError(f"{tool} {' '.join(arguments)}: {done.stdout}{done.stderr}")


def _install() -> None:
    reported = _HOME / "installed"
    if reported.exists() and reported.read_text() == " ".join(PACKAGES):
        return
    downloads = _HOME / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "--quiet=2", *PACKAGES], cwd=downloads, check=True)
    for package in downloads.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, _HOME], check=True)
        package.unlink()
    reported.write_text(" ".join(PACKAGES))
