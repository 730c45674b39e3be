"""A loop that the user writes gives on several replicas what it gives on one device."""

import functools

import custom_loops
import keras
import numpy as np
import pytest
from custom_loops import BY_HAND, LOOPS, NATIVE
from twins import BACKEND, TOLERANCE, apart

import unisono

ROWS = [50, 33]  # The last batch has 2 rows, and 1.
LOOP = LOOPS[BACKEND]
on_one_process = pytest.mark.skipif(BACKEND == "torch", reason="a loop of torch is spawned")
only_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="a rule of TensorFlow")
only_torch = pytest.mark.skipif(BACKEND != "torch", reason="only torch has a process per replica")


@functools.cache
def on_one_device(num_rows, **options):
    return LOOP(None, num_rows, **options)


# TensorFlow traces these for half a minute.
LONG_ON_TENSORFLOW = [pytest.mark.slow] if BACKEND == "tensorflow" else []
LONG = [
    pytest.param(3, 50, marks=LONG_ON_TENSORFLOW),
    pytest.param(4, 33, marks=LONG_ON_TENSORFLOW),
]


@on_one_process
@pytest.mark.parametrize(("replicas", "num_rows"), [(2, 50), (2, 33), *LONG, (1, 33)])
def test_the_loop_agrees_with_one_device(replicas, num_rows):
    found = LOOP(unisono.Strategy(replicas=replicas), num_rows)
    assert apart(on_one_device(num_rows), found) <= TOLERANCE


@only_tensorflow
def test_a_loop_without_tf_function():
    found = LOOP(unisono.Strategy(replicas=2), 33, eager=True)
    assert apart(on_one_device(33), found) <= TOLERANCE


@only_torch
@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_loop_agrees_in_every_process(replicas):
    options = [{}, {"averages": True}]
    every = unisono.spawn(custom_loops.in_each_process, (LOOP, ROWS, options), replicas=replicas)
    assert len(every) == replicas
    expected = [on_one_device(count, **more) for count in ROWS for more in options]
    for found in every:
        for one, other in zip(expected, found, strict=True):
            assert apart(one, other) <= TOLERANCE


@pytest.fixture(scope="module")
def natively():
    return unisono.spawn(custom_loops.natively_in_each_process, replicas=2)


@only_torch
def test_optimizers_of_torch_agree_with_one_device(natively):
    expected = [custom_loops.torch_native_loop(None, count, how=how) for count, how in NATIVE]
    for found in natively:
        for case, one, other in zip(NATIVE, expected, found["loops"], strict=True):
            assert apart(one, other) <= TOLERANCE, case


@only_torch
def test_the_guides_loop_for_torch_agrees_as_it_stands(natively):
    first, second = natively
    expected, _ = custom_loops.guide_loop(custom_loops.batches(35))
    assert apart(expected, first["same"]) <= TOLERANCE
    assert apart(first["same"], second["same"]) == 0
    assert first["checksums"] == second["checksums"]
    assert len(set(first["checksums"])) == 2  # The second loop had other batches in each process.


@only_torch
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_an_optimizer_of_torch_in_a_models_own_step(reduction):
    found = custom_loops.native_fit(lambda model: unisono.parallel(model, replicas=2), reduction)
    assert apart(custom_loops.native_fit(lambda model: model, reduction), found) <= TOLERANCE


@on_one_process
@pytest.mark.parametrize(("loop", "how"), BY_HAND[BACKEND])
def test_gradients_reduced_by_hand_agree_with_one_device(loop, how):
    found = loop(unisono.Strategy(replicas=2), how=how)
    assert apart(loop(None, how=how), found) <= TOLERANCE


@pytest.mark.skipif(BACKEND != "jax", reason="elsewhere a replica sees its own rows only")
def test_the_guides_loop_in_a_scope_and_a_stateful_layer_agree():
    found = custom_loops.jax_guide_in_scope(unisono.Strategy(replicas=2))
    assert apart(custom_loops.jax_guide_in_scope(None), found) <= TOLERANCE
    found = custom_loops.stateful_fit(lambda model: unisono.parallel(model, replicas=2))
    assert apart(custom_loops.stateful_fit(lambda model: model), found) <= TOLERANCE


@only_tensorflow
def test_gradients_that_were_not_all_reduced():
    import tensorflow as tf

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"through reduce_gradients"):
        custom_loops.tensorflow_by_hand(unisono.Strategy(replicas=2), how="not_all")


@only_tensorflow
def test_a_variable_of_tensorflow_that_replicas_share():
    import tensorflow as tf

    # TensorFlow makes it an error of its own on the way out of a tf.function.
    strategy = unisono.Strategy(replicas=2)
    with pytest.raises(Exception, match=r"StrategyError: .*Make it a keras\.Variable"):
        custom_loops.tensorflow_by_hand(strategy, how="accumulate", accumulator=tf.Variable)


@only_tensorflow
def test_gradients_outside_of_a_step():
    with pytest.raises(unisono.errors.StrategyError, match=r"that strategy\.run runs"):
        unisono.Strategy(replicas=2).reduce_gradients([1.0])


# -- parts of a loop ------------------------------------------------------------------------------


@on_one_process
def test_reduce_and_gather_join_what_replicas_returned():
    strategy = unisono.Strategy(replicas=3)
    rows = np.arange(10, dtype="float32")
    (batch,) = strategy.distribute_dataset([rows])
    doubled = strategy.run(lambda x: 2 * x, args=(batch,))
    assert float(strategy.reduce("sum", doubled, axis=0)) == 90
    assert float(strategy.reduce("mean", doubled, axis=0)) == 9
    assert (np.asarray(strategy.gather(doubled)) == 2 * rows).all()


