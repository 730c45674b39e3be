"""Restricts listening sockets that a framework has opened to some source addresses.

TensorFlow's gRPC server listens on every address of a machine, and neither it nor gloo nor JAX's
coordination service authenticates its clients. A classic BPF filter on their sockets, set from
within the process, drops packets from other addresses before there is a connection; accepted
connections inherit it. Where the kernel requires privileges for that, the port is shared with a
socket to which other addresses are redirected. Both see addresses, not users.
"""

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from unisono.launch.client import World
from unisono.launch.network import address_towards, resolve
from unisono.log import logger

_LOOPBACK = ("127.0.0.0/8", "::1/128")
_SO_ATTACH_FILTER, _SO_ATTACH_REUSEPORT_FILTER = 26, 51
_POLL_S = 0.0002
_FILL_S = 2.0

# Instructions of classic BPF, and where a packet's network header begins.
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _JUMP, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x05, 0x06
_HEADER = 0x1_0000_0000 - 0x10_0000
_VERSION, _SOURCE_4, _SOURCE_6 = _HEADER, _HEADER + 12, _HEADER + 8
_ALL, _NOTHING = 0xFFFF_FFFF, 0
_MOST_COMPARED = 200
"""Words of one block: a conditional jump leads over 255 instructions at most."""

_Instruction = tuple[int, int, int, int]
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_sinks: list[socket.socket] = []
"""Kept open as long as the process lives."""


def source_addresses(
    world: World, hosts: Iterable[str], ranks: Sequence[int] | None = None
) -> set[str]:
    """The addresses from which processes of a run connect to those `hosts`.

    Every process reads its routing table, since a machine with several networks may connect from
    another address than its own server's. An all-gather: all ranks have to call it.
    """
    hosts = set(hosts)
    if all(_is_loopback(host) for host in hosts):
        return set()  # Loopback is always allowed, and all processes take this branch alike.
    own = set()
    for address in {address for host in hosts for address in resolve(host)}:
        with contextlib.suppress(OSError):  # No route leads there, so nothing connects.
            own.add(address_towards(address, 9).partition("%")[0])
    return {
        each for many in world.all_gather("source addresses", sorted(own), ranks) for each in many
    }


