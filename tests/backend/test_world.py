"""One replica in each of several processes: the same promises, kept across processes.

The processes are started once, by `unisono run`, and go through all checks of world_program.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from custom_loops import BY_HAND, LOOPS, jax_guide_in_scope, stateful_fit

from exactness.case import FLOAT32
from exactness.cases import CASES
from exactness.results import largest_deviation, read_cells
from unisono.backends import load_framework

HERE = Path(__file__).parent
BACKEND = keras.backend.backend()
VALUE = "module/rank/.ATTRIBUTES/VARIABLE_VALUE"
CONTRACT = (
    "global_clipnorm",
    "batch_norm_conv",
    "own_train_step",
    "losses_of_examples",
    "rows_47_batch_24",
    "generator",
)
MORE_OF_IT = (
    "embedding_adam",
    "embedding_rmsprop_one_row",
    "unseeded",
    "ragged",
    "dice",
    "shuffle",
    "accumulation",
    "batch_norm_masking",
    "masked_gru",
    "auc",
    "sample_weight_masked",
    "rows_1_batch_4",
    "tf_data",
    "py_dataset",
    "grain_map",
    "grain_loader",
    "train_on_batch_odd",
    "predict_sizes",
    "add_loss_sum",
    "compute_loss_mixed",
    "two_optimizers_one_sum",
)


def run(*arguments: str, size: int = 2, timeout_s: float = 280) -> Any:
    """`unisono run` in a process of its own, without what tests inherit from their own run."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
    command = [sys.executable, "-m", "unisono", "run", "--replicas", str(size), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)


