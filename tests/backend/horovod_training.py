"""Trainings with unisono.horovod in two processes, for horovod_world.py."""

import sys
from pathlib import Path

import keras
import numpy as np
from horovod_models import GLOBAL_BATCH, OPTIMIZERS, data, make_model

import unisono.horovod as hvd

hvd.init()
BACKEND = keras.backend.backend()
rank, size = hvd.rank(), hvd.size()
FOLDER = Path(sys.argv[1])


def own_rows(array):
    """This process' shard of every global batch, concatenated."""
    local_batch = GLOBAL_BATCH // size
    batches = np.split(array, len(array) // GLOBAL_BATCH)
    return np.concatenate(
        [batch[rank * local_batch : (rank + 1) * local_batch] for batch in batches]
    )


def train(optimizer, *, epochs=2, callbacks=(), compiled=None):
    """Weights and history of a small model after training on this process' rows."""
    x, y = data()
    model = make_model()
    model.compile(optimizer, "mse", metrics=["mae"], **(compiled or {}))
    history = model.fit(
        own_rows(x),
        own_rows(y),
        batch_size=GLOBAL_BATCH // size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model, history.history


def weights(model):
    return [np.asarray(w).astype("float64").ravel().tolist() for w in model.get_weights()]


def check_optimizers():
    """Every optimizer, as if it had trained on the global batches."""
    found = {}
    for name, make in OPTIMIZERS.items():
        model, history = train(hvd.DistributedOptimizer(make()))
        found[name] = [weights(model), history["loss"]]
    return found


def check_options():
    """Options that change how gradients travel, and not what arrives."""
    sgd = OPTIMIZERS["sgd"]
    options = {
        "predivide": {"gradient_predivide_factor": 2.0},
        "groups": {"groups": 2},
        "sum": {"op": hvd.Sum},
        "fp16": {"compression": hvd.Compression.fp16},
        "passes": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
        "summed passes": {"backward_passes_per_step": 2},
    }
    found = {}
    for name, option in options.items():
        model, _ = train(hvd.DistributedOptimizer(sgd(), **option))
        found[name] = [weights(model), int(model.optimizer.iterations)]
    compiled = {"steps_per_execution": 1 if BACKEND == "torch" else 2}
    found["steps"] = [weights(train(hvd.DistributedOptimizer(sgd()), compiled=compiled)[0]), 0]
    compiled = {"run_eagerly": True}
    found["eager"] = [weights(train(hvd.DistributedOptimizer(sgd()), compiled=compiled)[0]), 0]
    alone = hvd.add_process_set([0])
    model, _ = train(hvd.DistributedOptimizer(sgd(), process_set=alone))
    found["alone"] = [weights(model), 0]
    hvd.remove_process_set(alone)
    model, x = make_model(), data()[0]
    local = hvd.PartialDistributedOptimizer(
        sgd(), local_layers=model.layers[0], scale_local_gradients=False
    )
    model.compile(local, "mse")
    model.fit(own_rows(x), own_rows(data()[1]), batch_size=4, epochs=1, shuffle=False, verbose=0)
    found["local"] = [weights(model), 0]
    return found


def check_callbacks():
    x, y = data()
    keras.utils.set_random_seed(rank)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    before = weights(model)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.2, momentum=0.9)), "mse")
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate))

    history = model.fit(
        own_rows(x),
        own_rows(y),
        batch_size=4,
        epochs=3,
        verbose=0,
        shuffle=False,
        validation_data=(own_rows(x), own_rows(y)),
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.2, warmup_epochs=2, verbose=1),
            hvd.callbacks.LearningRateScheduleCallback(0.2, lambda epoch: 0.1, start_epoch=2),
            hvd.callbacks.BestModelCheckpoint(filepath=str(FOLDER / "best.keras")),
            Watch(),
        ],
    ).history
    return {"before": before, "after": weights(model), "rates": seen, "history": history}


def check_momentum():
    """Momentum through a change of the learning rate, with and without its correction."""
    found = {}
    for is_corrected in (True, False):
        schedule = hvd.callbacks.LearningRateScheduleCallback(
            0.1, lambda epoch: 1.0 + epoch, momentum_correction=is_corrected
        )
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5))
        found[str(is_corrected)] = weights(train(optimizer, callbacks=[schedule])[0])
    return found


def check_files():
    path = FOLDER / f"model-{rank}.keras"
    model, _ = train(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), epochs=1)
    model.save(path)
    loaded = hvd.load_model(path)
    x, y = data()
    for each in (model, loaded):
        each.fit(own_rows(x), own_rows(y), batch_size=4, shuffle=False, verbose=0)
    hvd.broadcast_global_variables(0)
    return {
        "class": type(model.optimizer).__name__,
        "config": model.optimizer.get_config(),
        "trained": weights(model),
        "loaded": weights(loaded),
        "iterations": int(loaded.optimizer.iterations),
    }


