"""The filter by source address, on sockets of both protocols, tried from other hosts."""

import contextlib
import ipaddress
import json
import socket
import subprocess
import sys

import pytest
from namespaces import make_hosts

from unisono.launch.source_filter import OnlyFrom

_DETACH_FILTER = 27
# Listens on all addresses for the addresses that follow, and says its port; ends with its stdin.
LISTEN = """
import os, socket, sys
from unisono.launch.source_filter import OnlyFrom
if sys.argv.pop(1) == "plain":  # Without root's rights.
    os.setgid(65534)
    os.setuid(65534)
with socket.socket(socket.AF_INET6) as other:
    other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    other.bind(("::", 0))
    port = other.getsockname()[1]
    with OnlyFrom(sys.argv[1:], port=port) as guard:
        other.listen()
    print(port, guard.num_guarded, flush=True)
    sys.stdin.read()
"""
CONNECT = """
import json, socket, sys
found = []
for host in sys.argv[2:]:
    try:
        socket.create_connection((host, int(sys.argv[1])), timeout=0.5).close()
        found.append(host)
    except OSError:
        pass
print(json.dumps(found))
"""


@contextlib.contextmanager
def listening(host, user, sources):
    words = [*host.prefix, sys.executable, "-c", LISTEN, user, *sources]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            port, num_guarded = process.stdout.readline().split()
            assert int(num_guarded) == 1
            yield int(port)
        finally:
            process.stdin.close()


def connected(host, port, addresses):
    words = [*host.prefix, sys.executable, "-c", CONNECT, str(port), *addresses]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


@pytest.mark.namespaces
@pytest.mark.parametrize("user", ["root", "plain"])
def test_only_the_named_sources_connect(user):
    with make_hosts(3) as hosts:
        first, second, third = hosts
        of_6 = [f"fd00::{i + 1}" for i in range(3)]
        for host, address in zip(hosts, of_6, strict=True):
            words = ["addr", "add", f"{address}/64", "dev", "eth0", "nodad"]
            subprocess.run(["ip", "-n", host.namespace, *words], check=True)
        targets = [first.address, of_6[0]]
        # Long lists of those that are nobody's, around those that are meant; some are neighbours
        # that become one network. The memory is what many kernels give a socket.
        words = ["sysctl", "-qw", "net.core.optmem_max=20480"]
        subprocess.run([*first.prefix, *words], check=False, stderr=subprocess.DEVNULL)
        lists = [
            [str(ipaddress.ip_address(start) + 2 * i) for i in range(300)]
            for start in ("9.0.0.0", "192.168.0.0", "fc00::", "fd00::1:0")
        ]
        others = [each for many in lists for each in many]
        with listening(first, user, [*others, "fd01::1", second.address, of_6[1]]) as port:
            assert connected(second, port, targets) == targets
            assert connected(third, port, targets) == []
            # Loopback always does; of its own addresses those that were named.
            assert connected(first, port, ["127.0.0.1", "::1", first.address]) == [
                "127.0.0.1",
                "::1",
            ]
        with listening(first, user, [first.address, third.address]) as port:
            assert connected(first, port, [first.address]) == [first.address]
            assert connected(second, port, targets) == []
            assert connected(third, port, targets) == [first.address]


def test_other_sockets_are_left_alone(capsys):
    with socket.create_server(("127.0.0.1", 0)) as before:
        with OnlyFrom([], host="127.0.0.1") as guard, socket.create_server(("127.0.0.2", 0)):
            pass
        assert guard.num_guarded == 0
        with OnlyFrom([], host="127.0.0.1") as guard:
            after = socket.create_server(("127.0.0.1", 0))
        with after:
            assert guard.num_guarded == 1
            assert (_has_filter(before), _has_filter(after)) == (False, True)
    assert capsys.readouterr().err == ""


def _has_filter(sock: socket.socket) -> bool:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
    except OSError:
        return False
    return True


def test_a_filter_that_cannot_be_set_is_reported(capsys):
    # Far more addresses than a filter has room for.
    sources = [str(ipaddress.ip_address("10.0.0.0") + 2 * i) for i in range(5000)]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with OnlyFrom(sources, port=port):
            listener.listen()
    warning = capsys.readouterr().err
    assert f"port {port} authenticates nobody, and could not be closed" in warning
