"""Processes of another launcher find each other: by a file, or by a port that they work out."""

import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from hashlib import sha256
from importlib.machinery import PathFinder

import pytest
from launcher_variables import (
    ONE_NODE,
    OPEN_MPI,
    SCRIPT,
    SRUN,
    TORCHRUN,
    start,
    tf_config,
    told,
)

from unisono.errors import LaunchError
from unisono.joining import is_command
from unisono.launch.environments import ServerAddress, first_host, rendezvous, server_address
from unisono.launch.wire import secret_of_run, shared_secret
from unisono.topology import Topology, read_topology


@pytest.mark.parametrize("launcher", ONE_NODE)
def test_processes_of_one_node_meet(tmp_path, launcher):
    answers = told([start(tmp_path, ONE_NODE[launcher](rank)) for rank in (1, 0)])
    for name, ranks, coordinator, host in answers:
        assert (name, ranks, host) == (launcher, [0, 1], "127.0.0.1")
        assert coordinator == answers[0][2]
    (folder,) = tmp_path.glob("unisono-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []


@pytest.mark.slow
def test_torchrun_itself(tmp_path):
    if PathFinder.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    (tmp_path / "script.py").write_text(SCRIPT)
    # --standalone takes a free port; without it torchrun's is always the same.
    command = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", str(tmp_path / "script.py")]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        assert json.loads(line)[:2] == ["torchrun", [0, 1]]
    assert len(done.stdout.splitlines()) == 2


LONG = """
import unisono
from unisono.errors import DisagreementError
from unisono.launch import wire
from unisono.launch.client import current_world
world = current_world()
if world.rank == 0:
    wire._MOST_BYTES = 1000  # In place of some hundred million.
try:
    world.all_gather("much", "x" * 600)
except DisagreementError as error:
    assert "the most are 1000" in str(error)
    print(world.all_gather("little", world.rank))
"""


def test_an_answer_that_is_too_long_to_be_sent_is_an_error_of_all(tmp_path):
    assert (
        told([start(tmp_path, ONE_NODE["openmpi"](rank), LONG) for rank in (0, 1)]) == [[0, 1]] * 2
    )


def test_two_runs_on_one_node_do_not_mix(tmp_path):
    ports = ("1", "2")
    processes = {
        port: [start(tmp_path, ONE_NODE["torchrun"](r) | {"MASTER_PORT": port}) for r in (0, 1)]
        for port in ports
    }
    coordinators = {port: told(processes[port])[0][2] for port in ports}
    assert coordinators["1"] != coordinators["2"]


def test_a_note_that_was_left_behind_leads_nowhere(tmp_path):
    """By a run of the same name that was killed; its port may be somebody else's now."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        threading.Thread(target=_answer_nonsense, args=(stranger,), daemon=True).start()
        second = start(tmp_path, ONE_NODE["tf_config"](1))
        folder = tmp_path / f"unisono-{os.getuid()}"
        folder.mkdir(mode=0o700)
        name = server_address(read_topology(ONE_NODE["tf_config"](1)), ONE_NODE["tf_config"](1)).run
        note = folder / sha256(name.encode()).hexdigest()[:32]
        note.write_text(json.dumps({"address": f"127.0.0.1:{port}", "secret": "old"}))
        first = start(tmp_path, ONE_NODE["tf_config"](0))
        assert [ranks for _, ranks, *_ in told([first, second])] == [[0, 1], [0, 1]]


def _answer_nonsense(server: socket.socket) -> None:
    while True:
        try:
            with server.accept()[0] as caller:
                caller.sendall(b"hello?")
        except OSError:
            return


def test_a_named_coordinator_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as trial:
        address = f"127.0.0.1:{trial.getsockname()[1]}"
    env = {"UNISONO_COORDINATOR": address}
    answers = told([start(tmp_path, ONE_NODE["openmpi"](rank) | env) for rank in (0, 1)])
    assert [answer[2] for answer in answers] == [address, address]
    assert (tmp_path / ".config" / "unisono" / "secret").exists()


def test_a_first_process_that_does_not_come(tmp_path):
    process = start(tmp_path, ONE_NODE["slurm"](1) | {"UNISONO_START_TIMEOUT": "0.5"})
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "LaunchError: Rank 0 of this run wrote no address to" in err


ACROSS = {
    "torchrun": (TORCHRUN, "a"),
    "slurm": (SRUN, "n1"),
    "tf_config": (tf_config("worker", 2, worker=["a:1", "a:2", "b:1"]), "a"),
}


@pytest.mark.parametrize(("env", "host"), ACROSS.values(), ids=ACROSS)
def test_the_place_across_nodes_is_known_to_all(env, host):
    place = server_address(read_topology(env), env)
    assert place.host == host
    assert len(set(place.ports)) == 8
    assert all(61000 <= port < 65000 for port in place.ports)
    assert server_address(read_topology(env), env) == place


def test_runs_differ_in_their_ports():
    other = SRUN | {"SLURM_JOB_ID": "18"}
    places = [server_address(read_topology(env), env) for env in (SRUN, other)]
    assert not set(places[0].ports) & set(places[1].ports)


def test_mpi_across_nodes_must_be_told():
    with pytest.raises(LaunchError, match=r"mpirun -x UNISONO_COORDINATOR=10\.0\.0\.1:4000"):
        server_address(read_topology(OPEN_MPI), OPEN_MPI)
    env = OPEN_MPI | {"UNISONO_COORDINATOR": "10.0.0.1:4000"}
    assert server_address(read_topology(env), env) == ServerAddress(
        "openmpi 4 ", "10.0.0.1", (4000,)
    )


def test_a_port_that_is_taken_is_passed_over():
    """Here two processes of one machine take each other for hosts of a cluster."""
    env = tf_config("worker", 0, worker=["127.0.0.1:1", "localhost:1"]) | {"UNISONO_SECRET": "s"}
    facts = read_topology(env)
    first, *others = server_address(facts, env).ports
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # By somebody else, which will do.
            stack.enter_context(socket.create_server(("127.0.0.1", first)))
        found, secret = rendezvous(facts, env, start_timeout_s=5)
        assert found.coordinator in [f"127.0.0.1:{port}" for port in others]
        other = Topology(1, 2, 0, 1, 1, 2, None, "tf_config")
        assert rendezvous(other, env, start_timeout_s=5)[0].coordinator == found.coordinator
        with pytest.raises(LaunchError, match="Rank 0 was not found at "):
            rendezvous(other, env | {"UNISONO_SECRET": "guessed"}, start_timeout_s=0.1)
    assert secret != "s"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-4]", "n1"),
        ("gpu[003-007,9],login", "gpu003"),
        ("a,b[1-2]", "a"),
        ("rack[1-2]n[05-06]", "rack1n05"),
    ],
)
def test_the_first_of_slurms_hosts(nodes, first):
    assert first_host(nodes) == first


def test_slurms_hosts_must_be_named():
    with pytest.raises(LaunchError, match="names none"):
        first_host("")


def test_the_users_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert shared_secret({"UNISONO_SECRET": "given"}) == "given"
    made = shared_secret({})
    assert len(made) == 64
    assert shared_secret({}) == made
    path = tmp_path / ".config" / "unisono" / "secret"
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o604)
    with pytest.raises(LaunchError, match="can be read by others"):
        shared_secret({})
    path.chmod(0o600)
    path.write_text("")
    with pytest.raises(LaunchError, match="is empty"):
        shared_secret({})


def test_many_that_come_first_make_one_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = []
    threads = [threading.Thread(target=lambda: found.append(shared_secret({}))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 16


def test_every_run_has_a_secret_of_its_own():
    assert secret_of_run("a", "1") != secret_of_run("a", "2")
    assert secret_of_run("a", "1") != secret_of_run("b", "1")


@pytest.mark.parametrize(
    ("words", "is_ours"),
    [
        (["python", "-m", "unisono", "run"], True),
        (["python", "-X", "dev", "-W", "error", "-m", "unisono"], True),
        (["python", "/usr/bin/unisono", "run", "x.py"], True),
        (["python", "-m", "unisono.recipes.digits"], False),
        (["python", "train.py", "-m", "unisono"], False),
        (["python", "-c", "import unisono"], False),
        (["python"], False),
    ],
)
def test_the_command_itself_joins_no_run(words, is_ours):
    assert is_command(words) == is_ours


def test_the_command_runs_where_another_launcher_started_it(tmp_path):
    """srun starts one launcher of ours on each node: its variables are not for us."""
    env = {**os.environ, **ONE_NODE["slurm"](0), "UNISONO_START_TIMEOUT": "1"}
    command = [sys.executable, "-m", "unisono", "--version"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
