"""The addresses that this rank listens on and advertises to other ranks."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import socket
import stat
import tempfile
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from reknit.errors import CommError, UsageError
from reknit.options import ANYWHERE
from reknit.system import aside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reknit.options import CommOptions

_REMEDY = "set CommOptions.interface, or CommOptions.bind to an address of this host that the others reach"

# No packet is sent: connecting a UDP socket only asks for the route, and any port will do.
_ANY_PORT = 9

_PROBE_S = 2.0

_UNIX_SCHEME = "unix:"
_FITS_A_SOCKET = r"/[A-Za-z0-9_./-]{0,70}"
"""Folders whose names need no quoting, and that leave room in the 107 letters of a socket's name."""

_OF_CONTAINERS = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "lxc", "podman")


class Address(NamedTuple):
    """The published address and the address of the server's socket; a colon and a port follow."""

    advertised: str
    listens: str


def addresses(options: CommOptions, *, one_host: bool, master: str | None = None) -> Address:
    """Return the address of this rank's server.

    `one_host`: all ranks of the group are on this host.  `master`: the host of the store in which they met,
    if it has one.  Raises `UsageError` for an interface that this host does not have, `CommError` without an
    address.
    """
    everywhere = options.bind in ANYWHERE
    if options.bind is not None and not everywhere:
        advertised = options.bind
    elif options.interface is not None:
        advertised = _of_interface(options.interface)
    elif one_host:
        advertised = _loopback()
    else:
        advertised = _found(master)
    listens = options.bind if everywhere and options.bind is not None else advertised
    return Address(bracketed(advertised), bracketed(listens))


class PrivateSocket:
    """A socket that listens where only processes of this user can connect, or even see it.

    Its name is in a folder that other users may not enter.  Once all ranks have connected, the name is not
    needed any more.  `address` has the name, and the token that a process has to show there.
    """

    def __init__(self, address: str, fd: int) -> None:
        """Take over a socket, with its address, from the process that made it by `listen`."""
        self.socket, self.address = socket.socket(fileno=aside(fd)), address
        name, _, self.token = address.rpartition(" ")
        self._path = socket_path(name)

    @classmethod
    def listen(cls, backlog: int) -> PrivateSocket:
        """Listen in a folder of its own, with a new token.  Raises `CommError`."""
        address = f"{_UNIX_SCHEME}{_private_folder()}/ranks {secrets.token_hex(32)}"
        here = cls(address, socket.socket(socket.AF_UNIX).detach())
        try:
            here.socket.bind(here._path)
            here.socket.listen(backlog)
        except BaseException as error:
            here.close()
            here.remove()
            if not isinstance(error, OSError):
                raise
            raise CommError(
                f"no server can listen on {address.partition(' ')[0]}: {error}",
                remedy='set TMPDIR to another folder, or CommOptions.bind to "127.0.0.1"',
            ) from error
        return here

    def close(self) -> None:
        """Close this process's descriptor; another process may go on to listen."""
        self.socket.close()

    def remove(self) -> None:
        """Remove the name; connections stay open.  Removing twice does nothing."""
        with suppress(OSError):  # a remaining folder is closed to other users
            with suppress(FileNotFoundError):
                os.unlink(self._path)
            os.rmdir(os.path.dirname(self._path))


def _private_folder() -> str:
    """Return a new folder of mode 0700 with a short and simple name."""
    failure: OSError | None = None
    for place in (tempfile.gettempdir, lambda: "/tmp", lambda: "/dev/shm"):
        try:
            folder = place()
            if re.fullmatch(_FITS_A_SOCKET, folder):
                return tempfile.mkdtemp(prefix="reknit-", dir=folder)
        except OSError as error:  # read-only, or full
            failure = error
    raise CommError(
        f"cannot create a folder for the socket of this rank: {failure}",
        remedy='set TMPDIR to a writable folder, or CommOptions.bind to "127.0.0.1"',
    )


