"""Launchers of several nodes, on one machine: they agree on ranks, or say why they can't."""

import contextlib
import os
import signal
import socket
import time

import pytest
from launcher_variables import SECRET, of_node
from launching import END_S, SCRIPT, Run, ended_within, pids_in, wait_for


@pytest.fixture
def nodes(run, port):
    """`nodes(2, 1, script, ...)`: one launcher for each number of processes."""

    def start(*words: object, options=()) -> list[Run]:
        counts = [word for word in words if isinstance(word, int)]
        program = words[len(counts) :]
        return [
            run(*of_node(len(counts), i, port), "--replicas", count, *options, *program, **SECRET)
            for i, count in enumerate(counts)
        ]

    return start


def test_ranks_go_through_the_nodes_in_order(nodes, folder):
    ends = [each.wait() for each in nodes(2, 1, 3, "--show", "all", SCRIPT, folder, "well")]
    assert [code for code, _, _ in ends] == [0, 0, 0]
    for rank, node in enumerate([0, 0, 1, 2, 2, 2]):
        prefix = f"[rank {rank}] " if rank else ""
        lines = ends[node][1].splitlines()
        assert f"{prefix}rank {rank} of 6 is here" in lines
        assert f"{prefix}[0, 1, 2, 3, 4, 5]" in lines
    assert ended_within(pids_in(folder), 0.5)


@pytest.mark.parametrize("name", ["localhost", "[::1]"])
def test_the_coordinator_may_have_a_name_or_a_long_address(run, port, folder, name):
    place = ["--coordinator", f"{name}:{port}", "--nodes", 2, "--node-rank"]
    started = [run(*place, node, SCRIPT, folder, "well", **SECRET) for node in (0, 1)]
    assert [each.wait()[:2] for each in started] == [(0, "rank 0 of 2 is here\n[0, 1]\n"), (0, "")]


def test_horovods_total_is_for_all_nodes(run, port, folder):
    started = [
        run(*of_node(2, node, port), "-np", 3, "-H", "a:2,b:2", SCRIPT, folder, "well", **SECRET)
        for node in (0, 1)
    ]
    assert [each.wait()[0] for each in started] == [0, 0]
    assert len(pids_in(folder)) == 3


@pytest.mark.parametrize("counts", [(1, 2), (2, 1)], ids=["on another node", "on node 0"])
@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [("raise", 1, "raised ValueError"), ("SIGKILL", 137, "was ended by SIGKILL")],
)
def test_a_process_that_fails_ends_all_nodes(nodes, folder, counts, how, code, cause):
    ends = [each.wait() for each in nodes(*counts, SCRIPT, folder, how)]
    assert ended_within(pids_in(folder), 0.5)
    pid = (folder / "pid-1").read_text()
    for found, _, err in ends:
        assert found == code
        last = err.rpartition("unisono: ")[2]
        assert last.startswith(f"rank 1 (process {pid} on host {socket.gethostname()} at 127.")
        assert cause in last
        assert "[rank 1] rank 1 of 3 is here" in err
        if how == "raise":
            assert last.splitlines()[-1] == "ValueError: boom"


def test_a_stopped_process_is_named_on_all_nodes_with_all_stacks(nodes, folder):
    started = nodes(1, 2, SCRIPT, folder, "SIGSTOP", options=["--timeout", 3])
    for each in started:
        code, _, err = each.wait()
        assert code == 1
        assert "has been stopped (SIGSTOP, or Ctrl-Z) for " in err.rpartition("unisono: rank 1")[2]
        for rank in range(3):
            pid = (folder / f"pid-{rank}").read_text()
            stack = err.split(f"rank {rank} (process {pid} on host ")[1].split("\n\n")[0]
            assert f'File "{SCRIPT}", line' in stack
    assert ended_within(pids_in(folder), 0.5)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_launcher_that_is_killed_ends_all_nodes(nodes, folder, killed):
    started = nodes(1, 2, SCRIPT, folder, "sleep")
    wait_for(folder, *(f"ready-{rank}" for rank in range(3)))
    pids = pids_in(folder)
    started[killed].process.kill()
    assert ended_within(pids, END_S)
    code, _, err = started[1 - killed].wait()
    assert code == 1
    assert "is lost: its launcher is gone. All processes of the run were ended." in err


@pytest.mark.parametrize("asked", [0, 1])
def test_an_interrupt_on_any_node_ends_all(nodes, folder, asked):
    started = nodes(1, 1, SCRIPT, folder, "sleep")
    wait_for(folder, "ready-0", "ready-1")
    pids = pids_in(folder)
    started[asked].process.send_signal(signal.SIGINT)
    assert ended_within(pids, END_S)
    for each in started:
        code, _, err = each.wait()
        assert code == 130
        assert "was told to end the run by SIGINT" in err


