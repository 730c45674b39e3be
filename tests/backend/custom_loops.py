"""Training loops written by hand, each as the Keras guide of its backend has it.

With `strategy=None` they run on one device and use nothing of unisono.
"""

import contextlib
from typing import Any

import keras
import numpy as np

import unisono

GLOBAL_BATCH = 16
NUM_CLASSES = 3


def batches(num_rows: int) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(num_rows, 6)).astype("float32")
    y = rng.integers(0, NUM_CLASSES, num_rows)
    starts = range(0, num_rows, GLOBAL_BATCH)
    return [(x[i : i + GLOBAL_BATCH], y[i : i + GLOBAL_BATCH]) for i in starts]


class Net(keras.Model):
    """Not built before its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.norm = keras.layers.BatchNormalization(epsilon=0.1)
        self.out = keras.layers.Dense(NUM_CLASSES)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.norm(self.hidden(x), training=training))


def make() -> tuple[Any, Any, Any]:
    keras.utils.set_random_seed(3)
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5, epsilon=1e-3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    return Net(), optimizer, loss


def results(model: Any, optimizer: Any, lines: list[Any]) -> list[Any]:
    variables = [*model.variables, *optimizer.variables]
    return [np.asarray(lines), *(keras.ops.convert_to_numpy(v) for v in variables)]


def tensorflow_loop(strategy: Any, num_rows: int, *, eager: bool = False) -> list[Any]:
    """The GradientTape program that TensorFlow taught, with its own names."""
    import tensorflow as tf

    strategy = strategy or tf.distribute.get_strategy()
    x, y = (np.concatenate(part) for part in zip(*batches(num_rows), strict=True))
    train = tf.data.Dataset.from_tensor_slices((x, y)).batch(GLOBAL_BATCH)
    distributed = strategy.experimental_distribute_dataset(train)
    with strategy.scope():
        model, optimizer, loss_object = make()

        def compute_loss(labels: Any, predictions: Any) -> Any:
            per_example = loss_object(labels, predictions)
            return tf.nn.compute_average_loss(per_example, global_batch_size=GLOBAL_BATCH)

        test_loss = keras.metrics.Mean(name="test_loss")
        accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def train_step(inputs: Any) -> Any:
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            loss = compute_loss(labels, predictions)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if tf.reduce_sum(tf.ones(2)) > 1:  # Autograph must reach a user's step.
            accuracy.update_state(labels, predictions)
        return loss

    def eval_step(inputs: Any) -> None:
        images, labels = inputs
        test_loss.update_state(loss_object(labels, model(images, training=False)))

    def distributed_train_step(inputs: Any) -> Any:
        losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    def distributed_eval_step(inputs: Any) -> Any:
        return strategy.run(eval_step, args=(inputs,))

    if not eager:
        distributed_train_step = tf.function(distributed_train_step)
        distributed_eval_step = tf.function(distributed_eval_step)
    lines = []
    for _ in range(2):
        total = sum(float(distributed_train_step(batch)) for batch in distributed)
        for batch in distributed:
            distributed_eval_step(batch)
        lines.append([total, float(accuracy.result()), float(test_loss.result())])
        accuracy.reset_state()
        test_loss.reset_state()
    return results(model, optimizer, lines)


def torch_loop(strategy: Any, num_rows: int, *, averages: bool = False) -> list[Any]:
    """The loop of Keras' guide for torch; `averages` uses compute_average_loss."""
    import torch

    model, optimizer, per_example = make()
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    data: Any = [tuple(map(torch.as_tensor, batch)) for batch in batches(num_rows)]
    if strategy is not None:
        data = strategy.distribute_dataset(data)
    lines = []
    for _ in range(2):
        total = 0.0
        for x, y in data:
            logits = model(x, training=True)
            loss = per_example(y, logits)
            loss = unisono.compute_average_loss(loss) if averages else loss.mean()
            model.zero_grad()
            loss.backward()
            weights = list(model.trainable_weights)
            with torch.no_grad():
                optimizer.apply([v.value.grad for v in weights], weights)
            accuracy.update_state(y, logits)
            if averages:
                total += float(loss if strategy is None else strategy.reduce("sum", loss))
        lines.append([total, float(accuracy.result())])
        accuracy.reset_state()
    return results(model, optimizer, lines)