def is_unix(address: str) -> bool:
    """Return whether an address is the name of a socket of this host."""
    return address.startswith(_UNIX_SCHEME)


def socket_path(address: str) -> str:
    """Return the path of a socket of this host."""
    return address[len(_UNIX_SCHEME) :]


def check_owner(address: str) -> None:
    """Raise `CommError` where a socket is in a folder that another user made, or could enter."""
    if not is_unix(address):
        return
    try:
        folder = os.stat(os.path.dirname(socket_path(address)))
    except OSError:
        return  # the connection then fails
    if folder.st_uid != os.geteuid() or stat.S_IMODE(folder.st_mode) & 0o077:
        raise CommError(
            f"the socket {address} is not private to this user: another user has put it at the meeting place",
            remedy="use a meeting place where no other user can write, or set CommOptions.tls",
        )


def deserted(address: str) -> bool:
    """Return whether no server listens at an address, by the answer of its host; False in doubt."""
    try:
        if is_unix(address):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(0)
                probe.connect(socket_path(address))
        else:
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, ValueError):
        return False
    return False


def bracketed(host: str) -> str:
    """Return a host as it stands before a colon and a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def is_loopback(host: str) -> bool:
    """Return whether an address leads only to the host itself."""
    return _parsed(host).is_loopback


def own_addresses() -> set[str]:
    """Return all IP addresses of this host."""
    return {address for _, address in _of_all()}


def _found(master: str | None) -> str:
    """Return an address that other hosts can use."""
    route = None if master is None else _towards(master)
    if route is not None and _usable(route):
        return route
    for address in _of_name():
        if _usable(address):
            return address
    apart = [(name, address) for name, address in _of_all() if _usable(address) and _is_up(name)]
    # Bridges of containers have addresses that no other host reaches; IPv4 first, as with a chosen interface.
    apart.sort(key=lambda entry: (entry[0].startswith(_OF_CONTAINERS), ":" in entry[1]))
    if apart:
        return apart[0][1]
    if route is not None:
        return route  # the master is reached inside this host, and so are all ranks
    raise CommError("this host has no address that other hosts could reach", remedy=_REMEDY)


def _towards(host: str) -> str | None:
    """Return the address of this host from which packets to another host would come, None without a route."""
    try:
        ends = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, end in ends:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(end)
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return None


def _of_name() -> list[str]:
    """Return the addresses to which this host's name leads; Debian lets it lead to 127.0.1.1."""
    try:
        ends = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(end[0]) for *_, end in ends]


def _of_interface(name: str) -> str:
    found: dict[str, list[str]] = {}
    for interface, address in _of_all():
        found.setdefault(interface, []).append(address)
    if name not in found:
        raise UsageError(
            f"this host has no network interface {name!r} with an address",
            remedy=f"name one of these in CommOptions.interface: {', '.join(sorted(found)) or 'none'}",
        )
    # An address that is good on one link only means nothing to another host: the link has another name there.
    usable = [address for address in found[name] if not _parsed(address).is_link_local]
    if not usable:
        raise UsageError(
            f"the network interface {name!r} has only link-local addresses: {', '.join(found[name])}",
            remedy=_REMEDY,
        )
    return min(usable, key=lambda address: ":" in address)


def _loopback() -> str:
    own = own_addresses()
    return "::1" if "::1" in own and "127.0.0.1" not in own else "127.0.0.1"


def _of_all() -> Iterator[tuple[str, str]]:
    """Yield each interface with each of its IP addresses."""
    import psutil  # ranks of one host need no addresses

    try:
        interfaces = psutil.net_if_addrs()
    except OSError as error:
        raise CommError(f"the network interfaces cannot be listed: {error}", remedy=_REMEDY) from error
    for name, entries in interfaces.items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                yield name, entry.address


def _is_up(interface: str) -> bool:
    import psutil

    state = psutil.net_if_stats().get(interface)
    return state is None or state.isup


def _usable(host: str) -> bool:
    """Return whether other hosts can use an address."""
    address = _parsed(host)
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address
