"""Who can connect to what the frameworks of a run listen on: tried from other hosts."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import keras
import pytest
from launching import (
    FOREIGN,
    NAMES,
    children,
    end_all,
    ended_within,
    is_running,
    listening_ports,
    pids_in,
    wait_for,
)
from namespaces import make_hosts

BACKEND = keras.backend.backend()
ENDLESS = Path(__file__).with_name("endless.py")
PATIENCE_S = 280.0
ENVIRONMENT = {"KERAS_BACKEND": BACKEND, "TF_CPP_MIN_LOG_LEVEL": "2"}
CONNECT = """
import json, socket, sys
found = []
for port in map(int, sys.argv[2:]):
    try:
        socket.create_connection((sys.argv[1], port), timeout=1).close()
        found.append(port)
    except OSError:
        pass
print(json.dumps(found))
"""


@pytest.fixture
def hosts():
    with make_hosts(3) as made:
        yield made


def reached(source, target, ports) -> set[int]:
    """The ports of one host to which a connection from another can be made."""
    words = [*source.prefix, sys.executable, "-c", CONNECT, target.address, *map(str, ports)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    return set(json.loads(done.stdout))


# As a plain user on kernels that let the privileged alone filter TCP.
PLAIN = ["setpriv", "--bounding-set=-net_admin", "--inh-caps=-net_admin"]


@pytest.mark.namespaces
@pytest.mark.parametrize(
    "rights", [[], pytest.param(PLAIN, marks=pytest.mark.slow)], ids=["root", "plain"]
)
def test_a_run_on_one_machine_is_not_reached_from_another(run, hosts, folder, rights):
    run("--replicas", 2, ENDLESS, folder, prefix=[*hosts[0].prefix, *rights], **ENVIRONMENT)
    wait_for(folder, "ready-0", "ready-1", timeout_s=PATIENCE_S)
    for ports in listening_ports(pids_in(folder)).values():
        assert ports
        assert reached(hosts[1], hosts[0], ports) == set()
    assert all(map(is_running, pids_in(folder)))


@pytest.mark.slow
@pytest.mark.namespaces
def test_only_hosts_of_a_run_reach_it(run, hosts, folder):
    for node, host in enumerate(hosts[:2]):
        run(
            *("--nodes", 2, "--node-rank", node, "--replicas", 1),
            *("--coordinator", f"{hosts[0].address}:4000", ENDLESS, folder),
            prefix=host.prefix,
            UNISONO_SECRET="known to all hosts",
            **ENVIRONMENT,
        )
    wait_for(folder, "ready-0", "ready-1", timeout_s=PATIENCE_S)
    for node, host in enumerate(hosts[:2]):
        pid = int((folder / f"pid-{node}").read_text())
        (ports,) = listening_ports([pid]).values()
        assert ports
        assert reached(hosts[1 - node], host, ports) == ports
        assert reached(hosts[2], host, ports) == set()
    assert all(map(is_running, pids_in(folder)))


# Programs that `unisono bench` compares with, and how many ports their first process opens.
PEERS = {"jax": ("shard_map", 2), "tensorflow": ("bare_multiworker", 1), "torch": ("raw_ddp", 1)}
BENCH = """
import sys
from unisono.bench.race import Way, run_race
print(run_race("mnist", sys.argv[1], [Way(sys.argv[2], 2, 2)], rounds=0).failed)
"""


@pytest.mark.slow
@pytest.mark.namespaces
def test_programs_of_a_benchmark_are_not_reached_from_another_machine(hosts):
    kind, num_ports = PEERS[BACKEND]
    words = [*hosts[0].prefix, sys.executable, "-c", BENCH, BACKEND, kind]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        ports: list[set[int]] = []
        while sorted(map(len, ports)) != sorted([1, num_ports]):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.05)
            # The process that ends the others, should this one be killed, has no port.
            found = listening_ports(children(process.pid)).values()
            ports = [each for each in found if each]
        assert reached(hosts[1], hosts[0], set().union(*ports)) == set()
    finally:
        pids = children(process.pid)
        process.kill()
        process.communicate()
        assert ended_within(pids, 10)


@pytest.mark.skipif(BACKEND != "jax", reason="about the service of JAX's processes")
def test_strangers_neither_end_the_service_of_jax_nor_keep_it(run, folder):
    launcher = run("--replicas", 2, ENDLESS, folder, **ENVIRONMENT)
    wait_for(folder, "ready-0", "ready-1", timeout_s=PATIENCE_S)
    (service,) = children(int((folder / "pid-0").read_text()))
    (ports,) = listening_ports([service]).values()
    assert len(ports) == 2
    everyone = [service, *pids_in(folder)]
    for port in ports:
        # The token's first digit is treated as any other: it cannot be guessed digit by digit.
        assert len({_is_kept(port, digit) for digit in b"0123456789abcdef"}) == 1
    with contextlib.ExitStack() as strangers:
        # It has no descriptor left for them, at first.
        limit = len(list(Path(f"/proc/{service}/fd").iterdir()))
        before = resource.prlimit(service, resource.RLIMIT_NOFILE)
        resource.prlimit(service, resource.RLIMIT_NOFILE, (limit, before[1]))
        _call(ports, 10, strangers)
        assert not ended_within(everyone[:1], 1.0)
        resource.prlimit(service, resource.RLIMIT_NOFILE, before)
        _call(ports, 100, strangers)
        time.sleep(1)
        assert all(map(is_running, everyone))
        launcher.process.terminate()
        assert ended_within(everyone, 10)


def _is_kept(port: int, digit: int) -> bool:
    """Whether a stranger who has said one digit stays connected."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.settimeout(0.2)
        stranger.sendall(bytes([digit]))
        try:
            return bool(stranger.recv(1 << 16))
        except TimeoutError:
            return True


def _call(ports: Iterable[int], count: int, strangers: contextlib.ExitStack) -> None:
    for port in ports:
        for _ in range(count):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))


@pytest.mark.skipif(BACKEND != "tensorflow", reason="about TensorFlow's own variable")
def test_servers_listen_at_the_ports_of_tf_config(folder):
    ports = _free_ports(2)
    chief, worker = (f"localhost:{port}" for port in ports)
    cluster = {"chief": [chief], "worker": [worker], "ps": ["elsewhere:1"]}
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(FOREIGN) and name not in NAMES
    }
    errors = [folder / f"stderr-{rank}" for rank in range(2)]
    processes = []
    try:
        for rank in range(2):
            task = {"type": ("chief", "worker")[rank], "index": 0}
            config = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
            with errors[rank].open("w") as stderr:
                words = [sys.executable, str(ENDLESS), str(folder)]
                env = inherited | ENVIRONMENT | config
                processes.append(subprocess.Popen(words, env=env, stderr=stderr))
        wait_for(folder, "ready-0", "ready-1", timeout_s=PATIENCE_S)
        found = listening_ports(process.pid for process in processes)
        for rank, process in enumerate(processes):
            assert ports[rank] in found[process.pid]
        # The rendezvous is the first one's too.
        assert [len(found[process.pid]) for process in processes] == [2, 1]
        counts = [path.read_text().count("TensorFlow's servers authenticate") for path in errors]
        assert counts == [1, 0]
    finally:
        end_all(process.pid for process in processes)
        assert ended_within([process.pid for process in processes], 5)
        for process in processes:
            process.wait()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports
