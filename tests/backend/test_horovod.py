"""unisono.horovod in two processes: results of its calls, and the errors where ranks differ.

Starting processes takes most of the time, so one pair of processes runs all checks.
"""

import importlib
import inspect
import json
from pathlib import Path

import keras
import numpy as np
import pytest
from horovod_models import FACTOR, GLOBAL_BATCH, OPTIMIZERS, SCALED, data, make_model
from worlds import run_world

import unisono
import unisono.horovod as hvd

BACKEND = keras.backend.backend()
HERE = Path(__file__).parent
pytestmark = [pytest.mark.timeout(600)]
if BACKEND == "jax":
    pytestmark.append(pytest.mark.slow)  # Its programs take a minute to compile.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("horovod")


@pytest.fixture(scope="module")
def told(folder):
    """The results of the two processes of horovod_world.py."""
    ends = run_world(HERE / "horovod_world.py", 2, str(folder), timeout_s=500)
    return [ended.told for ended in ends]


# -- processes and collectives -----------------------------------------------------------------


def test_processes(told):
    assert [each["processes"]["rank"] for each in told] == [0, 1]
    for rank, each in enumerate(told):
        facts = each["processes"]
        assert facts["size"] == 2
        assert facts["local"] == [rank, 2]
        assert facts["cross"] == [0, 1]
        assert facts["is_homogeneous"]
        assert facts["mpi"] == [False, False]
        assert each["before"] == "unisono.horovod has not been initialized; use hvd.init()."


def test_processes_draw_their_own_random_numbers(told):
    first, second = (each["processes"]["draw"] for each in told)
    assert first != second


def test_allreduce(told):
    one = np.array([[1.0, 2.0], [3.0, 4.0]])
    for each in told:
        found = each["allreduce"]
        assert found["Average"] == found["default"] == (1.5 * one).tolist()
        assert found["Sum"] == (3 * one).tolist()
        assert found["Min"] == one.tolist()
        assert found["Max"] == (2 * one).tolist()
        assert found["Product"] == (2 * one * one).tolist()
        assert found["scalar"] == 1.0
        assert found["scaled"] == (4.5 * one).tolist()
        assert found["grouped"] == [(3 * one).tolist(), [1.0]]
        assert found["no tensors"] == []
        half = float(np.float16(1 / 3))
        assert found["fp16"] == [2 * half]
        assert half != np.float32(1 / 3)


def test_types(told):
    for each in told:
        found = dict(each["types"])
        assert found.pop("negative") == [-2.0]  # -2.5, towards zero
        assert found.pop("bool") == [1.0]
        for dtype, (total, mean, returned) in found.items():
            assert returned == dtype
            assert total == [2.0, 7.0]
            assert mean == ([1.0, 3.5] if "float" in dtype else [1.0, 3.0])


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8", "int32"])
def test_scale_factors_are_applied_in_the_precision_that_horovod_uses(told, dtype):
    """In float32 for half precision, in float64 for integers, which are then truncated."""
    wide = "float64" if "int" in dtype else "float32"
    values = np.array(SCALED, dtype)
    before = (values.astype(wide) * wide_factor(wide)).astype(dtype) * np.array(2, dtype)
    after = ((values * np.array(2, dtype)).astype(wide) * wide_factor(wide)).astype(dtype)
    for rank, each in enumerate(told):
        found = each["scales"][dtype]
        assert found["before"] == before.astype("float64").tolist()
        assert found["after"] == after.astype("float64").tolist()
        assert found["scattered"] == found["after"][4 * rank : 4 * rank + 4]


def wide_factor(dtype):
    return np.array(FACTOR, dtype)


