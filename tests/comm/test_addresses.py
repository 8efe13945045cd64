"""The address on which a rank listens, and which it sends to others: on this machine, and on made-up ones."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest

from reknit.comm.meeting import addresses as module
from reknit.comm.meeting.addresses import Address, addresses, is_loopback
from reknit.errors import CommError, UsageError
from reknit.options import CommOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PLAIN = CommOptions()


def own(family: int) -> list[tuple[str, str]]:
    """Return the interfaces of this machine with their usable addresses of a family."""
    return [
        (name, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == family and "%" not in entry.address and not entry.address.startswith("fe80")
    ]


def listen(host: str) -> None:
    """Listen on an address, as a server would."""
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    socket.create_server((bare, 0), family=family).close()


def test_a_chosen_address_is_listened_on_and_told_to_others() -> None:
    assert addresses(CommOptions(bind="10.1.2.3"), one_host=True) == ("10.1.2.3", "10.1.2.3")
    assert addresses(CommOptions(bind="::1"), one_host=False) == ("[::1]", "[::1]")
    assert addresses(CommOptions(bind="[::1]"), one_host=False) == ("[::1]", "[::1]")


def test_who_listens_everywhere_tells_others_an_address_that_they_can_use() -> None:
    name, address = own(socket.AF_INET)[0]
    for bind, listens in (("0.0.0.0", "0.0.0.0"), ("::", "[::]")):
        assert addresses(CommOptions(bind=bind, interface=name), one_host=False) == Address(address, listens)
        assert addresses(CommOptions(bind=bind), one_host=True) == Address("127.0.0.1", listens)


def test_ranks_of_one_host_use_loopback() -> None:
    found = addresses(PLAIN, one_host=True, master="192.0.2.77")
    assert found == ("127.0.0.1", "127.0.0.1")
    listen(found.listens)


def test_every_interface_of_this_machine_can_be_chosen_by_name() -> None:
    for name, address in own(socket.AF_INET):
        found = addresses(CommOptions(interface=name), one_host=False)
        assert found.advertised in [entry.address for entry in psutil.net_if_addrs()[name]]
        listen(found.listens)
        assert is_loopback(found.advertised) == is_loopback(address)


def test_an_interface_that_this_host_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(UsageError, match="no network interface 'ib77'") as caught:
        addresses(CommOptions(interface="ib77"), one_host=True)
    for name, _ in own(socket.AF_INET):
        assert name in str(caught.value)


def test_the_way_to_the_master_of_the_store_tells_the_address() -> None:
    outward = [address for _, address in own(socket.AF_INET) if not is_loopback(address)]
    if not outward:
        pytest.skip("this machine has no network but loopback")
    assert addresses(PLAIN, one_host=False, master=outward[0]).advertised == outward[0]


def test_the_way_to_the_master_tells_an_address_of_ipv6_too() -> None:
    outward = [address for _, address in own(socket.AF_INET6) if not is_loopback(address)]
    if not outward:
        pytest.skip("this machine has no network of IPv6 but loopback")
    found = addresses(PLAIN, one_host=False, master=outward[0])
    assert found == (f"[{outward[0]}]", f"[{outward[0]}]")
    listen(found.listens)


def test_without_a_hint_a_host_finds_an_address_that_is_not_loopback() -> None:
    if all(is_loopback(address) for _, address in own(socket.AF_INET)):
        pytest.skip("this machine has no network but loopback")
    for master in (None, "127.0.0.1", "localhost", "no-such-host.invalid"):
        found = addresses(PLAIN, one_host=False, master=master)
        assert not is_loopback(found.advertised.strip("[]"))
        listen(found.listens)


class Entry(NamedTuple):
    family: int
    address: str


class State(NamedTuple):
    isup: bool


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that puts a made-up host in the place of this machine."""

    def pretend(
        interfaces: Mapping[str, Sequence[str]],
        names: Mapping[str, Sequence[str]] | None = None,
        down: Sequence[str] = (),
    ) -> None:
        entries = {
            name: [Entry(socket.AF_INET6 if ":" in one else socket.AF_INET, one) for one in found]
            for name, found in interfaces.items()
        }
        known = dict(names or {})

        def resolve(host: str, port: int | None, **_: object) -> list[Any]:
            if host not in known:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [
                (socket.AF_INET6 if ":" in one else socket.AF_INET, 0, 0, "", (one, port or 0))
                for one in known[host]
            ]

        monkeypatch.setattr(psutil, "net_if_addrs", lambda: entries)
        monkeypatch.setattr(
            psutil, "net_if_stats", lambda: {name: State(name not in down) for name in interfaces}
        )
        monkeypatch.setattr(socket, "gethostname", lambda: "node-7")
        monkeypatch.setattr(socket, "getaddrinfo", resolve)

    return pretend