class World:
    """What each process of the program found, and what was shown."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done = run(str(HERE / "world_program.py"), str(folder))
        files = sorted(folder.glob("rank-*.json"))
        assert self.done.returncode == 0, self.done.stdout + self.done.stderr
        self.ranks = [json.loads(file.read_text()) for file in files]

    def found(self, check: str) -> list[Any]:
        found = [rank[check] for rank in self.ranks]
        failed = [f["failed"] for f in found if isinstance(f, dict) and "failed" in f]
        assert not failed, failed[0]
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def test_every_process_knows_its_place(world):
    assert world.found("facts") == [[0, 2, 0, 0, True], [1, 2, 1, 0, False]]


def test_the_chief_alone_is_shown(world):
    assert world.done.stdout.count("unisono: ") == world.done.stdout.count("unisono: " + BACKEND)
    assert f"{BACKEND}, 2 replicas on a cpu in each of 2 processes" in world.done.stdout
    assert "global batch 12 = 2 x 6 per replica" in world.done.stdout


def test_all_begin_with_the_chiefs_weights_and_stay_equal(world):
    first, second = world.found("begins_with_the_chiefs_weights")
    assert first == second
    assert len(first["predict"]) == 23


@pytest.mark.skipif(BACKEND == "tensorflow", reason="gRPC's threads share the process' cores")
def test_gloo_communicates_on_all_cores(world):
    """On the one core of its process, its thread would keep the other from releasing a lock."""
    cores = sorted(os.sched_getaffinity(0))
    for own, *others in world.found("communication_threads"):
        assert others
        assert all(each == cores for each in others)
        assert set(own) < set(cores) or len(cores) < 2


def test_one_process_may_compute_with_the_values_alone(world):
    first, second = world.found("a_rank_may_compute_alone")
    assert isinstance(first, float)
    assert second is None


def test_what_the_chief_changes_holds_everywhere(world):
    first, second = world.found("chief_changes_values")
    assert first == second
    assert first["rate"] == pytest.approx(0.003)


def test_what_others_change_does_not(world):
    first, second = world.found("others_do_not_win")
    assert first == second
    assert first["num_batches"] == 4
    assert first["rate"] == pytest.approx(0.01)


def test_all_stop_when_the_chief_does(world):
    assert world.found("chief_stops") == [2, 2]
    assert world.found("early_stopping") == [2, 2]


def test_files_are_written_by_the_chief_alone(world):
    first, second = world.found("files")
    assert second["opened"] == []
    # A path of its own is a process' own business.
    assert (world.folder / "files" / "own-1.weights.h5").exists()
    names = {"best-1.keras", "best-2.keras", "log.csv", "model.keras", "by-function.keras"}
    assert names <= set(first["opened"])
    assert first["is_there"]
    assert second["is_there"]
    assert first["is_same"]
    assert second["is_same"]
    lines = (world.folder / "files" / "log.csv").read_text().splitlines()
    assert len(lines) == 3


def test_a_save_that_fails_is_an_error_of_all(world):
    first, second = world.found("saves_that_fail")
    kinds = ["OutputError, NotADirectoryError", "ValueError, ValueError"]
    assert [kind for kind, _ in first] == kinds
    assert [kind for kind, _ in second] == kinds
    for (_, text), (_, other) in zip(first, second, strict=True):
        assert other.startswith("Rank 0 failed in ")
        assert text in other


@pytest.mark.skipif(BACKEND != "tensorflow", reason="these are TensorFlow's own files")
def test_checkpoints_of_tensorflow_are_written_by_the_chief_alone(world):
    import tensorflow as tf

    first, second = world.found("tensorflow_files")
    assert first == second
    paths, latest, counter, is_there, values = first
    names = ["checkpoints/saved-1", "alone", "managed/ckpt-2", "managed/ckpt-3"]
    assert paths == [str(world.folder / name) for name in names]
    assert (latest, counter, is_there, values) == (paths[-1], 3, True, [0, 0])
    assert tf.train.latest_checkpoint(world.folder / "managed") == paths[-1]
    assert not list((world.folder / "managed").glob("ckpt-2*"))
    assert int(tf.train.load_checkpoint(paths[-1]).get_tensor(VALUE)) == 0
    assert int(tf.saved_model.load(str(world.folder / "module")).rank) == 0
    own = tf.train.load_checkpoint(str(world.folder / "own-1"))
    assert int(own.get_tensor(VALUE)) == 1


def test_a_backup_is_restored_everywhere(world):
    assert world.found("backup_is_restored") == [1, 1]


def test_shuffles_agree_whatever_the_random_states(world):
    first, second = world.found("random_states_that_differ")
    assert first == second


def test_a_package_s_callback_runs_in_the_chief_and_acts_on_all(world):
    first, second = world.found("library")
    epochs = [[*(f"batch {i}" for i in range(2)), f"epoch {epoch}"] for epoch in range(2)]
    assert first["events"] == ["begin", *epochs[0], *epochs[1]]
    assert second["events"] == []
    assert first["rate"] == second["rate"] == pytest.approx(0.003)
    assert first["same"] == second["same"]
    assert len(first["losses"]) == len(second["losses"]) == 2


def test_the_chief_s_callback_is_answered_alone(world):
    first, second = world.found("library")
    predicted, evaluated = first["answers"]
    assert largest_deviation(predicted, first["predict"]).value <= FLOAT32
    assert largest_deviation(evaluated, second["evaluate"]).value <= FLOAT32
    for plain, beside in world.found("answers_change_nothing"):
        assert plain == beside


def test_callbacks_run_where_they_are_told_to(world):
    first, second = world.found("switches")
    assert [first["own"], second["own"]] == [1, 1]
    assert [first["chief_only"], second["chief_only"]] == [1, 0]
    events = ["begin", "batch 0", "batch 1", "epoch 0"]
    assert [first["every_rank"], second["every_rank"]] == [events, events]
    assert first["answers"] == second["answers"]
    # Also given to evaluate, in the chief alone; a class of the program, but no logger of its own.
    assert [first["derived"], second["derived"]] == [[*events, "test"], []]


def test_keras_is_itself_after_all_of_it(world):
    assert world.found("keras_is_itself") == [[], []]


def test_callbacks_may_be_given_to_the_chief_alone(world):
    first, second = world.found("given_to_the_chief_alone")
    assert first[0] == second[0]
    assert first[1] == ["chief-1.weights.h5", "chief-2.weights.h5"]
    (told, same), (_, other) = world.found("chief_does_not_train_alone")
    assert "every_rank" in told
    assert same == other


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("streams_that_differ", ["fit, step 3", "different rows", "distribute_dataset"]),
        ("rows_that_differ", ["fit, step 1", "[24, 23] rows"]),
        ("arrays_that_differ", ["fit, step 1", "different rows", "the same data and seed"]),
        ("steps_that_differ", ["fit, step 4", "end of epoch 1"]),
        ("loops_that_differ", ["batch 3 of a distributed", "end of a distributed data set"]),
        ("calls_that_differ", ["predict", "evaluate", "is_chief"]),
        ("models_that_differ", ["different models", "rank 1"]),
    ],
)
def test_a_difference_is_an_error_of_all(world, check, words):
    for told in world.found(check):
        assert told.startswith("DisagreementError"), told
        assert all(word in told for word in words), told


def test_the_world_decides_how_many_replicas_there_are(world):
    for told in world.found("another_number_of_replicas"):
        assert told.startswith("DeviceError: Asked for replicas=7 in a run of 2 processes")


def test_replicas_that_differ_are_found(world):
    for same, told in world.found("replicas_are_checked"):
        assert same == world.found("replicas_are_checked")[0][0]
        assert told.startswith("DisagreementError")
        assert "kernel" in told


def test_a_scope_adopts_models_in_every_process(world):
    first, second = world.found("a_scope_adopts")
    assert first == second


def test_an_custom_loop_gives_what_one_device_gives(world):
    expected = [LOOPS[BACKEND](None, rows) for rows in (35, 33)]
    for found in world.found("custom_loop"):
        actual = [[np.asarray(part) for part in loop] for loop in found]
        deviation = largest_deviation(expected, actual)
        assert deviation.value <= FLOAT32, deviation


def test_gradients_reduced_by_hand_give_what_one_device_gives(world):
    expected = [loop(None, how=how) for loop, how in BY_HAND[BACKEND]]
    for found in world.found("gradients_by_hand"):
        for (_, how), one, other in zip(BY_HAND[BACKEND], expected, found, strict=True):
            actual = [np.asarray(part) for part in other]
            deviation = largest_deviation([one], [actual])
            assert deviation.value <= FLOAT32, (how, deviation)


def test_gradients_that_were_not_reduced_are_noticed(world):
    for told in world.found("gradients_not_all_reduced"):
        assert "reduce_gradients" in told


@pytest.mark.skipif(BACKEND != "jax", reason="elsewhere a replica sees its own rows only")
def test_the_guides_loop_in_a_scope_and_a_stateful_layer(world):
    expected = [jax_guide_in_scope(None), stateful_fit(lambda model: model)]
    for found in world.found("guide_and_stateful_layer"):
        for one, other in zip(expected, found, strict=True):
            deviation = largest_deviation([one], [[np.asarray(part) for part in other]])
            assert deviation.value <= FLOAT32, deviation


def test_the_announcement_names_cheaper_layers(world):
    """A cheaper step is no parallelism, so a run says where it has one."""
    lines = [line for line in world.done.stdout.splitlines() if line.startswith("unisono: ")]
    names = ", ".join(sorted(load_framework().cpu_layers))
    end = f"; cheaper CPU layers: {names}" if names else ""
    assert lines
    assert all(line.endswith(f" per replica{end}") for line in lines)


def measured(names: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Cases of the contract, measured in a run of two processes."""
    out = folder / "cells.jsonl"
    assert {case.name for case in CASES} >= set(names)
    options = ["--out", str(out), "--replicas", "2", "--cases", ",".join(names)]
    done = run("-m", "exactness.measure", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return {cell.case: cell for cell in read_cells(out)}


def check(cell: Any) -> None:
    if cell.skipped is not None:
        pytest.skip(cell.skipped)
    assert cell.processes == 2
    assert not cell.failed, f"{cell.deviation} at {cell.where}"


# Elsewhere test_world_hosts has two cases of it in every run.
WHERE_IT_IS_QUICK = [] if keras.backend.backend() == "torch" else [pytest.mark.slow]


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> dict[str, Any]:
    return measured(CONTRACT, tmp_path_factory.mktemp("cells"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=WHERE_IT_IS_QUICK) for name in CONTRACT])
def test_processes_agree_with_one_device(name, cells):
    check(cells[name])


@pytest.fixture(scope="module")
def more_cells(tmp_path_factory) -> dict[str, Any]:
    return measured(MORE_OF_IT, tmp_path_factory.mktemp("more-cells"))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_OF_IT)
def test_they_agree_in_more_cases(name, more_cells):
    check(more_cells[name])
