"""Training on several hosts, each a network namespace with an address of its own."""

import os
import signal
import time

import keras
import pytest
from launching import END_S, ended_within, pids_in, wait_for
from namespaces import make_hosts
from test_world import HERE

from exactness.results import read_cells

BACKEND = keras.backend.backend()
PORT = 4000
SECRET = {"UNISONO_SECRET": "known to all hosts"}
PATIENCE_S = 280.0
ENDLESS = HERE / "endless.py"
# One process on a host is less of the same: on torch, where it is short, it runs without `slow`.
PER_HOST = [*([1] if BACKEND == "torch" else []), pytest.param(2, marks=pytest.mark.slow)]


@pytest.fixture
def hosts():
    with make_hosts(2) as made:
        yield made


@pytest.fixture
def run_on(run):
    def start(hosts, per_host, *words, options=()):
        return [
            run(
                *("--nodes", len(hosts), "--node-rank", node, "--replicas", per_host, *options),
                *("--coordinator", f"{hosts[0].address}:{PORT}", *words),
                prefix=host.prefix,
                KERAS_BACKEND=BACKEND,
                TF_CPP_MIN_LOG_LEVEL="2",
                **SECRET,
            )
            for node, host in enumerate(hosts)
        ]

    return start


@pytest.mark.namespaces
@pytest.mark.parametrize("per_host", PER_HOST)
def test_hosts_agree_with_one_device(run_on, hosts, tmp_path, per_host):
    out = tmp_path / "cells.jsonl"
    names = ["batch_norm_conv", "rows_47_batch_24"]
    words = ["-m", "exactness.measure", "--out", out, "--cases", ",".join(names)]
    started = run_on(hosts, per_host, *words, "--replicas", 2 * per_host)
    ends = [each.wait(PATIENCE_S) for each in started]
    assert [code for code, _, _ in ends] == [0, 0], ends
    cells = read_cells(out)
    assert [cell.case for cell in cells] == names
    for cell in cells:
        assert cell.processes == 2 * per_host
        assert not cell.failed, f"{cell.deviation} at {cell.where}"


@pytest.mark.slow
@pytest.mark.namespaces
def test_a_cut_link_ends_the_training(run_on, hosts, folder):
    timeout_s = 8
    started = run_on(hosts, 1, ENDLESS, folder, options=["--timeout", timeout_s])
    wait_for(folder, "ready-0", "ready-1", timeout_s=PATIENCE_S)
    hosts[1].cut()
    assert ended_within(pids_in(folder), timeout_s + END_S + 5)
    for node, each in enumerate(started):
        code, _, err = each.wait()
        assert code == 1
        assert hosts[1 - node].address in err.rpartition("unisono: ")[2]
        assert "is lost: no message for" in err.rpartition("unisono: ")[2]


def test_a_killed_process_ends_the_training(run, folder):
    started = run("--replicas", 2, ENDLESS, folder, KERAS_BACKEND=BACKEND)
    wait_for(folder, "ready-0", "ready-1", timeout_s=PATIENCE_S)
    pids = pids_in(folder)
    os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
    begun = time.monotonic()
    assert ended_within(pids, END_S)
    assert time.monotonic() - begun < END_S
    code, _, err = started.wait()
    assert code == 128 + signal.SIGKILL
    last = err.rpartition("unisono: ")[2]
    assert last.startswith("rank 1 ")
    assert "SIGKILL" in last
