"""Lets listening sockets that a framework has opened answer some addresses alone.

TensorFlow's gRPC server listens on every address of a machine, and neither it nor gloo nor JAX's
coordination service authenticates its callers. A classic BPF filter on their sockets, set from
within the process and without privileges, drops what comes from elsewhere before there is a
connection; accepted connections inherit it. It sees addresses, not users.
"""

import contextlib
import ctypes
import ipaddress
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from unisono.launch.network import address_towards, resolve
from unisono.launch.world import World

_LOOPBACK = ("127.0.0.0/8", "::1/128")
_SO_ATTACH_FILTER = 26
_POLL_S = 0.0002

# Instructions of classic BPF, and where a packet's network header begins.
_LOAD_WORD, _LOAD_BYTE, _AND, _JUMP_IF_EQUAL, _JUMP, _RETURN = 0x20, 0x30, 0x54, 0x15, 0x05, 0x06
_HEADER = 0x1_0000_0000 - 0x10_0000
_VERSION, _SOURCE_4, _SOURCE_6 = _HEADER, _HEADER + 12, _HEADER + 8
_ALL, _NOTHING = 0xFFFF_FFFF, 0

_Instruction = tuple[int, int, int, int]
_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def source_addresses(
    world: World, hosts: Iterable[str], ranks: Sequence[int] | None = None
) -> set[str]:
    """The addresses from which processes of a run connect to those `hosts`.

    Every process asks its routing table, since a machine with several networks may call from
    another address than the one at which it is called. An exchange: all ranks have to take part.
    """
    hosts = set(hosts)
    if all(_is_loopback(host) for host in hosts):
        return set()  # Loopback is allowed in any case, and all processes see that alike.
    own = set()
    for address in {address for host in hosts for address in resolve(host)}:
        with contextlib.suppress(OSError):  # No way leads there, so nobody is called there.
            own.add(address_towards(address, 9).partition("%")[0])
    return {
        each for many in world.exchange("source addresses", sorted(own), ranks) for each in many
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
        self._program = _program([ipaddress.ip_network(a) for a in (*_LOOPBACK, *addresses)])
        self._host = host
        self._port = port
        self._known: set[int] = set()
        self._is_over = False
        self._error: OSError | None = None

    def __enter__(self) -> "OnlyFrom":
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
            logging.getLogger("unisono").warning(
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
                        self._attach(sock)
                        if _is_listening(sock):
                            self._known.add(inode)
                            self.num_guarded += 1
        except OSError as error:
            self._error = error

    def _is_meant(self, sock: socket.socket) -> bool:
        try:
            host, port = sock.getsockname()[:2]
        except OSError:
            return False
        if self._port is not None:
            # Not yet listening is early enough, and a connection to the port is a stranger's too.
            return bool(port == self._port)
        return _is_listening(sock) and host.removeprefix("::ffff:") == self._host

    def _attach(self, sock: socket.socket) -> None:
        code = b"".join(struct.pack("=HBBI", *each) for each in self._program)
        buffer = ctypes.create_string_buffer(code, len(code))
        program = struct.pack("HL", len(self._program), ctypes.addressof(buffer))
        sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _program(networks: Iterable[_Network]) -> list[_Instruction]:
    """Keeps packets from these networks, and drops all others."""
    of_4 = [n for n in networks if isinstance(n, ipaddress.IPv4Network)]
    of_6 = [n for n in networks if isinstance(n, ipaddress.IPv6Network)]
    # Neighbouring addresses become one network: a filter's length is limited.
    blocks_4 = [_block(n, _SOURCE_4) for n in ipaddress.collapse_addresses(of_4)]
    blocks_6 = [_block(n, _SOURCE_6) for n in ipaddress.collapse_addresses(of_6)]
    code_4 = [*(line for block in blocks_4 for line in block), (_RETURN, 0, 0, _NOTHING)]
    code_6 = [*(line for block in blocks_6 for line in block), (_RETURN, 0, 0, _NOTHING)]
    # What comes over IPv4 to a socket of both has a header of IPv4.
    return [
        (_LOAD_BYTE, 0, 0, _VERSION),
        (_AND, 0, 0, 0xF0),
        (_JUMP_IF_EQUAL, 0, 1, 0x60),
        (_JUMP, 0, 0, len(code_4)),
        *code_4,
        *code_6,
    ]


def _block(network: _Network, offset: int) -> list[_Instruction]:
    """Keep the packet if its source is in a network, else go on behind this block."""
    tests: list[list[_Instruction]] = []
    size = network.max_prefixlen // 32
    words = struct.unpack(f"!{size}I", network.network_address.packed)
    masks = struct.unpack(f"!{size}I", network.netmask.packed)
    for i, (word, mask) in enumerate(zip(words, masks, strict=True)):
        if mask:
            cut = [] if mask == _ALL else [(_AND, 0, 0, mask)]
            tests.append([(_LOAD_WORD, 0, 0, offset + 4 * i), *cut, (_JUMP_IF_EQUAL, 0, 0, word)])
    lines = [line for test in tests for line in test]
    lines.append((_RETURN, 0, 0, _ALL))
    return [
        (code, 0, len(lines) - i - 1, k) if code == _JUMP_IF_EQUAL else (code, yes, no, k)
        for i, (code, yes, no, k) in enumerate(lines)
    ]


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