def joined():
    strategy = unisono.Strategy()
    ((rows,),) = strategy.distribute_dataset([(np.arange(10, dtype="float32"),)])
    doubled = strategy.run(lambda x: 2 * x, args=(rows,))
    print("printed by a replica")
    return (
        strategy.num_replicas_in_sync,
        float(strategy.reduce("sum", doubled, axis=0)),
        float(strategy.reduce("mean", doubled, axis=0)),
        strategy.gather(doubled).tolist(),
    )


@only_torch
def test_spawned_replicas_join_and_show_the_first_ones_output(capfd):
    expected = (3, 90.0, 9.0, [2.0 * i for i in range(10)])
    assert unisono.spawn(joined, replicas=3) == [expected] * 3
    assert capfd.readouterr().out.count("printed by a replica") == 1


def starts_apart():
    strategy = unisono.Strategy()
    keras.utils.set_random_seed(strategy.gather(keras.ops.ones(1)).shape[0])
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1)
    for rows in strategy.distribute_dataset([np.arange(8, dtype="float32").reshape(2, 4)]):
        model.layers[0].kernel.assign_add(rows[:1, :].T)
        loss = model(rows).mean()
        loss.backward()
        weights = list(model.trainable_weights)
        optimizer.apply([v.value.grad for v in weights], weights)


@only_torch
def test_replicas_that_begin_apart_are_noticed():
    with pytest.raises(unisono.errors.StrategyError, match="begin with different weights"):
        unisono.spawn(starts_apart, replicas=2)


# -- losses ---------------------------------------------------------------------------------------


def test_average_loss_outside_of_a_step_is_the_mean():
    loss = np.array([1.0, 2.0, 6.0], "float32")
    assert float(unisono.compute_average_loss(loss)) == 3
    assert float(unisono.compute_average_loss(loss, [1.0, 0.5, 0.0])) == pytest.approx(2 / 3)
    assert float(unisono.compute_average_loss(loss, global_batch_size=9)) == 1
    assert float(unisono.scale_regularization_loss([1.0, 2.0])) == 3


@on_one_process
@pytest.mark.parametrize("num_rows", [8, 5])
def test_parts_of_losses_add_up(num_rows):
    strategy = unisono.Strategy(replicas=2)
    (batch,) = strategy.distribute_dataset([np.arange(num_rows, dtype="float32")])

    def step(x):
        return unisono.compute_average_loss(x), unisono.scale_regularization_loss([3.0, 4.0])

    losses = strategy.run(step, args=(batch,))
    average, regularization = (float(strategy.reduce("sum", loss)) for loss in losses)
    assert average == pytest.approx(np.arange(num_rows).mean())
    assert regularization == 7


# -- bad input ------------------------------------------------------------------------------------


def test_a_loss_without_rows():
    with pytest.raises(unisono.errors.StrategyError, match="reduction=None"):
        unisono.compute_average_loss(1.0)


@pytest.mark.parametrize("dataset", [[np.float32(1.0)], [(np.ones((4, 2)), np.ones(3))]])
def test_data_without_a_batch(dataset):
    distributed = unisono.Strategy(replicas=1).distribute_dataset(dataset)
    with pytest.raises(unisono.errors.StrategyError, match="rows"):
        list(distributed)


def test_what_is_no_data():
    with pytest.raises(unisono.errors.StrategyError, match="Asked to distribute a int"):
        unisono.Strategy(replicas=1).distribute_dataset(3)


@pytest.mark.parametrize("how", ["max", None, 3])
def test_an_unknown_reduction(how):
    with pytest.raises(unisono.errors.StrategyError, match='"sum" or "mean"'):
        unisono.Strategy(replicas=1).reduce(how, keras.ops.ones(2))


@on_one_process
@pytest.mark.parametrize("value", [1.0, "text", np.ones(3)])
def test_a_value_that_no_replica_returned(value):
    strategy = unisono.Strategy(replicas=2)
    with pytest.raises(unisono.errors.StrategyError, match=r"Pass the result of strategy\.run"):
        strategy.reduce("sum", value)
    with pytest.raises(unisono.errors.StrategyError, match=r"Pass the result of strategy\.run"):
        strategy.gather(value)


@only_tensorflow
def test_a_run_inside_a_run():
    strategy = unisono.Strategy(replicas=2)
    with pytest.raises(unisono.errors.StrategyError, match="inside a step"):
        strategy.run(lambda: strategy.run(lambda: 1.0))


@only_tensorflow
def test_an_iteration_inside_a_tf_function():
    import tensorflow as tf

    distributed = unisono.Strategy(replicas=2).distribute_dataset([np.ones(4)])
    with pytest.raises(unisono.errors.StrategyError, match=r"inside a tf\.function"):
        tf.function(lambda: next(iter(distributed)), autograph=False)()


@only_torch
def test_a_loop_in_a_plain_process_says_how_to_start_it():
    strategy = unisono.Strategy(replicas=2)
    with pytest.raises(
        unisono.errors.StrategyError, match=r"unisono\.spawn\(function, replicas=2\)"
    ):
        list(strategy.distribute_dataset([np.ones(4)]))
    with pytest.raises(unisono.errors.StrategyError, match=r"unisono\.spawn"):
        strategy.run(lambda: 1.0)


def test_state_of_any_structure_is_replicated():
    strategy = unisono.Strategy(replicas=2)
    layer = keras.layers.Dense(1)
    layer.kept = [keras.ops.ones(2), {"b": keras.ops.zeros(1)}]  # Keras' own kind of list.
    layer.build((None, 3))
    state = {"w": layer.kernel, "b": None, 3: layer.kept}
    found = strategy.replicate(state)
    assert list(found) == ["w", "b", 3]
    assert found["b"] is None
    assert np.asarray(keras.ops.convert_to_numpy(found[3][0])).tolist() == [1.0, 1.0]
