"""Runs on several hosts, each a network namespace with an address of its own."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import SCRIPT, Run, ended_within, pids_in, wait_for
from namespaces import NamespaceHost, make_hosts

pytestmark = pytest.mark.namespaces
SECRET = {"UNISONO_SECRET": "known to all hosts"}
PORT = 4000
ECHO = """
import json, os, sys, unisono
from unisono.launch.client import current_world
names = ("UNISONO_HOST", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
facts, world = unisono.topology(), current_world()
mine = [facts.rank, facts.node, facts.local_rank, world.host, *(os.environ.get(n) for n in names)]
print(json.dumps(world.all_gather("who", mine)))
"""


@pytest.fixture
def hosts():
    with make_hosts(3) as made:
        yield made


@pytest.fixture
def run_on(run):
    """A launcher on each host, with so many processes each."""

    def start(hosts: list[NamespaceHost], counts, *words: object, options=()) -> list[Run]:
        return [
            run(
                *("--nodes", len(hosts), "--node-rank", node, "--replicas", count),
                *("--coordinator", f"{hosts[0].address}:{PORT}", *options, *words),
                prefix=host.prefix,
                **SECRET,
            )
            for node, (host, count) in enumerate(zip(hosts, counts, strict=True))
        ]

    return start


@pytest.mark.parametrize("options", [[], ["--interface", "eth0"]], ids=["found", "named"])
def test_processes_of_three_hosts_meet(run_on, hosts, tmp_path, options):
    (tmp_path / "echo.py").write_text(ECHO)
    started = run_on(hosts, (2, 1, 1), tmp_path / "echo.py", options=options)
    ends = [each.wait() for each in started]
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    told = json.loads(ends[0][1])
    places = [(0, 0), (0, 1), (1, 0), (2, 0)]
    for rank, (node, local_rank) in enumerate(places):
        address = hosts[node].address
        assert told[rank] == [rank, node, local_rank, address, address, "eth0", "eth0"]


def test_only_the_chosen_address_is_listened_on(run_on, hosts, folder):
    started = run_on(hosts[:2], (1, 1), SCRIPT, folder, "sleep")
    wait_for(folder, "ready-0", "ready-1")
    assert hosts[0].listening() == {hosts[0].address}
    assert hosts[1].listening() == set()
    started[0].process.terminate()
    assert [each.wait()[0] for each in started] == [143, 143]


@pytest.mark.parametrize("cut", [0, 1])
def test_a_cut_link_ends_both_sides(run_on, hosts, folder, cut):
    timeout_s = 5
    started = run_on(hosts[:2], (2, 2), SCRIPT, folder, "sleep", options=["--timeout", timeout_s])
    wait_for(folder, *(f"ready-{rank}" for rank in range(4)))
    pids = pids_in(folder)
    hosts[cut].cut()
    begun = time.monotonic()
    assert ended_within(pids, timeout_s + 5)
    # The launcher's last word before the cut may be a second old.
    assert time.monotonic() - begun > timeout_s - 1.5
    for node, each in enumerate(started):
        code, _, err = each.wait()
        assert code == 1
        other = hosts[1 - node].address
        last = err.rpartition("unisono: ")[2]
        assert re.match(rf"(node 0 \()?host \S+ at {re.escape(other)}\)? is lost: ", last)
        assert "is lost: no message for 5 s" in last


def test_a_failure_is_told_on_every_host(run_on, hosts, folder):
    started = run_on(hosts, (1, 1, 1), SCRIPT, folder, "raise")
    for each in started:
        code, _, err = each.wait()
        assert code == 1
        last = err.rpartition("unisono: ")[2]
        assert f" at {hosts[1].address}) raised ValueError" in last
        assert last.splitlines()[-1] == "ValueError: boom"
    assert ended_within(pids_in(folder), 0.5)


def test_an_address_of_another_host_is_refused(run, hosts, folder):
    words = ["--nodes", 2, "--node-rank", 0, "--coordinator", f"{hosts[1].address}:{PORT}"]
    code, _, err = run(*words, SCRIPT, folder, "well", prefix=hosts[0].prefix, **SECRET).wait()
    assert code == 1
    assert f"is not this machine's, which has lo (127.0.0.1), eth0 ({hosts[0].address})" in (
        " ".join(err.split()).replace("other0 (172.31.0.1), eth0", "eth0")
    )


def test_a_process_without_the_secret_is_refused(run_on, hosts, folder):
    started = run_on(hosts[:2], (1, 1), SCRIPT, folder, "sleep")
    wait_for(folder, "ready-0", "ready-1")
    pid = (folder / "pid-0").read_text()
    env = dict(
        entry.split("=", 1)
        for entry in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if entry.startswith("UNISONO_")
    )
    env |= {"UNISONO_SECRET": "guessed", "UNISONO_START_TIMEOUT": "5"}
    done = subprocess.run(
        [*hosts[1].prefix, sys.executable, "-c", "import unisono"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "LaunchError: The rendezvous server refused this process" in done.stderr
    started[0].process.terminate()
    assert [each.wait()[0] for each in started] == [143, 143]


def test_torchs_launcher_is_recognised_across_hosts(hosts, tmp_path):
    """No torch is needed for it: these are the variables that torchrun sets."""
    (tmp_path / "echo.py").write_text(ECHO)
    processes = []
    for rank in range(2):
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", **SECRET}
        processes.append(
            subprocess.Popen(
                [*hosts[rank].prefix, sys.executable, str(tmp_path / "echo.py")],
                env={**os.environ, **env},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        addresses = [host.address for host in hosts[:2]]
        assert [each[3] for each in json.loads(out)] == addresses
