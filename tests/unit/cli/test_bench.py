"""`unisono bench`: rounds, ratios, verdicts and errors."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unisono.bench.race import Lap, Race, Way, last_line
from unisono.bench.report import TITLES, rows, shares, table, title_of, to_json, verdict
from unisono.bench.scaling import read_program
from unisono.bench.script import warm
from unisono.cli import bench as benchmark
from unisono.cli import main
from unisono.cli.bench import ways_of
from unisono.errors import LaunchError

SCRIPT = """
import keras, numpy as np, unisono
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
model = unisono.parallel(model)
model.compile("sgd", "mse")
model.fit(np.ones((20000, 8)), np.ones((20000, 1)), batch_size=20, epochs=3, verbose=0)
"""


def laps(*rates: float, **waits: float) -> list[Lap]:
    """Passes of 1000 images."""
    return [Lap(rate, 1000 / rate, 1.0, 2**20, **waits) for rate in rates]


def race(**ways) -> Race:
    laps_of = {"-".join(name.rsplit("_", 1)): each for name, each in ways.items()}
    return Race("mnist", "jax", laps_of)


def test_ratios_are_taken_within_a_round():
    """A machine that gets slower does not change them."""
    ways = {"plain_2": laps(80, 40), "apart_2": laps(100, 50), "together_2": laps(90, 45)}
    found = rows(race(**ways, shard_map_2=laps(200, 100)), TITLES)
    assert [row.of_apart for row in found[:3]] == [pytest.approx(0.8), None, pytest.approx(0.9)]
    assert [row.of_limit for row in found[1:]] == [pytest.approx(0.5), pytest.approx(0.45), None]
    assert found[2].of_plain == pytest.approx(1.125)
    assert [row.ours_of_it for row in found[:3]] == [pytest.approx(1.125), pytest.approx(0.9), None]
    assert found[0].spread == pytest.approx(40 / 60)


def test_where_the_time_of_a_step_goes():
    """Of ten seconds eight are computing; replicas waited for one, all of them for a half."""
    together = laps(100, waited_s=1.0, slowest_wait_s=0.5)
    (found,) = shares(race(apart_2=laps(125), together_2=together))
    assert (found.input, found.computing) == (0.0, pytest.approx(0.8))
    assert found.waiting == pytest.approx(0.05)
    assert found.communicating == pytest.approx(0.15)
    assert (found.speed_up, found.efficiency) == (None, pytest.approx(0.8))


def test_speed_up_is_over_one_replica_or_over_plain_keras():
    ways = {"plain_2": laps(80), "apart_2": laps(200), "together_2": laps(160)}
    (found,) = shares(race(**ways))
    assert (found.speed_up, found.efficiency) == (pytest.approx(2.0), pytest.approx(0.8))
    found = shares(race(**ways, apart_1=laps(100), together_1=laps(100)))
    assert [each.speed_up for each in found] == [pytest.approx(1.6), pytest.approx(1.0)]
    text = table(race(**ways, together_1=laps(100)), TITLES)
    assert "unisono run, 2 replicas: speed-up 1.60 (over 1 replica), efficiency 0.80 (of" in text
    assert "speed-up 2.00 (over plain Keras), " in table(race(**ways), TITLES)


@pytest.mark.parametrize(
    ("together", "said"),
    [
        (laps(97), "Computing takes 97%"),
        (laps(80), "Raise the per-replica batch size"),
        (laps(80, waited_s=2.5), "wait 20% of a step for the slowest"),
        (laps(95, input_s=3.0), "Input takes"),
    ],
)
def test_the_verdict_says_what_to_change(together, said):
    assert said in verdict(race(apart_2=laps(100), together_2=together))


def test_one_replica_tells_nothing_of_more():
    said = verdict(race(apart_1=laps(100), together_1=laps(99)))
    assert said.startswith("Computing takes 99% of a step on 1 replica: a faster device will help")


@pytest.mark.parametrize(("num", "first"), [(2, 1), (4, 1), (12, 3)])
def test_the_beginning_of_a_script_does_not_count(num, first):
    assert warm(list(range(num))) == list(range(first, num))


def test_the_table_and_the_json():
    found = race(apart_2=laps(100, 100), together_2=laps(90, 90))
    found.failed["mirrored-2"] = "A process ended with code 1: no"
    text = table(found, TITLES)
    assert "unisono run" in text
    assert "0.900" in text
    assert "mirrored-2: not measured. A process ended with code 1: no" in text
    told = json.loads(json.dumps(to_json(found, TITLES)))
    assert told["rows"][1]["of_apart"] == pytest.approx(0.9)


def test_a_way_that_ends_early_counts_as_far_as_it_came():
    found = race(plain_2=laps(80, 40), together_2=laps(120, 60), distribution_2=laps(60))
    found.failed["distribution-2"] = "In round 2: A process ended with code -6: stuck"
    assert rows(found, TITLES)[2].ours_of_it == pytest.approx(2.0)
    assert "distribution-2: ended early. In round 2: A process ended" in table(found, TITLES)
    (found,) = shares(race(together_2=laps(120, 60), apart_2=laps(160)))
    assert found.computing == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("log", "last"),
    [
        ("", ""),
        ("Traceback\n  File x\nKeyError: 'loss'\n", "KeyError: 'loss'"),
        ("E 1\nF 2 stuck\n*** Check failure stack trace: ***\n    @  0x1 f()\n", "F 2 stuck"),
        ("    @  0x1 f()\n", "@  0x1 f()"),
    ],
)
def test_the_last_line_of_a_process(log, last):
    assert last_line(log) == last


def test_the_ways_of_a_race():
    """`unisono run` is raced with and without its CPU layers, and the limit without --peers."""
    choices = benchmark.cpu_layer_choices("", "torch")
    ways = ways_of("torch", [1, 2], has_peers=False, choices=choices)
    names = "plain-2 one-2 apart-1 together-1 together:none-1 apart-2 together-2 together:none-2"
    assert [way.name for way in ways] == [*names.split(), "inside-2", "raw_ddp-2"]
    assert [way.cpu_layers for way in ways if way.variant] == ["0", "0"]
    ways = ways_of("torch", [2], has_peers=True, choices=choices)
    peers = [way for way in ways if way.kind.endswith("ddp")]
    assert peers == [Way("keras_ddp", 2, 2), Way("raw_ddp", 2, 2)]


def test_an_ablation_turns_each_cpu_layer_off_in_turn():
    choices = benchmark.cpu_layer_choices("ablate", "torch")
    assert list(choices) == ["", "none", "no_batch_norm", "no_conv", "no_pool"]
    assert (choices[""], choices["none"]) == (None, "0")
    assert set(str(choices["no_pool"]).split(",")) == {"batch_norm", "conv"}
    assert benchmark.cpu_layer_choices("conv", "torch") == {"conv": "conv"}
    assert benchmark.cpu_layer_choices("ablate", "tensorflow") == {"": None}  # It has none.
    assert title_of("together:no_max_pool", TITLES) == "unisono run, without max_pool"
    with pytest.raises(LaunchError, match="CPU layers norm; jax has max_pool"):
        benchmark.cpu_layer_choices("norm", "jax")


def bench(*words: object, folder) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "unisono", "bench", *map(str, words)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("UNISONO_", "XLA_"))}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def test_several_nets_in_one_run(tmp_path, monkeypatch):
    """Each with each backend, and written down as soon as it is known."""
    raced = []

    def run_race(net, backend, ways, rounds, tell):
        raced.append((net, backend))
        return Race(net, backend, {"plain-2": laps(100.0), "together-2": laps(150.0)})

    monkeypatch.setattr(benchmark, "run_race", run_race)
    words = ["bench", "--recipe", "digits,mnist", "--backend", "jax,torch", "--output", "out"]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    assert raced == [(net, each) for net in ("digits", "mnist") for each in ("jax", "torch")]
    told = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [(race["net"], race["backend"]) for race in told] == raced
    assert told[0]["rows"][0]["ours_of_it"] == pytest.approx(1.5)


@pytest.mark.slow
def test_a_small_race(tmp_path):
    words = ["--recipe", "digits", "--backend", "torch", "--rounds", 2, "--replicas", 2, "--peers"]
    done = bench(*words, "--output", "out", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert told["failed"] == {}
    ways = {row["way"]: row["images_per_s"] for row in told["rows"]}
    assert {"plain-2", "apart-2", "together-2", "inside-2", "keras_ddp-2", "raw_ddp-2"} <= {*ways}
    assert min(ways.values()) > 0
    assert (tmp_path / "out" / "bench.png").stat().st_size > 1000


def racers_of(folder) -> set[int]:
    mark = f"TMPDIR={folder}".encode()
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environ.read_bytes().split(b"\0"):
                found.add(int(environ.parent.name))
    return found


def wait_until(is_so, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not is_so() and time.monotonic() < end:
        time.sleep(0.1)
    return is_so()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_race_that_is_ended_leaves_nobody_behind(tmp_path, number):
    words = ["--recipe", "digits", "--backend", "torch", "--rounds", "100000", "--replicas", "2"]
    command = [sys.executable, "-m", "unisono", "bench", *words]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=said, stderr=said)
    try:
        # The bench itself, its guard, and ways of several processes: it is well under way.
        assert wait_until(lambda: len(racers_of(tmp_path)) > 5, 90)
        process.send_signal(number)
        assert process.wait(20) != 0
        assert wait_until(lambda: not racers_of(tmp_path), 10), racers_of(tmp_path)
        said = (tmp_path / "said").read_text()
        assert "Traceback" not in said
        if number != signal.SIGKILL:
            assert "digits, torch: warming up plain-2 (1 of " in said
            assert (
                "unisono: ended by a signal; results that are not in the tables above are lost."
                in said
            )
            assert not list(tmp_path.glob("unisono-bench-*"))
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise ValueError('no data')", "ended with code 1, so it cannot be measured"),
        (SCRIPT.replace("epochs=3", "epochs=1").replace("20000", "200"), "give it more epochs"),
    ],
)
def test_a_script_that_cannot_be_measured(tmp_path, program, said):
    (tmp_path / "train.py").write_text(program)
    done = bench("--script", "train.py", "--backend", "torch", "--replicas", 1, folder=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.slow
def test_a_script_of_a_user(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--script", "train.py", "--backend", "torch", "--replicas", "1,2", "--output", "out"]
    done = bench(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads((tmp_path / "out" / "bench.json").read_text())
    ways = {row["way"]: row["images_per_s"] for row in told["rows"]}
    assert {*ways} == {"ideal-1", "together-1", "ideal-2", "together-2"}
    assert ways["ideal-2"] == pytest.approx(2 * ways["together-1"])
    assert min(ways.values()) > 0
    two = told["shares"][1]
    parts = ("input", "computing", "communicating", "waiting")
    assert sum(two[part] for part in parts) == pytest.approx(1)
    assert two["speed_up"] == pytest.approx(2 * two["efficiency"])
    assert told["verdict"] in done.stdout
    assert (tmp_path / "out" / "bench.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "mxnet"], "Asked for mxnet"),
        (["--script", "nothing.py", "--backend", "jax"], "nothing.py; there is no such file"),
        (["--replicas", "two"], "not a list of numbers"),
        (["--rounds", "0"], "'0' is not a number of rounds, 1 or more"),
        (["--backend", "torch", "--output", __file__], "--output a folder that can be written to"),
        (["--recipe", "mnist,mnits"], "no recipe 'mnits' to measure; choose among digits, mnist"),
    ],
)
def test_what_cannot_be_measured(tmp_path, words, said):
    done = bench(*words, folder=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr


def test_the_all_reduces_of_a_compiled_step():
    """One may be of several arrays, and of scalars, whose shapes have empty brackets."""
    text = """
  %a = f32[2,3]{1,0} add(%x, %y)
  %s.8 = (f32[], /*index=1*/bf16[2,3]{1,0}) all-reduce(%a, %b), channel_id=1
  ROOT %s.9 = s32[4]{0} all-reduce(%c), channel_id=2