def test_rows(told):
    first, second = (each["rows"] for each in told)
    rows = [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    for found in (first, second):
        assert found["allgather"] == rows
        assert found["grouped"] == [rows, rows[:2]]
        assert found["broadcast"] == [[1.0, 1.0]]
        assert found["nothing"] == []
    assert first["alltoall"] == [[0.0, 10.0, 11.0, 12.0], [1.0, 3.0]]
    assert second["alltoall"] == [[1.0, 2.0], [2.0, 0.0]]
    assert first["equal"] == [0.0, 1.0, 10.0, 11.0]
    assert second["equal"] == [2.0, 3.0, 12.0, 13.0]
    assert first["reducescatter"] == [0.0, 3.0, 6.0]
    assert second["reducescatter"] == [9.0, 12.0]
    assert first["average"] == [0.0, 1.5, 3.0]
    assert second["average"] == [4.5, 6.0]
    assert first["grouped scatter"] == [[0.0, 3.0, 6.0], [0.0]]
    assert second["grouped scatter"] == [[9.0, 12.0], [3.0]]


def test_objects_and_variables(told):
    for each in told:
        found = each["objects"]
        assert found["in place"] == [[[5.0, 5.0], [5.0]]] * 2
        assert found["given"] == "from 1"
        assert found["every"] == [0, 1]
        assert found["sets"] == [[1, 2], [1, 2]]
        assert found["variables"] == [[6.0, 6.0], 1.0]


def test_process_sets(told):
    first, second = (each["sets"] for each in told)
    assert first["sizes"] == second["sizes"] == [2, 1]
    assert (first["ranks"], second["ranks"]) == ([0, None], [1, 0])
    assert (first["included"], second["included"]) == (False, True)
    assert "Rank 0 is not in the process set of ranks [1]" in first["outside"]
    assert second["outside"] == "no error: 1.0"
    for found in (first, second):
        assert "is not registered" in found["unregistered"]
        assert "exists already" in found["twice"]
        assert "this run has ranks 0 to 1" in found["unknown"]
        assert "rank 0 gave ranks [0], rank 1 [1]" in found["differ"]
        assert (found["removed"], found["again"]) == (True, False)


MISMATCHES = {
    "shapes": "Mismatched shapes in hvd.allreduce(): rank 0 gave [2, 3], rank 1 [3, 2].",
    "types": "Mismatched data types in hvd.allreduce(): rank 0 gave float32, rank 1 int32.",
    "ops": "Mismatched reduction operations in hvd.allreduce(): rank 0 gave hvd.Sum, rank 1 gave",
    "scales": "Mismatched scale factors in hvd.allreduce(): rank 0 gave (1.0, 1.0), rank 1 gave",
    "roots": "Mismatched root ranks in hvd.broadcast(): rank 0 gave 0, rank 1 gave 1.",
    "unknown root": "cannot be done by rank 1: root_rank 7 is not among the ranks [0, 1].",
    "names": "Mismatched names in hvd.allreduce('a'): rank 0 gave 'a', rank 1 gave 'b'.",
    "kinds": "Mismatched operations: rank 0 did hvd.allreduce, rank 1 did hvd.allgather.",
    "counts": "Mismatched operations: rank 0 did hvd.allreduce, rank 1 did hvd.broadcast.",
    "columns": "Mismatched shapes in hvd.allgather(): rank 0 gave [2, 2], rank 1 [2, 3].",
    "scalars": "needs tensors with rows; it was given a scalar.",
    "numbers": "Mismatched numbers of tensors in hvd.allreduce(): rank 0 gave 1, rank 1 gave 2.",
    "splits": "cannot be done by rank 1: splits [1, 9] do not divide 2 rows among 2 processes.",
    "objects": "Mismatched root ranks",
    "metrics": "Mismatched names in hvd.allreduce('metrics loss'): rank 0 gave",
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_what_differs_is_an_error_of_all_ranks(told, name):
    for each in told:
        kind = "RuntimeError"
        if keras.backend.backend() == "tensorflow":
            is_argument = name in ("unknown root", "splits")
            kind = "InvalidArgumentError" if is_argument else "FailedPreconditionError"
        assert each["mismatches"][name].startswith(f"DisagreementError ({kind}): ")
        assert MISMATCHES[name] in each["mismatches"][name]


def test_ranks_go_on_after_a_mismatch(told):
    assert [each["mismatches"]["after"] for each in told] == [1.0, 1.0]


def test_what_cannot_be_asked_for(told):
    for each in told:
        assert each["mismatches"]["adasum"].startswith("NotImplementedError: op=hvd.Adasum")
        assert each["mismatches"]["both"].startswith("ValueError: Received both op= and average=")


def test_join(told):
    first, second = (each["join"] for each in told)
    assert first["sums"] == [[2.0, 4.0]] * 2
    assert second["sums"] == [[2.0, 4.0]] * 2 + [[1.0, 2.0]]
    for found in (first, second):
        assert found["last"] == 1
        assert (
            "hvd.allgather() is not possible once a process has called hvd.join()"
            in (found["refused"])
        )


def test_timeline(told):
    assert told[1]["timeline"] is None
    events = told[0]["timeline"]
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    spans = [event for event in events if event["ph"] == "X"]
    for rank in (0, 1):
        found = [
            (threads[rank, event["tid"]], event["name"]) for event in spans if event["pid"] == rank
        ]
        for name, count in (("first", 2), ("second.0", 1), ("second.1", 1)):
            assert found.count((name, "NEGOTIATE_ALLREDUCE")) == count
            assert found.count((name, "ALLREDUCE")) == count
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in spans)


# -- training ----------------------------------------------------------------------------------


def reference(optimizer, *, batch=GLOBAL_BATCH, epochs=2, rows=slice(None), callbacks=()):
    """Plain Keras on the global batches: weights and losses."""
    x, y = data()
    model = make_model()
    model.compile(optimizer, "mse", metrics=["mae"])
    history = model.fit(
        x[rows],
        y[rows],
        batch_size=batch,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return [np.asarray(w, "float64").ravel() for w in model.get_weights()], history.history["loss"]


def assert_close(found, expected, tolerance=2e-6):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


def is_close(found, expected):
    return all(np.allclose(a, b, rtol=0, atol=2e-6) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_that_on_global_batches(told, name):
    weights, losses = reference(OPTIMIZERS[name]())
    found = [each["optimizers"][name] for each in told]
    assert found[0][0] == found[1][0]
    assert_close(found[0][0], weights)
    assert_close(np.mean([loss for _, loss in found], axis=0), losses)
    assert found[0][1] != found[1][1]  # Each process' loss is that of its own rows.


def test_options_of_the_optimizer(told):
    sgd = OPTIMIZERS["sgd"]
    expected, _ = reference(sgd())
    options = told[0]["options"]
    for name in ("predivide", "groups", "steps", "eager"):
        assert_close(options[name][0], expected)
    for name, (found, _) in options.items():
        if name not in ("alone", "local"):
            assert found == told[1]["options"][name][0]
    half = keras.optimizers.SGD(0.2, momentum=0.5)
    assert_close(options["sum"][0], reference(half)[0])
    assert_close(options["fp16"][0], expected, 2e-3)
    assert not is_close(options["fp16"][0], expected)


def test_backward_passes(told):
    """Two batches before each step: as if they were one, of twice the rows."""
    for name, rate in (("passes", 0.1), ("summed passes", 0.2)):
        expected, _ = reference(keras.optimizers.SGD(rate, momentum=0.5), batch=2 * GLOBAL_BATCH)
        found, iterations = told[0]["options"][name]
        assert_close(found, expected)
        assert iterations == 8  # As in Horovod, passes count and not steps.


def test_gradients_that_stay_in_a_process(told):
    first, second = (each["options"] for each in told)
    assert first["alone"][0] != second["alone"][0]
    (kernel, bias, *rest), (other_kernel, other_bias, *other_rest) = (
        first["local"][0],
        second["local"][0],
    )
    assert kernel != other_kernel
    assert bias != other_bias
    assert rest == other_rest


def test_callbacks(told, folder):
    first, second = (each["callbacks"] for each in told)
    assert first["before"] != second["before"]
    assert first["after"] == second["after"]
    assert set(first["history"]) == {"loss", "val_loss", "lr"}
    assert first["history"] == second["history"]
    # Up from 0.1 to 0.2 in eight steps, then what the schedule says.
    warm = [0.1 * (1 + (step + 1) / 8) for step in range(8)]
    assert_close(first["rates"], warm + [0.02] * 4)
    assert_close(first["history"]["lr"], [0.15, 0.2, 0.02])
    assert keras.models.load_model(folder / "best.keras").count_params() == 5


def test_momentum_is_corrected_for_the_learning_rate(told):
    """Against Horovod's way: for the step of the change, momentum times new rate by old."""
    for is_corrected in (True, False):
        expected = momentum_by_hand(is_corrected)
        assert_close(told[0]["momentum"][str(is_corrected)], expected, 1e-5)
    assert not is_close(momentum_by_hand(True), momentum_by_hand(False))


def momentum_by_hand(is_corrected):
    x, y = data()
    model = make_model()
    (w, b, v, c) = (np.asarray(each, "float64") for each in model.get_weights())
    state = [w, b, v, c]
    velocity = [np.zeros_like(each) for each in state]
    rate = 0.1
    for step in range(8):
        new = 0.1 if step < 4 else 0.2
        momentum = 0.5 * (new / rate if is_corrected else 1.0)
        rate = new
        rows = slice(step % 4 * GLOBAL_BATCH, (step % 4 + 1) * GLOBAL_BATCH)
        found = gradients(state, x[rows], y[rows])
        for each, moved, grad in zip(state, velocity, found, strict=True):
            moved *= momentum
            moved -= rate * grad
            each += moved
    return [each.ravel() for each in state]


def gradients(state, x, y):
    w, b, v, c = state
    hidden = np.tanh(x @ w + b)
    error = 2 * (hidden @ v + c - y) / len(x)
    back = (error @ v.T) * (1 - hidden**2)
    return [x.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]


def test_files_are_plain_and_training_goes_on_from_them(told, folder, plain_python):
    for each in told:
        found = each["files"]
        assert found["class"] == "Adam"
        name = found["config"]["name"]
        assert found["config"] == keras.optimizers.Adam(0.05, name=name).get_config()
        assert_close(found["loaded"], found["trained"])
        assert found["iterations"] == 8
    script = """
import sys
sys.modules["unisono"] = None
import keras
optimizer = keras.models.load_model(sys.argv[1]).optimizer
print(type(optimizer).__name__, int(optimizer.iterations))
"""
    done = plain_python(["-c", script, str(folder / "model-0.keras")], KERAS_BACKEND=BACKEND)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Adam", "4"]


def test_loss_scaling_is_decided_by_all_alike(told):
    first, second = (each["scaling"] for each in told)
    assert first["class"] == "LossScaleOptimizer"
    assert first["weights"] == second["weights"]
    assert np.isfinite(np.concatenate(first["weights"])).all()


def test_sparse_gradients(told):
    first, second = (each["sparse"] for each in told)
    assert first == second
    assert_close(first["False"], first["True"])


def test_in_functions(told):
    first, second = (each["in_functions"] for each in told)
    if BACKEND == "jax":
        assert "StrategyError: hvd.allreduce was called while JAX traces" in first["refused"]
        return
    if BACKEND == "torch":
        # Of a sum with weights 1 and 2: scaled as Horovod scales them.
        assert first["gradients"] == [[3.0, 3.0], [1.5, 0.0], [0.0, 0.0], [2.0, 4.0], [1.0, 2.0]]
        assert second["gradients"] == [[3.0, 3.0], [1.5, 1.5], [1.5, 1.5], [2.0, 4.0], [1.0, 2.0]]
        return
    gathered, y, grad, rows, exchanged, received, given, again = first["results"]
    assert gathered == [1.5, 0.0]
    assert (y, again) == (7.0, 7.0)
    assert grad == [3.0, 3.0]
    assert rows == [1.0, 2.0, 2.0]
    assert exchanged == [1.0, 2.0]
    assert received == [1, 1]
    assert given == [2.0, 2.0]
    for found in (first, second):
        assert (
            "Mismatched shapes in hvd.allreduce(): rank 0 gave [2], rank 1 [3]"
            in (found["refused"])
        )
        assert found["bad_argument"].startswith("InvalidArgumentError: ")
        assert "root_rank 7 is not among the ranks [0, 1]" in found["bad_argument"]
        assert found["session"] == [[2.0 * place + 1] * 2 for place in range(5)]
        # Rank 1 gave 1 in one step of three: 1 + 1/2 + 1/2.
        assert found["joined"][0] == 0
    assert (first["joined"][1], second["joined"][1]) == (2.0, 1.0)


# -- programs ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_mnist_example_of_horovod(tmp_path):
    """Its Keras program with the import changed, and what Keras 3 itself has renamed."""
    ends = run_world(HERE / "horovod_mnist.py", 2, str(tmp_path))
    first, second = (ended.told for ended in ends)
    assert first["weights"] == second["weights"]
    assert first["lr"] == pytest.approx([0.001 * (1 + i / 3) for i in (1, 2, 3)] + [0.002])
    assert first["loss"][-1] < first["loss"][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"checkpoint-{epoch}.weights.h5" for epoch in (1, 2, 3, 4)
    ]
    assert "the learning rate has warmed up to 0.002" in ends[0].stdout
    assert "warmed up" not in ends[1].stdout


def test_a_rank_with_fewer_collectives_is_named(told):
    """Rank 1 has fewer batches and ends; rank 0 must not wait for ever."""
    assert told[1]["fewer"] == "no error"
    assert "Rank 1 has ended its program, while rank 0 waits for it" in told[0]["fewer"]
    assert "hvd.allreduce" in told[0]["fewer"]


@pytest.mark.slow
def test_a_process_set_of_two_in_three():
    told = [ended.told for ended in run_world(HERE / "horovod_three.py", 3)]
    for each in told:
        assert each["all"] == 3.0
        assert each["crossed"].startswith("DisagreementError: ")
        assert "Processes of this run wait for each other" in each["crossed"]
    assert [each["place"] for each in told] == [0, None, 1]
    assert [each["included"] for each in told] == [True, False, True]
    for each in (told[0], told[2]):
        assert each["sum"] == 4.0
        assert each["rows"] == [[0.0], [2.0], [2.0], [2.0]]
        assert each["given"] == [[2.0]]
        assert each["objects"] == [0, 2]
        assert "root_rank 1 is not among the ranks [0, 2]" in each["no root"]
        # Gradients 4 and 36, on inputs of 1 and 3.
        assert_close(each["weights"], [[1 - 0.1 * 20], [1 - 0.1 * 20]])


@pytest.mark.slow
def test_run_starts_processes():
    def work(first, second):
        import unisono.horovod as hvd

        hvd.init()
        return [hvd.rank(), float(hvd.allreduce(first + second + hvd.rank(), op=hvd.Sum))]

    assert hvd.run(work, (1.0,), {"second": 2.0}, num_proc=2) == [[0, 7.0], [1, 7.0]]
    with pytest.raises(NotImplementedError, match="elastic runs"):
        hvd.run(work, num_proc=2, min_num_proc=1)
    with pytest.raises(ValueError, match="Asked to run on hosts 'far:2'"):
        hvd.run(work, num_proc=2, hosts="far:2")
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        hvd.run(work, num_proc=2, colour="red")


# -- a world of one ----------------------------------------------------------------------------


def test_every_public_name_is_there():
    names = set(hvd.__all__)
    for module in ("unisono.horovod.keras", "unisono.horovod.tensorflow.keras"):
        other = importlib.import_module(module)
        assert set(other.__all__) == names
        assert all(getattr(other, name) is getattr(hvd, name) for name in names)
    assert set(SURFACE) == names


SURFACE = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


@pytest.mark.parametrize(
    "name", [name for name in SURFACE if inspect.isfunction(getattr(hvd, name))]
)
def test_every_function_says_what_it_promises(name):
    text = inspect.getdoc(getattr(hvd, name))
    assert text
    assert ">>> " in text


def test_signatures_are_those_of_horovod():
    expected = {
        "allreduce": "value name average prescale_factor postscale_factor op compression",
        "allgather": "value name",
        "broadcast": "value root_rank name",
        "reducescatter": "value name op",
        "broadcast_": "variables root_rank name process_set",
        "broadcast_object": "obj root_rank session name process_set",
        "allgather_object": "obj session name process_set",
        "broadcast_variables": "variables root_rank process_set inplace",
        "load_model": "filepath custom_optimizers custom_objects compression legacy_opts",
        "init": "comm process_sets",
        "DistributedOptimizer": "optimizer name device_dense device_sparse compression "
        "sparse_as_dense gradient_predivide_factor op backward_passes_per_step "
        "average_aggregated_gradients num_groups groups process_set scale_local_gradients",
    }
    for name, names in expected.items():
        found = list(inspect.signature(getattr(hvd, name)).parameters)
        assert found[: len(names.split())] == names.split()


def test_nothing_works_before_init():
    hvd.shutdown()
    for call in (hvd.rank, hvd.size, hvd.join, lambda: hvd.allreduce(1.0), hvd.stop_timeline):
        with pytest.raises(ValueError, match=r"has not been initialized; use hvd\.init\(\)"):
            call()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.DistributedOptimizer(keras.optimizers.SGD())


def test_bad_input():
    hvd.init()
    sgd = keras.optimizers.SGD
    with pytest.raises(ValueError, match=r"op=hvd\.Max\. Give hvd\.Average or hvd\.Sum"):
        hvd.DistributedOptimizer(sgd(), op=hvd.Max)
    with pytest.raises(ValueError, match="backward_passes_per_step=0"):
        hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="groups=0"):
        hvd.DistributedOptimizer(sgd(), groups=0)
    with pytest.raises(ValueError, match=r"possible only with op=hvd\.Average"):
        hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
        hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="Give integers"):
        hvd.ProcessSet([0.5])
    with pytest.raises(ValueError, match="Give a list of ranks"):
        hvd.ProcessSet("0,1")
    with pytest.raises(
        unisono.errors.DisagreementError, match="splits \\[1\\] do not divide 2 rows"
    ):
        hvd.alltoall([1.0, 2.0], splits=[1])
    with pytest.raises(NotImplementedError, match=r"hvd\.elastic\.KerasState is not implemented"):
        _ = hvd.elastic.KerasState
    with pytest.raises(ValueError, match="has no filepath"):
        hvd.callbacks.BestModelCheckpoint().on_train_begin()


def test_a_parallel_model_takes_no_distributed_optimizer():
    hvd.init()
    model = unisono.parallel(make_model(), replicas=2)
    with pytest.raises(unisono.ModelError, match="both would reduce its gradients"):
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    unisono.release(model)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(unisono.ModelError, match="both would reduce its gradients"):
        unisono.parallel(model, replicas=2)


def test_a_world_of_one_trains_as_keras_does(tmp_path):
    hvd.init()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["adam"]())
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    found, _ = reference(optimizer, callbacks=callbacks)
    assert_close(found, reference(OPTIMIZERS["adam"]())[0], 0)


def test_the_timeline_of_a_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "timeline.json"))
    hvd.shutdown()
    hvd.init()
    hvd.allreduce(1.0, name="one")
    hvd.shutdown()
    names = {event["name"] for event in json.loads((tmp_path / "timeline.json").read_text())}
    assert "ALLREDUCE" in names