def torch_native_loop(strategy: Any, num_rows: int, *, how: str = "adam") -> list[Any]:
    """The first loop of Keras' guide for torch, whose optimizer is torch's own."""
    import torch

    model, _, _ = make()
    model(np.zeros((1, 6), "float32"))
    # Only rows of the first class reach it: where a replica has none, it has no gradient.
    head = keras.layers.Dense(1, name="head")
    head.build((None, 6))
    parameters = [{"params": model.parameters()}, {"params": head.parameters(), "lr": 0.02}]
    if how == "lbfgs":
        parameters = [*model.parameters(), *head.parameters()]
        optimizer: Any = torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe")
    else:
        optimizer = torch.optim.Adam(parameters, 0.01, eps=1e-3, fused=how == "fused_scaler")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled="scaler" in how)
    data: Any = [tuple(map(torch.as_tensor, batch)) for batch in batches(num_rows)]
    # One row overflows, so that a scaler skips the second step on all replicas or on none.
    weights = [torch.ones(len(x)) for x, _ in data]
    weights[1][-1] = np.inf if "scaler" in how else 1.0
    data = [(x, y, w) for (x, y), w in zip(data, weights, strict=True)]
    if how == "lbfgs":
        data = [tuple(part[:15] for part in data[0])]  # Any more would blow up roundings.
    if strategy is not None:
        data = strategy.distribute_dataset(data)
    own = torch.nn.Parameter(torch.zeros(()))  # A tensor of no model: every process has its own.
    own_optimizer = torch.optim.SGD([own], 1.0)
    for _ in range(1 if how == "lbfgs" else 2):
        for x, y, w in data:

            def closure(x: Any = x, y: Any = y, w: Any = w) -> Any:
                model.zero_grad()
                head.zero_grad()
                loss = torch.nn.functional.cross_entropy(
                    model(x, training=True), y, reduction="none"
                )
                loss = (loss * w).mean()
                if (y == 0).any():
                    loss = loss + head(x[y == 0]).square().sum() / len(y)
                scaler.scale(loss).backward()
                return loss

            if how == "lbfgs":
                optimizer.step(closure)
            else:
                closure()
                if how == "clipped_scaler":
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                scaler.step(optimizer)
                scaler.update()
            own_optimizer.zero_grad()
            (own * (len(y) + (0 if strategy is None else 100))).backward()
            own_optimizer.step()
        schedule.step()
    line = [scaler.get_scale(), optimizer.param_groups[0]["lr"]]
    assert float(own.detach()) != 0
    if strategy is not None:
        line.append(len(unisono.check_replicas(model)))
    state = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
    tensors = [torch.as_tensor(v).numpy() for v in state if not isinstance(v, list | type(None))]
    return [np.asarray(line[:2]), *results(model, head, []), *tensors]


def jax_loop(strategy: Any, num_rows: int) -> list[Any]:
    """The stateless loop of Keras' guide for JAX."""
    import jax

    model, optimizer, per_example = make()
    model(np.zeros((1, 6), "float32"))
    optimizer.build(model.trainable_variables)

    def compute_loss(trainable: Any, other: Any, x: Any, y: Any) -> Any:
        logits, other = model.stateless_call(trainable, other, x, training=True)
        return unisono.compute_average_loss(per_example(y, logits)), other

    @jax.jit
    def train_step(state: Any, batch: Any) -> Any:
        trainable, other, slots = state
        gradient = jax.value_and_grad(compute_loss, has_aux=True)
        (loss, other), gradients = gradient(trainable, other, *batch)
        trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
        return loss, (trainable, other, slots)

    parts = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state: Any = keras.tree.map_structure(lambda variable: variable.value, parts)
    data: Any = batches(num_rows)
    if strategy is not None:
        state, data = strategy.replicate(parts), strategy.distribute_dataset(data)
    lines = []
    for _ in range(2):
        for batch in data:
            if strategy is None:
                loss, state = train_step(state, batch)
            else:
                loss, state = strategy.run(train_step, args=(state, batch))
                loss = strategy.reduce("sum", loss)
        lines.append([float(loss)])
    for variables, values in zip(parts, state, strict=True):
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
    return results(model, optimizer, lines)


LOOPS = {"jax": jax_loop, "tensorflow": tensorflow_loop, "torch": torch_loop}