"""
    found = read_program(8, 1.5, text)
    assert (found.num_instructions, found.num_all_reduces, found.reduced_bytes) == (
        3,
        2,
        4 + 12 + 16,
    )


BARE_LOSS = """
import keras
from unisono.bench.nets import data, make
from unisono.bench.peers import {module}


def in_order_of_creation(model, kind):
    found = [layer for layer in model.layers if isinstance(layer, kind)]
    return sorted(found, key=lambda layer: (len(layer.name), layer.name))


for net in ("mnist", "cifar10"):
    model = make(net)
    for layer in in_order_of_creation(model, keras.layers.Dropout):
        layer.rate = 0.0
    norms = in_order_of_creation(model, keras.layers.BatchNormalization)
    params = []
    for place, conv in enumerate(in_order_of_creation(model, keras.layers.Conv2D)):
        params += conv.get_weights()
        params += norms[place].get_weights()[:2] if norms else []
    params += in_order_of_creation(model, keras.layers.Dense)[0].get_weights()
    x, y = data(net, 8)
    expected = float(keras.ops.mean(keras.losses.get(model.loss)(y, model(x, training=True))))
    loss = float({module}.bare_loss(net, params, x, y)[0])
    assert abs(loss - expected) < 1e-4, (net, loss, expected)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_the_loops_without_keras_compute_the_same_loss(backend):
    program = BARE_LOSS.format(module=f"{backend}_peers")
    env = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