LO = ["127.0.0.1", "::1"]


def test_a_made_up_host_tells_the_address_at_which_others_can_reach_it(made_up: Any) -> None:
    debian, named = {"node-7": ["127.0.1.1"]}, {"node-7": ["127.0.1.1", "10.1.0.7"]}
    bridges = {"docker0": ["172.17.0.1"], "br-12ab": ["172.18.0.1"]}
    for why, interfaces, names, down, expected in (
        ("its name leads to loopback", {"eth0": ["fe80::1%eth0", "10.0.0.7"]}, debian, [], "10.0.0.7"),
        ("its name", {"eth0": ["10.0.0.7"], "ib0": ["10.1.0.7"]}, named, [], "10.1.0.7"),
        ("the first that is up", {"eth0": ["10.0.0.7"], "eth1": ["10.1.0.7"]}, {}, ["eth0"], "10.1.0.7"),
        ("no bridge", bridges | {"eth0": ["fd00::7"]}, {}, [], "[fd00::7]"),
        ("only bridges", bridges, {}, [], "172.17.0.1"),
        ("only IPv6", {"eth0": ["fe80::1%eth0", "2001:db8::7"]}, {}, [], "[2001:db8::7]"),
    ):  # fmt: skip
        made_up({"lo": LO} | interfaces, names, down)
        assert addresses(PLAIN, one_host=False) == (expected, expected), why


def test_a_chosen_interface_tells_its_address_and_that_of_ipv4_before_that_of_ipv6(made_up: Any) -> None:
    made_up({"lo": ["::1"], "eth0": ["fe80::1%eth0", "2001:db8::7"]})
    assert addresses(PLAIN, one_host=True) == ("[::1]", "[::1]")
    assert addresses(CommOptions(interface="eth0"), one_host=False).advertised == "[2001:db8::7]"
    made_up({"eth0": ["2001:db8::7", "10.0.0.7"]})
    assert addresses(CommOptions(interface="eth0"), one_host=False).advertised == "10.0.0.7"


def test_an_interface_whose_addresses_count_on_its_link_only_is_refused(made_up: Any) -> None:
    made_up({"eth0": ["fe80::1%eth0", "169.254.1.2"]})
    with pytest.raises(UsageError, match="only link-local addresses"):
        addresses(CommOptions(interface="eth0"), one_host=False)


def test_a_host_without_network_says_so(made_up: Any) -> None:
    made_up({"lo": LO, "eth0": ["fe80::1%eth0"]}, {"node-7": ["127.0.1.1"]})
    with pytest.raises(CommError, match="no address that other hosts could reach"):
        addresses(PLAIN, one_host=False)


def test_hosts_in_name_only_meet_on_loopback_when_there_is_nothing_else(
    made_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up({"lo": LO})
    monkeypatch.setattr(module, "_towards", lambda _: "127.0.0.1")
    assert addresses(PLAIN, one_host=False, master="127.0.0.1").advertised == "127.0.0.1"


def test_interfaces_that_cannot_be_listed_are_a_comm_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(psutil, "net_if_addrs", refuse)
    with pytest.raises(CommError, match="cannot be listed"):
        addresses(CommOptions(interface="eth0"), one_host=False)


def test_addresses_of_ipv4_within_ipv6_are_seen_through() -> None:
    assert is_loopback("::ffff:127.0.0.1")
    assert not is_loopback("::ffff:10.0.0.1")