def check_scaling():
    """Mixed precision: whether a step is skipped is decided by all alike."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = data()
        model = make_model()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
        name = type(model.optimizer).__name__
        if rank == 1:
            x[5] = np.inf  # In the second half of the first batch: rank 1 alone sees it.
        model.fit(own_rows(x), own_rows(y), batch_size=4, shuffle=False, verbose=0)
        return {"class": name, "weights": weights(model)}
    finally:
        keras.config.set_dtype_policy("float32")


def check_sparse():
    """Gradients of an embedding, which TensorFlow gives as rows."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 20, (16, 3)), rng.random((16, 1)).astype("float32")
    found = {}
    for is_dense in (False, True):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((3,)), keras.layers.Embedding(20, 2), keras.layers.Flatten()]
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        sgd = keras.optimizers.SGD(0.1)
        model.compile(hvd.DistributedOptimizer(sgd, sparse_as_dense=is_dense), "mse")
        model.fit(own_rows(x), own_rows(y), batch_size=4, shuffle=False, verbose=0)
        found[str(is_dense)] = weights(model)
    return found


def check_in_functions():
    """Collectives and gradients through them, in the functions of each backend."""
    given = [1.0 + rank, 2.0]
    if BACKEND == "tensorflow":
        return functions_of_tensorflow(given)
    if BACKEND == "torch":
        return functions_of_torch(given)
    import jax

    try:
        jax.jit(lambda x: hvd.allreduce(x))(np.array(given))
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return {"refused": "nothing"}


def functions_of_tensorflow(given):
    import tensorflow as tf

    x = tf.Variable(given)

    @tf.function
    def collect(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) * (1.0 + rank))
        gathered = hvd.allgather(x[: 1 + rank])
        rows, received = hvd.alltoall(x, splits=tf.constant([1, 1]))
        return y, tape.gradient(y, x), gathered, rows, received, hvd.broadcast(x, 1)

    with tf.GradientTape(persistent=True) as tape:
        gathered = hvd.allgather(tf.convert_to_tensor(x)[: 1 + rank])
        loss = tf.reduce_sum(gathered * (1.0 + rank))
    results = [tape.gradient(loss, x), *collect(x), *collect(x)[:1]]

    @tf.function
    def mismatched():
        return hvd.allreduce(tf.zeros([2 + rank]))

    @tf.function
    def from_nobody():
        return hvd.broadcast(tf.zeros([2]), 7)

    refused = []
    for call in (mismatched, from_nobody):
        try:
            call()
            refused.append("nothing")
        except tf.errors.OpError as error:
            refused.append(f"{type(error).__name__}: {error}")
    return {
        "results": [np.asarray(each).tolist() for each in results],
        "refused": refused[0],
        "bad_argument": refused[1],
        "joined": join_in_graph(tf),
        "session": in_session(tf),
    }


def in_session(tf):
    """Several tensors of one size in one call, in a graph of TensorFlow 1, several times."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tensors = [tf.fill([4], float(place + rank)) for place in range(5)]
        shares = hvd.grouped_reducescatter(tensors, op=hvd.Sum)
        found = [session.run(shares) for _ in range(10)]
    return np.asarray(found[-1]).tolist()


def join_in_graph(tf):
    """Rank 1 joins after one step of a compiled training, rank 0 does two more."""
    weight = keras.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([weight])

    @tf.function
    def step():
        optimizer.apply([tf.constant([-1.0])], [weight])

    for _ in range(1 if rank else 3):
        step()
    return [hvd.join(), float(weight[0])]


def functions_of_torch(given):
    import torch

    found = []
    for call in (
        lambda x: hvd.allreduce(x, op=hvd.Sum),
        lambda x: hvd.allgather(x[: 1 + rank]),
        lambda x: hvd.broadcast(x, root_rank=1),
        lambda x: hvd.reducescatter(x, op=hvd.Sum),
        lambda x: hvd.alltoall(x, splits=[1, 1])[0],
    ):
        x = torch.tensor(given, requires_grad=True)
        (call(x) * (1.0 + rank)).sum().backward()
        found.append(x.grad.tolist())
    return {"gradients": found}


def check_fewer():
    """Rank 1 has two batches and ends its program, rank 0 has three. The last check of all."""
    num_rows = 12 - 4 * rank
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    try:
        model.fit(np.ones((num_rows, 4)), np.ones((num_rows, 1)), batch_size=4, verbose=0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