def tensorflow_by_hand(strategy: Any, *, how: str, accumulator: Any = None) -> list[Any]:
    """Gradients that a loop clips or accumulates before it applies them."""
    import tensorflow as tf

    keras.utils.set_random_seed(3)
    layers = [keras.layers.Embedding(9, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    reduce = list if strategy is None else strategy.reduce_gradients
    accumulator = accumulator or keras.Variable
    totals = [accumulator(np.zeros(v.shape, "float32")) for v in model.trainable_variables]

    def gradients_of(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=tf.constant(GLOBAL_BATCH))
        gradients = tape.gradient(loss, model.trainable_variables)
        if how != "not_all":
            gradients = reduce(gradients)
        return gradients

    def clip_step(batch: Any) -> None:
        gradients, _ = tf.clip_by_global_norm(gradients_of(batch), 0.05)
        if how == "not_all":
            reduce([tf.ones(2)])
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def accumulate_step(batch: Any) -> None:
        for total, gradient in zip(totals, gradients_of(batch), strict=True):
            total.assign_add(tf.convert_to_tensor(gradient))

    def apply_step() -> None:
        gradients = [tf.convert_to_tensor(total) for total in totals]
        optimizer.apply(gradients, model.trainable_variables)
        for total in totals:
            total.assign(tf.zeros(total.shape))

    @tf.function(reduce_retracing=True)
    def run(batch: Any) -> None:
        step = accumulate_step if how == "accumulate" else clip_step
        _ = step(batch) if strategy is None else strategy.run(step, args=(batch,))

    data: Any = [(np.abs(x * 2).astype("int32") % 9, y.astype("int32")) for x, y in batches(35)]
    for number, batch in enumerate(data if strategy is None else strategy.distribute_dataset(data)):
        run(batch)
        if how == "accumulate" and number == 2:  # Of 16, 16 and 3 rows.
            _ = apply_step() if strategy is None else strategy.run(apply_step)
    return results(model, optimizer, [])


def torch_by_hand(strategy: Any, *, how: str) -> list[Any]:
    import torch

    model, keras_optimizer, per_example = make()
    model(np.zeros((1, 6), "float32"))
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    reduce = (lambda gradients: gradients) if strategy is None else strategy.reduce_gradients
    data: Any = [tuple(map(torch.as_tensor, batch)) for batch in batches(35)]
    if strategy is not None:
        data = strategy.distribute_dataset(data)
    for number, (x, y) in enumerate(data):
        losses = per_example(y, model(x, training=True))
        is_part = how == "accumulate_parts"
        loss = unisono.compute_average_loss(losses) if is_part else losses.mean()
        if not how.startswith("accumulate"):
            model.zero_grad()
        loss.backward()
        if how == "clip_list":
            weights = list(model.trainable_weights)
            gradients = reduce([v.value.grad for v in weights])
            norm = torch.linalg.vector_norm(torch.cat([g.ravel() for g in gradients]))
            with torch.no_grad():
                keras_optimizer.apply([g * 0.1 / norm for g in gradients], weights)
            continue
        if how == "not_all":
            reduce([model.out.bias.value])
        else:
            reduce(model)
        if how == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if not how.startswith("accumulate") or number == 2:
            optimizer.step()
            model.zero_grad()
    return results(model, keras_optimizer, [])


def jax_by_hand(strategy: Any, *, how: str) -> list[Any]:
    import jax

    model, optimizer, per_example = make()
    model(np.zeros((1, 6), "float32"))
    optimizer.build(model.trainable_variables)
    reduce = list if strategy is None else strategy.reduce_gradients

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        trainable, other, slots = state
        x, y = batch

        def loss_of(trainable: Any) -> Any:
            return per_example(y, model.stateless_call(trainable, other, x)[0]).mean()

        gradients = reduce(jax.grad(loss_of)(trainable))
        norm = sum((g**2).sum() for g in gradients) ** 0.5
        return optimizer.stateless_apply(slots, [g * 0.1 / norm for g in gradients], trainable)

    parts = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state: Any = keras.tree.map_structure(lambda variable: variable.value, parts)
    data: Any = batches(35)
    if strategy is not None:
        state, data = strategy.replicate(parts), strategy.distribute_dataset(data)
    for batch in data:
        trainable, slots = (strategy.run if strategy else _call)(step, args=(state, batch))
        state = (trainable, state[1], slots)
    for variable, value in zip(model.trainable_variables, state[0], strict=True):
        variable.assign(value)
    return [keras.ops.convert_to_numpy(v) for v in model.variables]


def jax_guide_in_scope(strategy: Any) -> list[Any]:
    """The loop of Keras' guide for JAX as it stands, on a model of the scope that was fitted."""
    import jax

    scope = contextlib.nullcontext() if strategy is None else strategy.scope()
    with scope:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(NUM_CLASSES)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data: Any = batches(35)
    model.fit(*data[0], batch_size=GLOBAL_BATCH, verbose=0)
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    optimizer.build(model.trainable_variables)

    def loss_of(trainable: Any, x: Any, y: Any) -> Any:
        logits, _ = model.stateless_call(trainable, [], x, training=True)
        return keras.ops.mean(
            keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        )

    @jax.jit
    def train_step(state: Any, batch: Any) -> Any:
        trainable, slots = state
        return optimizer.stateless_apply(slots, jax.grad(loss_of)(trainable, *batch), trainable)

    state: Any = tuple([v.value for v in o.variables] for o in (model, optimizer))
    for batch in data if strategy is None else strategy.distribute_dataset(data):
        state = train_step(state, batch)
    for variable, value in zip(model.trainable_variables, state[0], strict=True):
        variable.assign(value)
    return [keras.ops.convert_to_numpy(v) for v in model.variables]


def stateful_fit(adopt: Any) -> list[Any]:
    """A recurrent layer that goes on with the state of the batch before."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.SimpleRNN(4, stateful=True), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input(batch_shape=(8, 3, 2)), *layers])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model = adopt(model)
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape).astype("float32") for shape in [(24, 3, 2), (24, 2)])
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    predicted = model.predict(x, batch_size=8, verbose=0)
    return [np.asarray(history.history["loss"]), predicted, *model.get_weights()]


class NativeNet(keras.Model):
    """A training step of its own, whose optimizer is one of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = keras.layers.Dense(NUM_CLASSES)
        self.out.build((None, 6))
        self.native: Any = None
        self.reduction = "mean"

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x))
        if self.reduction == "sum":
            loss = loss * len(x)
        loss.backward()
        self.native.step()
        return {"loss": loss}


