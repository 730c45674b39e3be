"""Hosts for tests: network namespaces with addresses of their own, joined by a bridge.

They share the machine's files and processes, but not its network: what one listens on, another
reaches by its address alone, and the link of each can be cut.
"""

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

_numbers = itertools.count()


@dataclass(frozen=True)
class NamespaceHost:
    """One host: a namespace, its address, and its end of the cable."""

    namespace: str
    address: str
    cable: str

    @property
    def prefix(self) -> list[str]:
        """What to put before a command that is to run on it."""
        return ["ip", "netns", "exec", self.namespace]

    def cut(self) -> None:
        """Pull its cable: nothing arrives any more, and nobody is told."""
        _ip("link", "set", self.cable, "down")

    def listening(self) -> set[str]:
        """The addresses that something listens on, `0.0.0.0` for all."""
        command = [*self.prefix, "cat", "/proc/net/tcp", "/proc/net/tcp6"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in lines.splitlines() if ":" in line and "sl" not in line]
        return {_readable(row[1].split(":")[0]) for row in rows if row[3] == "0A"}


@contextlib.contextmanager
def make_hosts(count: int) -> Iterator[list[NamespaceHost]]:
    """So many hosts that reach each other; skips the test where none can be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command `ip`")
    name = f"u{os.getpid()}{next(_numbers)}"
    net = f"10.{os.getpid() % 200 + 20}.{next(_numbers) % 250}"
    hosts = [NamespaceHost(f"{name}n{i}", f"{net}.{i + 1}", f"{name}v{i}") for i in range(count)]
    with contextlib.ExitStack() as stack:
        try:
            _ip("link", "add", f"{name}b", "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no bridge can be made here: {error.stderr}")
        stack.callback(_ip, "link", "del", f"{name}b")
        _ip("link", "set", f"{name}b", "up")
        for host in hosts:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
            _connect(host, f"{name}b")
        yield hosts


def _connect(host: NamespaceHost, bridge: str) -> None:
    inside = ("-n", host.namespace)
    ends = ("type", "veth", "peer", "name", "eth0", "netns", host.namespace)
    _ip("link", "add", host.cable, *ends)
    _ip("link", "set", host.cable, "master", bridge, "up")
    _ip(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip(*inside, "link", "set", "eth0", "up")
    _ip(*inside, "link", "set", "lo", "up")
    # A second network that leads nowhere, as many machines have one.
    _ip(*inside, "link", "add", "other0", "type", "bridge")
    _ip(*inside, "addr", "add", "172.31.0.1/24", "dev", "other0")
    _ip(*inside, "link", "set", "other0", "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _readable(digits: str) -> str:
    if len(digits) > 8:
        return "::" if not int(digits, 16) else digits
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(digits)))