class OnlyFrom:
    """While this is entered, sockets that begin to listen answer loopback and `addresses` alone.

    Those at `port`, or else those bound to `host`, that were not there before; a thread looks for
    them all the time, so what is called inside must release the GIL to be guarded early. What
    cannot be guarded is logged as a warning.
    """

    def __init__(
        self, addresses: Iterable[str], *, host: str | None = None, port: int | None = None
    ) -> None:
        self.num_guarded = 0
        """How many listening sockets have the filter."""
        self._program = _program(addresses)
        self._host = host
        self._port = port
        self._known: set[int] = set()
        self._filtered: set[int] = set()
        self._is_over = False
        self.is_diverted = False
        """Whether the framework has to share its port (SO_REUSEPORT) with our sink socket."""
        self._error: OSError | None = None

    def __enter__(self) -> "OnlyFrom":
        # Not where a host is named: JAX's service was not reached behind a shared port.
        if self._port is not None and self._host is None and not _may_filter():
            self._divert("::", self._port)
        for sock, inode in _tcp_sockets():
            with sock:
                if self._is_meant(sock) and _is_listening(sock):
                    self._known.add(inode)
        self._thread = threading.Thread(target=self._look, name="unisono-ports", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_over = True
        self._thread.join()
        # Once more, also for connections that came in between listening and the filter.
        self._guard()
        if kind is not None or (self._host and _is_loopback(self._host)):
            return
        if self._port is not None and not self.num_guarded and self._error is None:
            self._error = FileNotFoundError("no such socket was found in this process")
        if self._error is not None:
            logger.warning(
                "What listens at %s authenticates nobody, and could not be closed to machines that "
                "are not of this run: %s. Let a firewall close it. See SECURITY.md.",
                self._host or f"port {self._port}",
                self._error,
            )

    def _look(self) -> None:
        while not self._is_over and not self.num_guarded and self._error is None:
            self._guard()
            time.sleep(_POLL_S)

    def _guard(self) -> None:
        try:
            for sock, inode in _tcp_sockets():
                with sock:
                    if inode not in self._known and self._is_meant(sock):
                        # Once: another time it would need twice the memory, which is limited.
                        if inode not in self._filtered and not self.is_diverted:
                            _attach(sock, self._program)
                            self._filtered.add(inode)
                        if _is_listening(sock):
                            self._known.add(inode)
                            self.num_guarded += 1
        except OSError as error:
            self._error = self._error or error

    def _is_meant(self, sock: socket.socket) -> bool:
        try:
            host, port = sock.getsockname()[:2]
        except OSError:
            return False
        if self._port is not None:
            # Not yet listening is early enough, and a connection to the port is a stranger's too.
            return bool(port == self._port)
        return _is_listening(sock) and host.removeprefix("::ffff:") == self._host

    def _divert(self, host: str, port: int) -> None:
        """Redirect other addresses to a sink socket that shares the port, and never answers.

        For kernels on which only privileged processes may filter TCP. The first socket that listens
        is number 0 of those that share a port, the framework's will be number 1.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sink, filler = socket.socket(family), socket.socket(family)
        try:
            sink.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                sink.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sink.bind((host, port))
            sink.listen(0)
            # Until the framework listens all connect to the sink, whose queue holds one.
            filler.settimeout(_FILL_S)
            filler.connect(("::1" if host == "::" else host, port))
            chosen = [
                (*each[:3], min(each[3], 1)) if each[0] == _RETURN else each
                for each in self._program
            ]
            _attach(sink, chosen, _SO_ATTACH_REUSEPORT_FILTER)
            self.is_diverted = True
            _sinks.extend([sink, filler])
        except OSError as error:
            sink.close()
            filler.close()
            self._error = error


def _may_filter() -> bool:
    with socket.socket() as trial:
        try:
            _attach(trial, [(_RETURN, 0, 0, _ALL)])
        except PermissionError:
            return False
        except OSError:
            pass
    return True


def _attach(
    sock: socket.socket, instructions: Sequence[_Instruction], option: int = _SO_ATTACH_FILTER
) -> None:
    code = b"".join(struct.pack("=HBBI", *each) for each in instructions)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HL", len(instructions), ctypes.addressof(buffer))
    sock.setsockopt(socket.SOL_SOCKET, option, program)


def _program(addresses: Iterable[str]) -> list[_Instruction]:
    """Keeps packets from loopback and these addresses, and drops all others."""
    networks = [ipaddress.ip_network(each) for each in (*_LOOPBACK, *addresses)]
    of_4 = [n for n in networks if isinstance(n, ipaddress.IPv4Network)]
    of_6 = [n for n in networks if isinstance(n, ipaddress.IPv6Network)]
    # Neighbouring addresses become one network: a filter's length is limited.
    code_4 = [*_tests(ipaddress.collapse_addresses(of_4), _SOURCE_4), (_RETURN, 0, 0, _NOTHING)]
    code_6 = [*_tests(ipaddress.collapse_addresses(of_6), _SOURCE_6), (_RETURN, 0, 0, _NOTHING)]
    # What comes over IPv4 to a socket of both has a header of IPv4.
    return [
        (_LOAD_BYTE, 0, 0, _VERSION),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 0, 1, 0x60),
        (_JUMP, 0, 0, len(code_4)),
        *code_4,
        *code_6,
    ]


def _tests(networks: Iterable[_Network], offset: int) -> Iterator[_Instruction]:
    """Keep the packet if its source is in one of the networks, else go on behind.

    What differs in its last word alone is compared with a word that is loaded once: many kernels
    have 20 KB for a socket's filter, and loads take most of it.
    """
    alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for network in networks:
        size = network.max_prefixlen // 32
        last = max(0, network.prefixlen - 1) // 32
        words = struct.unpack(f"!{size}I", network.network_address.packed)
        masks = struct.unpack(f"!{size}I", network.netmask.packed)
        alike.setdefault((words[:last], masks[last]), []).append(words[last])
    for (first, mask), found in alike.items():
        for i in range(0, len(found), _MOST_COMPARED):
            yield from _block(first, mask, found[i : i + _MOST_COMPARED], offset)


def _block(
    first: Sequence[int], mask: int, words: Sequence[int], offset: int
) -> Iterator[_Instruction]:
    """Keep a packet whose source begins with the `first` words and goes on with one of `words`."""
    cut = [] if mask == _ALL else [(_AND, 0, 0, mask)]
    num_left = 2 * len(first) + 1 + len(cut) + len(words) + 1
    for i, word in enumerate(first):
        num_left -= 2
        yield _LOAD_WORD, 0, 0, offset + 4 * i
        yield _JUMP_IF_EQUAL, 0, num_left, word
    yield _LOAD_WORD, 0, 0, offset + 4 * len(first)
    yield from cut
    for num_left, word in zip(reversed(range(len(words))), words, strict=True):
        yield _JUMP_IF_EQUAL, num_left, 0 if num_left else 1, word
    yield _RETURN, 0, 0, _ALL


def _tcp_sockets() -> Iterator[tuple[socket.socket, int]]:
    """This process' TCP sockets, each as a duplicate to close, with its number in the system."""
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("socket:["):
                continue
            sock = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue  # Closed in the meantime.
        if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
            yield sock, int(target[8:-1])
        else:
            sock.close()


def _is_listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