def test_a_launcher_that_was_stopped_itself_blames_nobody(nodes, folder):
    """Only its own silence is noticed, by the other node."""
    started = nodes(1, 1, SCRIPT, folder, "sleep", options=["--timeout", 4])
    wait_for(folder, "ready-0", "ready-1")
    os.kill(started[0].process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.kill(started[0].process.pid, signal.SIGCONT)
    with pytest.raises(Exception, match="timed out"):
        started[0].wait(2.5)
    assert len([pid for pid in pids_in(folder) if not ended_within([pid], 0)]) == 2


def test_numbers_of_nodes_that_disagree(run, port, folder):
    first = run(*of_node(2, 0, port), "--start-timeout", 4, SCRIPT, folder, "well", **SECRET)
    code, _, err = run(*of_node(3, 1, port), SCRIPT, folder, "well", **SECRET).wait()
    assert code == 1
    assert "was started with --nodes 3, node 0 (host " in err
    code, _, err = first.wait()
    assert code == 1
    assert "Of 2 nodes, 1 did not connect to the coordinator within 4 s." in err
    assert pids_in(folder) == []


def test_a_huge_number_of_nodes_is_not_listed(run, port, folder):
    count = 99_999_999
    first = run(*of_node(count, 0, port), "--start-timeout", 1, SCRIPT, folder, "well", **SECRET)
    code, _, err = first.wait()
    assert code == 1
    assert f"Of {count} nodes, 1, 2, 3, " in err
    assert f", 16, and {count - 17} more did not connect" in err


def test_sizes_of_the_world_that_disagree(run, port, folder):
    options = ["-H", "a:1,b:1", "-np", 2], ["-H", "a:1,b:2", "-np", 3]
    started = [
        run(*of_node(2, node, port), *option, SCRIPT, folder, "well", **SECRET)
        for node, option in enumerate(options)
    ]
    for each in started:
        code, _, err = each.wait()
        assert code == 1
        assert "was started for a world of 2 processes; the nodes have 3" in err
    assert pids_in(folder) == []


def test_the_same_node_twice(run, port, folder):
    first = run(*of_node(3, 0, port), "--start-timeout", 6, SCRIPT, folder, "well", **SECRET)
    others = [run(*of_node(3, 1, port), SCRIPT, folder, "well", **SECRET) for _ in range(2)]
    texts = [each.wait()[2] for each in others]
    assert sum("Node rank 1 was given twice: to host " in text for text in texts) == 1
    assert sum("Of 3 nodes, 2 did not connect to the coordinator" in text for text in texts) == 1
    assert first.wait()[0] == 1


def test_a_coordinator_that_is_in_use(run, port, folder):
    with socket.create_server(("127.0.0.1", port)):
        code, _, err = run(*of_node(2, 0, port), SCRIPT, folder, "well", **SECRET).wait()
    assert code == 1
    assert f"Cannot listen at 127.0.0.1:{port}, the coordinator's address" in err


def test_another_secret_is_refused(run, port, folder):
    first = run(*of_node(2, 0, port), "--start-timeout", 4, SCRIPT, folder, "well", **SECRET)
    other = run(*of_node(2, 1, port), SCRIPT, folder, "well", UNISONO_SECRET="guessed")
    code, _, err = other.wait()
    assert code == 1
    assert "their secrets differ. Give every node the same UNISONO_SECRET" in err
    assert first.wait()[0] == 1
    assert pids_in(folder) == []


def test_strangers_do_not_keep_a_run_from_starting(run, port, folder):
    first = run(*of_node(2, 0, port), SCRIPT, folder, "well", **SECRET)
    strangers = []
    deadline = time.monotonic() + 30
    while len(strangers) < 3 and time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
        time.sleep(0.05)
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
    strangers[1].sendall(b"\xff" * 100)
    second = run(*of_node(2, 1, port), SCRIPT, folder, "well", **SECRET)
    assert [each.wait()[0] for each in (first, second)] == [0, 0]
    for stranger in strangers:
        stranger.close()


def test_the_secret_may_be_a_file_of_the_user(run, port, folder):
    started = [
        run(*of_node(2, node, port), SCRIPT, folder, "well", HOME=str(folder)) for node in (0, 1)
    ]
    assert [each.wait()[0] for each in started] == [0, 0]
    path = folder / ".config" / "unisono" / "secret"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    code, _, err = run(*of_node(2, 1, port), SCRIPT, folder, "well", HOME=str(folder)).wait()
    assert code == 1
    assert f"The secret in {path} can be read by others." in err
