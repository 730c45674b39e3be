"""TensorFlow in several processes: collectives, steps, and what a failure looks like from inside.

The processes are started once and go through all checks of tensorflow_world_program.py.
"""

import importlib
import json
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from worlds import run_world

if keras.backend.backend() != "tensorflow":
    pytest.skip("about TensorFlow's processes", allow_module_level=True)

import tensorflow as tf

from unisono.backends.tensorflow.collectives import padded_length

PROGRAM = Path(__file__).with_name("tensorflow_world_program.py")
SIZE = 3


@pytest.fixture(scope="module")
def world() -> list[Any]:
    return [ended.told for ended in run_world(PROGRAM, SIZE, timeout_s=290)]


# -- collectives ----------------------------------------------------------------------------------


def cast(value: Any, dtype: str) -> Any:
    return np.asarray(tf.cast(tf.cast(value, dtype), "float64")).tolist()


def expected(rank: int, dtype: str) -> dict[str, Any]:
    """What NumPy makes of what all processes give."""
    ranks = range(SIZE)
    every = np.array([cast(np.array([[1, 0, 3], [2, 1, 0]]) + r, dtype) for r in ranks])
    reduce = {"sum": np.sum, "min": np.min, "max": np.max, "product": np.prod}
    found = {op: cast(function(every, axis=0), dtype) for op, function in reduce.items()}
    rows = [np.arange(2 * (r + 1)).reshape(-1, 2) % 2 + r for r in ranks]
    shares = [3, 2, 2]
    received = np.repeat(np.arange(SIZE), [rank + r for r in ranks])
    return {
        **found,
        "gather": [cast(part, dtype) for part in rows],
        "broadcast": [every[1].tolist(), [], every[1][0][0]],
        "reduce_scatter": cast(np.full((shares[rank], 3), 3.0), dtype),
        "all_to_all": [
            cast(np.stack([received, received], 1), dtype),
            [rank + r for r in ranks],
        ],
    }


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", "in_functions", "in_functions_of_any_shape"])
def test_collectives_are_right_for_all_types(world, how):
    for rank, found in enumerate(world):
        for dtype, results in found[how].items():
            assert results == expected(rank, dtype), (rank, dtype)


@pytest.mark.slow
def test_all_types_of_horovod_are_tried(world):
    names = {"bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"}
    assert names <= set(world[0]["eager"])


@pytest.mark.slow
def test_scalars_are_joined(world):
    assert all(found["scalars"] == [[0.0, 1.0, 2.0], [6.0]] for found in world)


@pytest.mark.slow
def test_functions_may_call_functions_and_be_traced_at_different_times(world):
    # Of [1], [2] and [3]: the sum is 6, then 3 * (6 + 1) and 3 * (60 + 1); the mean is 2.
    for found in world:
        assert found["functions_in_functions"] == [[[21.0], [183.0], [2.0], [6.0], [6.0]]] * 2


@pytest.mark.slow
def test_some_processes_can_be_a_group(world):
    rows = [[1.0], [2.0, 2.0]]
    assert [found["some_processes"] for found in world] == [None, [0, 2, rows], [1, 2, rows]]


def test_few_lengths_are_sent_and_little_is_added():
    lengths = range(100_000)
    padded = [padded_length(length) for length in lengths]
    # At least one is sent.
    assert all(n <= p <= max(1, n + n // 64) for n, p in zip(lengths, padded, strict=True))
    assert len(set(padded)) < 1000
    some = [0, 1, 128, 129, 1000, 99_999, 2**30 + 1]
    found = [int(padded_length(tf.constant(length))) for length in some]
    assert found == [padded_length(length) for length in some]


# -- steps ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_broadcasts_of_one_length_are_told_apart_by_who_sends(world):
    roots = [*range(SIZE), *reversed(range(SIZE))]
    assert all(found["broadcasts"] == [[root] * 3 for root in roots] for found in world)


@pytest.mark.slow
def test_a_step_is_traced_for_any_number_of_rows_at_once(world):
    assert all(found["one_trace"] == [True, 0] for found in world)


@pytest.mark.slow
def test_draws_without_a_seed_differ_between_processes_and_steps(world):
    assert all(found["unseeded"] == world[0]["unseeded"] for found in world)
    assert len(set(world[0]["unseeded"])) == 48


@pytest.mark.slow
def test_sparse_and_ragged_batches_are_split(world):
    sums = [1.0, 5.0, 9.0, 13.0, 17.0, 21.0]
    assert all(found["sparse_and_ragged"] == {"sparse": sums, "ragged": sums} for found in world)


@pytest.mark.slow
def test_dropout_differs_between_processes_and_steps(world):
    masks = [json.dumps(mask) for found in world for mask in found["masks"]]
    assert len(masks) == 2 * SIZE
    assert len(set(masks)) == len(masks)


@pytest.mark.slow
def test_processes_read_different_rows_of_one_order(world):
    for call in range(4):
        for epoch in range(2):
            rows = [row for found in world for row in found["order"][call][epoch]]
            assert sorted(rows) == list(range(13))


@pytest.mark.slow
def test_each_epoch_has_an_order_of_its_own_unless_there_is_a_seed(world):
    for found in world:
        first, second, seeded, seeded_again = found["order"]
        assert first[0] != first[1]
        assert first != second
        # As in Keras, whose order is one for all epochs then.
        assert seeded[0] == seeded[1]
        assert seeded == seeded_again


@pytest.mark.slow
def test_the_chiefs_writes_hold_everywhere(world):
    assert [found["writes"] for found in world] == [[12.0, 24.0, 29.0, 48.0]] * SIZE


@pytest.mark.slow
def test_variables_stay_plain(world):
    names = {found["variables_are_plain"] for found in world}
    assert names == {"ResourceVariable"}
    assert all(found["export"] < 1e-5 for found in world)


# -- joining and failing --------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("how", ["dies", "stays away"])
def test_a_lost_process_is_named_and_not_waited_for(how):
    first, second = run_world(PROGRAM, 2, how)
    assert second.returncode == -9
    message, seconds = first.told
    assert "process" in message or "Rank 1 is gone" in message
    assert seconds < 30


def test_tensorflow_that_has_started_cannot_join(tmp_path):
    script = tmp_path / "late.py"
    script.write_text("import tensorflow as tf\ntf.zeros(1)\nimport unisono\n")
    for ended in run_world(script, 2):
        assert ended.returncode == 1
        assert "StartedError: Asked TensorFlow to join a run of 2 processes" in ended.stderr
        assert "Move `import unisono` above the first line" in ended.stderr


def test_nothing_is_imported_that_imports_keras():
    """The backend joins a run while Keras itself is being imported."""
    package = "backends.tensorflow"
    allowed = {f"{package}.{name}" for name in ("collectives", "files", "internals")}
    allowed.add("hooks")
    for name in (f"{package}.distributed", *allowed):
        module = importlib.import_module(f"unisono.{name}")
        source = Path(module.__file__).read_text()
        assert re.findall(r"^(?:import|from) keras", source, re.MULTILINE) == []
        ours = set(re.findall(r"^from unisono\.(backends\.[\w.]+|hooks)", source, re.MULTILINE))
        assert ours <= allowed
