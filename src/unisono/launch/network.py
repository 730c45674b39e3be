"""This machine's addresses: which one other nodes reach it at, and the interface behind it."""

import array
import contextlib
import fcntl
import socket
import struct
from pathlib import Path

from unisono.errors import LaunchError

LOOPBACK = "127.0.0.1"

_ELSEWHERE = "203.0.113.1"  # Reserved for documentation: no machine has it, all have a route.
_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40
_MOST_BYTES = 64 * 1024


def split_address(text: str) -> tuple[str, int]:
    """Host and port of `host:port`; LaunchError for anything else.

    >>> split_address("[fe80::1]:4000")
    ('fe80::1', 4000)
    """
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(
            f"Found {text!r} where an address is expected. Write host:port, such as 10.0.0.1:4000."
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def addresses() -> list[tuple[str, str]]:
    """Every address of this machine, with its interface's name."""
    return _ipv4() + _ipv6()


def interface_of(address: str) -> str | None:
    """The interface that has an address, or None."""
    return next((name for name, found in addresses() if found == address), None)


def address_of(interface: str) -> str:
    """An interface's address; LaunchError with those that there are."""
    known = addresses()
    for name, address in known:
        if name == interface:
            return address
    raise LaunchError(
        f"Asked for the interface {interface!r}; this machine has {_listed(known)}. Choose among "
        "those that have an address."
    )


def free_port(host: str = LOOPBACK) -> int:
    """A port that nothing listens at now."""
    with socket.create_server((host, 0)) as trial:
        return int(trial.getsockname()[1])


def is_own(address: str) -> bool:
    """Whether an address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True


def resolve(host: str) -> list[str]:
    """The addresses of a name; LaunchError where it has none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"No address is known for the host {host!r}: {error}. Give its number, such as "
            "10.0.0.1:4000."
        ) from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def own_address(host: str, interface: str | None = None) -> str:
    """The address of this machine at which others know it as `host`.

    A machine's own name often leads to its loopback address on itself alone; then it is the
    address by which it would leave for the rest of the world.
    """
    if interface is not None:
        return address_of(interface)
    found = [address for address in resolve(host) if is_own(address)]
    if not found:
        raise LaunchError(
            f"The address {host!r} is not this machine's, which has {_listed(addresses())}. Give "
            "the coordinator's own address, and start node 0 on it."
        )
    if host == "localhost" or host in found or not _is_loopback(found[0]):
        return found[0]
    outward = [address for _, address in _ipv4() if not _is_loopback(address)]
    if len(outward) > 1:
        with contextlib.suppress(OSError):
            outward = [address_towards(_ELSEWHERE, 9)]
    if len(outward) != 1:
        raise LaunchError(
            f"The name {host!r} leads to {found[0]} here, which other nodes cannot reach, and this "
            f"machine has {_listed(addresses())}. Name the coordinator by the right one of these."
        )
    return outward[0]


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another host; no packet is sent."""
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as trial:
        trial.connect(target)
        return str(trial.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _ipv4() -> list[tuple[str, str]]:
    entries = array.array("B", bytes(_MOST_BYTES))
    place, _ = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        answer = fcntl.ioctl(trial, _SIOCGIFCONF, struct.pack("iL", _MOST_BYTES, place))
    (num_bytes,) = struct.unpack_from("i", answer)
    found = []
    for start in range(0, num_bytes, _ENTRY_BYTES):
        entry = entries[start : start + _ENTRY_BYTES].tobytes()
        # A label such as eth0:1 is a second address of eth0.
        name = entry[:16].split(b"\0", 1)[0].decode().split(":")[0]
        found.append((name, socket.inet_ntoa(entry[20:24])))
    return found


def _ipv6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if scope != "20":  # An address of one link alone needs the link's name as well.
            found.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return found


def _listed(known: list[tuple[str, str]]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in known) or "no address"