def native_fit(adopt: Any, reduction: str = "mean") -> list[Any]:
    import torch

    keras.utils.set_random_seed(3)
    model = NativeNet()
    model(np.zeros((1, 6), "float32"))
    model.native = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    model.reduction = reduction
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model = adopt(model)
    x, y = (np.concatenate(part) for part in zip(*batches(35), strict=True))
    model.fit(x, y, batch_size=GLOBAL_BATCH, verbose=0)
    return [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]


def _call(step: Any, args: Any) -> Any:
    return step(*args)


BY_HAND = {
    "jax": [(jax_by_hand, "clip")],
    "tensorflow": [(tensorflow_by_hand, how) for how in ("clip", "accumulate")],
    "torch": [
        (torch_by_hand, how) for how in ("clip", "clip_list", "accumulate", "accumulate_parts")
    ],
}


NATIVE = [(35, "adam"), (33, "adam")]
NATIVE += [(35, how) for how in ("lbfgs", "scaler", "fused_scaler", "clipped_scaler")]


def natively_in_each_process() -> dict[str, Any]:
    """Loops with distributed batches; the guide's own on the same batches and on others."""
    strategy = unisono.Strategy()
    loops = [torch_native_loop(strategy, count, how=how) for count, how in NATIVE]
    same, checksum = guide_loop(batches(35))
    _, other_checksum = guide_loop(batches(35)[unisono.topology().rank :])
    return {"loops": loops, "same": same, "checksums": [checksum, other_checksum]}


def guide_loop(data: list[Any]) -> tuple[list[Any], str]:
    import torch

    model, _, _ = make()
    model(np.zeros((1, 6), "float32"))
    optimizer = torch.optim.Adam(model.parameters(), 0.01, eps=1e-3)
    for x, y in data[:2]:
        loss = torch.nn.functional.cross_entropy(model(x), torch.as_tensor(y))
        model.zero_grad()
        loss.backward()
        optimizer.step()
    checksum = unisono.check_replicas(model) if unisono.topology().world_size > 1 else ""
    return [keras.ops.convert_to_numpy(v) for v in model.variables], checksum


def in_each_process(loop: Any, rows: list[int], options: list[dict[str, Any]]) -> list[Any]:
    """Loops one after the other in a process that `unisono.spawn` started."""
    strategy = unisono.Strategy()
    return [loop(strategy, count, **more) for count in rows for more in options]
