"""What somebody without the run's secret can do to its control channel: delay it, and no more."""

import contextlib
import json
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launcher_variables import ONE_NODE, SECRET, of_node, start, task, tf_config, told
from launching import wait_for

from unisono.launch.environments import server_address
from unisono.slurm.step import coordinator, read_step
from unisono.topology import read_topology

LOOPBACK, OTHER_LOOPBACK = "127.0.0.1", "127.0.0.2"
NESTED = b"[" * 4092
LENGTH = struct.Struct("!I")

Change = Callable[[str, bytes, int], bytes]

SCRIPT = """
import json, sys, time
from pathlib import Path
import unisono
from unisono.launch.client import current_world

folder, how = Path(sys.argv[1]), sys.argv[2]
facts, world = unisono.topology(), current_world()
world.all_gather("before", facts.rank)
if facts.is_chief:
    (folder / "draft").write_text(facts.coordinator)
    (folder / "draft").rename(folder / "coordinator")
while how == "wait" and not (folder / "go").exists():
    time.sleep(0.01)
if how == "nest" and facts.rank == 1:
    dumps = json.dumps
    json.dumps = lambda *args, **kwargs: '{"do":' + "[" * 100_000 + "]" * 100_000 + "}"
    world.announce("")
    json.dumps = dumps
if how == "babble" and facts.rank == 1:
    world.announce({})
print(world.all_gather("after", [facts.rank, world.seed]))
"""


@pytest.fixture
def script(folder) -> Path:
    path = folder / "script.py"
    path.write_text(SCRIPT)
    return path


@contextlib.contextmanager
def strangers(address: tuple[str, int], *words: bytes) -> Iterator[list[socket.socket]]:
    """Connections that say something and stay; those that are turned away do not matter."""
    with contextlib.ExitStack() as stack:
        opened = []
        for word in words:
            with contextlib.suppress(OSError):
                opened.append(stack.enter_context(socket.create_connection(address, timeout=5)))
                opened[-1].sendall(word)
        yield opened


def is_ended(stranger: socket.socket) -> bool:
    """Whether the other side has closed a connection, within a while."""
    stranger.settimeout(5)
    try:
        while stranger.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_what_strangers_say_does_not_stall_a_run(run, script, folder):
    started = run("--replicas", 2, "--timeout", 5, script, folder, "wait")
    wait_for(folder, "coordinator")
    host, _, port_text = (folder / "coordinator").read_text().rpartition(":")
    words = [
        LENGTH.pack(len(NESTED)) + NESTED,
        NESTED,
        LENGTH.pack(1 << 31) + b"{}" * 50,
        b"GET / HTTP/1.1\r\n\r\n" * 8,
        bytes(64),
        os.urandom(1 << 20),
    ]
    with strangers((host, int(port_text)), *words) as opened:
        assert all(map(is_ended, opened))
        with strangers((host, int(port_text)), *[b"", b"\0"] * 100):  # These stay, and wait.
            (folder / "go").touch()
            code, out, err = started.wait()
    assert (code, err) == (0, "")
    assert [rank for rank, _ in json.loads(out)] == [0, 1]


@pytest.mark.parametrize(("how", "cause"), [("nest", "RecursionError"), ("babble", "TypeError")])
def test_a_process_whose_messages_make_no_sense_is_named(run, script, folder, how, cause):
    code, _, err = run("--replicas", 2, "--timeout", 20, script, folder, how).wait()
    assert code == 1
    last = err.rpartition("unisono: ")[2]
    assert last.startswith("rank 1 (process ")
    assert cause in last
    assert "did not come to" not in last


def test_a_flood_passes_and_nodes_get_in(run, port, script, folder):
    few_files = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    first = run(*of_node(2, 0, port), script, folder, "go", prefix=few_files, **SECRET)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection((LOOPBACK, port)).close()
            break
        time.sleep(0.02)
    with strangers((LOOPBACK, port), *[b"?"] * 200):
        time.sleep(0.5)  # Until all of them have been accepted, or none can be any more.
        second = run(*of_node(2, 1, port), script, folder, "go", **SECRET)
        ends = [each.wait(30) for each in (first, second)]
    assert [code for code, _, _ in ends] == [0, 0], ends


def relay(listener: socket.socket, target: tuple[str, int], change: Change) -> None:
    """Pass on what two ends say, changed as `change(direction, data, num_before)` says."""
    while True:
        caller = listener.accept()[0]
        host = None
        while host is None:  # It may not listen yet.
            with contextlib.suppress(ConnectionRefusedError):
                host = socket.create_connection(target, timeout=5)
        host.settimeout(None)
        for direction, ends in (("up", (caller, host)), ("down", (host, caller))):
            in_background(pass_on, change, direction, *ends)


def pass_on(change: Change, direction: str, source: socket.socket, target: socket.socket) -> None:
    num_before = 0
    with source, contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(change(direction, data, num_before))
            num_before += 1
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)  # Then it is closed by who reads from it.


def in_background(function: Callable[..., None], *words: object) -> None:
    """Until what it uses is closed, at the end of the test."""

    def run() -> None:
        with contextlib.suppress(OSError):
            function(*words)

    threading.Thread(target=run, daemon=True).start()


def other_seed(direction: str, data: bytes, num_before: int) -> bytes:
    return re.sub(rb'(?<="seed":)\d', lambda digit: b"1" if digit[0] != b"1" else b"2", data)


def first_bit(direction: str, data: bytes, num_before: int) -> bytes:
    """Of what comes first after the proofs, which is a length or guards one."""
    is_meant = direction == "down" and num_before == 2
    return bytes([data[0] ^ 0x80]) + data[1:] if is_meant else data


def repeated(direction: str, data: bytes, num_before: int) -> bytes:
    return data * 2 if direction == "up" and num_before == 2 else data


def left_out(direction: str, data: bytes, num_before: int) -> bytes:
    return b"" if direction == "up" and num_before == 2 else data


CHANGES: list[Change] = [other_seed, first_bit, repeated, left_out]


def through_relay(folder: Path, change: Change, **env: str) -> list:
    """Two processes of mpirun, the second of which reaches the first through a relay."""
    with socket.create_server((LOOPBACK, 0)) as trial:
        place = trial.getsockname()[1]
    with socket.create_server((OTHER_LOOPBACK, place)) as listener:
        in_background(relay, listener, (LOOPBACK, place), change)
        processes = [
            start(
                folder,
                ONE_NODE["openmpi"](rank)
                | SECRET
                | {"UNISONO_COORDINATOR": f"{host}:{place}", "UNISONO_TIMEOUT": "20"}
                | env,
                SEEDS,
            )
            for rank, host in enumerate((LOOPBACK, OTHER_LOOPBACK))
        ]
        ends = [process.communicate(timeout=60) for process in processes]
    codes = [process.returncode for process in processes]
    return [(code, out, err) for code, (out, err) in zip(codes, ends, strict=True)]


SEEDS = """
from unisono.launch.client import current_world
world = current_world()
seeds = world.all_gather("seeds", world.seed)
# A second message, since what came behind the first is read with it or not, as it happens.
assert world.all_gather("again", world.seed) == seeds
print(seeds)
"""


def test_a_relay_that_changes_nothing_is_not_noticed(tmp_path):
    ends = through_relay(tmp_path, lambda direction, data, num_before: data)
    assert [code for code, _, _ in ends] == [0, 0], ends
    seeds = {seed for _, out, _ in ends for seed in json.loads(out)}
    assert len(seeds) == 1


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_relay_that_changes_something_is_found_out(tmp_path, change):
    ends = through_relay(tmp_path, change)
    assert [code for code, _, _ in ends] == [1, 1], ends
    assert "its authentication code is wrong" in ends[1][2]
    assert "PeerLostError: Rank 1 " in ends[0][2]


def nothing_after_proofs(direction: str, data: bytes, num_before: int) -> bytes:
    return data if direction == "up" or num_before < 2 else b""


def test_a_relay_that_passes_on_nothing_more_does_not_hold_a_process_for_ever(tmp_path):
    ends = through_relay(tmp_path, nothing_after_proofs, UNISONO_START_TIMEOUT="2")
    assert [code for code, _, _ in ends] == [1, 1], ends
    assert (
        "LaunchError: The rendezvous server admitted rank 1, and then did not answer" in ends[1][2]
    )
    assert "PeerLostError: Rank 1 " in ends[0][2]


def squat_silently(listener: socket.socket) -> None:
    kept = []
    while True:
        kept.append(listener.accept()[0])


def squat_with_noise(listener: socket.socket) -> None:
    while True:
        with listener.accept()[0] as caller, contextlib.suppress(OSError):
            caller.sendall(os.urandom(1 << 16))


def squat_drop_by_drop(listener: socket.socket) -> None:
    """Promises a message of the largest size that strangers may send, and takes its time."""
    while True:
        in_background(drip, listener.accept()[0])


def drip(caller: socket.socket) -> None:
    with caller, contextlib.suppress(OSError):
        caller.sendall(LENGTH.pack(1 << 12))
        while True:
            caller.sendall(b" ")
            time.sleep(0.5)


def squat_as_relay(listener: socket.socket, target: tuple[str, int]) -> None:
    """Passes on all that is said while it is only looked for, and nothing more."""
    relay(listener, target, lambda direction, data, num_before: data if num_before < 2 else b"")


SQUATTERS = {
    "silent": squat_silently,
    "noise": squat_with_noise,
    "drops": squat_drop_by_drop,
    "relay": squat_as_relay,
}


@pytest.mark.parametrize("kind", SQUATTERS)
def test_who_squats_on_a_port_that_can_be_guessed_only_delays(tmp_path, kind):
    """Here two processes of one machine take each other for hosts of a cluster."""
    with contextlib.ExitStack() as stack:
        envs, ports, listener = guessed_place(stack)
        target = [(LOOPBACK, ports[1])] if kind == "relay" else []
        in_background(SQUATTERS[kind], listener, *target)
        first = start(tmp_path, envs[0])
        second = start(tmp_path, envs[1])
        answers = told([first, second])
    assert [answer[:3] for answer in answers] == [
        ["tf_config", [0, 1], f"{LOOPBACK}:{ports[1]}"]
    ] * 2


def test_who_squats_on_the_port_of_launchers_only_delays(run, script, folder):
    """Two launchers that srun has started, the ports of whose run follow from its numbers."""
    with contextlib.ExitStack() as stack:
        for job in range(1, 100):
            number = {"SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": LOOPBACK}
            envs = [task("1(x2)", 0, node=node) | number | SECRET for node in (0, 1)]
            address, others, _ = coordinator(read_step(envs[0]), envs[0], 0)
            if listener := listen_at((int(address.rpartition(":")[2]), *others)):
                in_background(squat_as_relay, stack.enter_context(listener), (LOOPBACK, others[0]))
                break
        options = ["--replicas", 1, "--start-timeout", 30]
        ends = [run(*options, script, folder, "go", **env) for env in envs]
        assert [each.wait()[0] for each in ends] == [0, 0]


def listen_at(ports: tuple[int, ...]) -> socket.socket | None:
    """A listener at the first port of a run; None where somebody else has it, or the second."""
    try:
        socket.create_server((LOOPBACK, ports[1])).close()
        return socket.create_server((LOOPBACK, ports[0]))
    except OSError:
        return None


def guessed_place(stack: contextlib.ExitStack) -> tuple[list[dict], tuple[int, ...], socket.socket]:
    """Variables of two processes, the ports of their run, and a listener at the first of these."""
    for number in range(1, 100):
        hosts = [f"{LOOPBACK}:{number}", f"localhost:{number}"]
        envs = [tf_config("worker", rank, worker=hosts) | SECRET for rank in (0, 1)]
        ports = server_address(read_topology(envs[0]), envs[0]).ports
        if listener := listen_at(ports):
            return envs, ports, stack.enter_context(listener)
    raise AssertionError("no run has two free ports")
