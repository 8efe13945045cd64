"""Ranks with certificates of one authority reach each other, and no other process reaches them."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
import pytest
import trustme

from reknit.comm import serving as tls
from reknit.comm.meeting import address_store
from reknit.comm.meeting.address_store import Point, RemoteStore, ServedStore
from reknit.errors import CommError, UsageError
from reknit.options import CommOptions, Tls
from tests.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECRET = "a secret of the job"


class Authority(NamedTuple):
    """An authority that signs certificates, and the folder of these."""

    ca: trustme.CA
    folder: Path

    @classmethod
    def at(cls, folder: Path) -> Authority:
        folder.mkdir()
        ca = trustme.CA()
        ca.cert_pem.write_to_path(folder / "ca.pem")
        return cls(ca, folder)

    def issue(self, *names: str, server_name: str | None = None) -> Tls:
        """Return the settings of a rank whose certificate bears some names."""
        certificate = self.ca.issue_cert(*names)
        chain, key = self.folder / f"{names[0]}.pem", self.folder / f"{names[0]}.key"
        chain.write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
        certificate.private_key_pem.write_to_path(key)
        return Tls(ca=self.folder / "ca.pem", certificate=chain, key=key, server_name=server_name)


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    return Authority.at(tmp_path / "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    return Authority.at(tmp_path / "theirs")


@pytest.fixture
def last() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_store, "_REPLY_S", 1.0)


def options(settings: Tls | None, seconds: float = 5) -> CommOptions:
    return CommOptions(tls=settings, connect_timeout_s=seconds)


def serve(last: ExitStack, settings: Tls | None) -> Point:
    point = Point("127.0.0.1", free_port())
    served = ServedStore(point, 2, SECRET, options(settings))
    last.callback(served.close)
    served.set("key", b"value")
    return point


def fetch(last: ExitStack, point: Point, settings: Tls | None, seconds: float = 5) -> bytes:
    remote = RemoteStore(point, SECRET, options(settings, seconds))
    last.callback(remote.close)
    return remote.get("key", 0)


def test_ranks_whose_certificates_name_their_address_or_share_a_name_reach_each_other(
    ours: Authority, last: ExitStack
) -> None:
    shared = ours.issue("ranks.example", server_name="ranks.example")
    for serving, fetching in ((ours.issue("127.0.0.1"), ours.issue("elsewhere.example")), (shared, shared)):
        assert fetch(last, serve(last, serving), fetching, 60) == b"value"


def test_who_has_no_certificate_of_the_authority_for_the_name_is_not_believed(
    ours: Authority, theirs: Authority, last: ExitStack
) -> None:
    ca, here = ours.folder / "ca.pem", ours.issue("127.0.0.1")
    anywhere = ours.issue("a.example")
    cases = [
        ("the server bears another name", ours.issue("ranks.example"), anywhere),
        (
            "and that is wanted",
            ours.issue("ranks.example"),
            ours.issue("b.example", server_name="other.example"),
        ),
        ("the rank is of another authority", here, dataclasses.replace(theirs.issue("a.example"), ca=ca)),
        ("the server is", dataclasses.replace(theirs.issue("127.0.0.1"), ca=ca), anywhere),
        ("the rank has none", here, None),
        ("the server has none", None, here),
    ]
    points = [serve(last, serving) for _, serving, _ in cases]
    with ThreadPoolExecutor(len(cases)) as pool:  # each waits for its deadline
        answers = [
            pool.submit(fetch, last, point, fetching)
            for point, (_, _, fetching) in zip(points, cases, strict=True)
        ]
    for (why, *_), answer in zip(cases, answers, strict=True):
        with pytest.raises(CommError, match="cannot be reached"):
            pytest.fail(f"{why}, and it got {answer.result()!r}")


def test_a_rank_that_shows_no_certificate_is_turned_away(ours: Authority, last: ExitStack) -> None:
    point = serve(last, ours.issue("127.0.0.1"))
    anonymous = grpc.ssl_channel_credentials((ours.folder / "ca.pem").read_bytes())
    with grpc.secure_channel(str(point), anonymous) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/reknit.Store/get", None, None)(b"", timeout=2)
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def opened(settings: CommOptions) -> None:
    tls.open_port(grpc.server(None), "127.0.0.1:0", settings)  # type: ignore[arg-type]


def connected(settings: CommOptions) -> None:
    tls.channel("127.0.0.1:1", settings, [])


def test_a_file_that_is_not_there_is_named(ours: Authority, tmp_path: Path) -> None:
    good = ours.issue("a.example")
    for name in ("ca", "certificate", "key"):
        absent: dict[str, Any] = {name: tmp_path / "absent"}
        for use in (opened, connected):
            with pytest.raises(UsageError, match=rf"tls\.{name} cannot be read: No such file") as caught:
                use(options(dataclasses.replace(good, **absent)))
            assert caught.value.path == str(tmp_path / "absent")


def test_files_that_hold_something_else_are_refused(ours: Authority, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no certificate\n")
    good = ours.issue("a.example")
    with pytest.raises(UsageError, match=r"tls\.ca holds no certificate"):
        connected(options(dataclasses.replace(good, ca=tmp_path / "text")))
    wrong, other = tmp_path / "text", ours.issue("b.example").key
    for name, bad in (("certificate", wrong), ("key", wrong), ("key", other)):
        paths: dict[str, Any] = {name: bad}
        with pytest.raises(UsageError, match=r"tls\.certificate and tls\.key do not match"):
            opened(options(dataclasses.replace(good, **paths)))


ENCRYPT = """
import sys
from cryptography.hazmat.primitives import serialization as s
path = sys.argv[1]
key = s.load_pem_private_key(open(path, "rb").read(), None)
data = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"word"))
open(path, "wb").write(data)
"""


def test_a_key_with_a_password_is_refused_and_nobody_is_asked_for_it(ours: Authority) -> None:
    settings = ours.issue("a.example")
    subprocess.run([sys.executable, "-c", ENCRYPT, str(settings.key)], check=True, timeout=60)
    with pytest.raises(UsageError, match="do not match") as caught:
        opened(options(settings))
    assert "without a password" in str(caught.value)


def test_a_port_that_cannot_be_opened_is_a_comm_error(ours: Authority) -> None:
    for settings in (None, ours.issue("a.example")):
        server = grpc.server(None, options=[("grpc.so_reuseport", 0)])  # type: ignore[arg-type]
        with pytest.raises(CommError, match=r"no server can listen on 192\.0\.2\.200:0"):
            tls.open_port(server, "192.0.2.200:0", options(settings))
        server.stop(None)


def test_options_keep_their_certificates_on_the_way_to_an_agent(
    ours: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(ours.folder)
    chosen = options(Tls(ca="ca.pem", certificate="a.pem", key="a.key", server_name="name"))
    monkeypatch.chdir(tmp_path)
    assert CommOptions(**dataclasses.asdict(chosen)) == chosen
    assert chosen.tls is not None
    assert chosen.tls.ca == str(ours.folder / "ca.pem")


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(UsageError, match=r"tls\.key is a path"):
        Tls(ca="ca.pem", certificate="a.pem", key="")
    with pytest.raises(UsageError, match=r"tls\.server_name is a name"):
        Tls(ca="ca.pem", certificate="a.pem", key="a.key", server_name="")
    with pytest.raises(UsageError, match=r"tls is a reknit\.Tls, not str"):
        CommOptions(tls="ca.pem")  # type: ignore[arg-type]
