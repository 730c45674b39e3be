"""What most cases do with a model (fit, evaluate, predict, read its state), and their data."""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import layers

from exactness.case import Results, by_position, state_of

ROWS, TEST_ROWS, GLOBAL_BATCH, EPOCHS = 47, 23, 12, 5  # 4 steps an epoch, 20 in all
NUM_FEATURES, NUM_CLASSES, NUM_TOKENS, NUM_STEPS = 6, 4, 9, 5


class Task(NamedTuple):
    """What fit, evaluate and predict are given."""

    x: Any
    y: Any
    x_test: Any
    y_test: Any


def split(x: Any, y: Any) -> Task:
    """The first rows train, the others test; x and y may be nested."""
    return Task(rows(x, 0, ROWS), rows(y, 0, ROWS), rows(x, ROWS, None), rows(y, ROWS, None))


def rows(data: Any, start: int | None, stop: int | None) -> Any:
    """The same rows of every array in the structure."""
    if isinstance(data, dict):
        return {key: rows(value, start, stop) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(rows(value, start, stop) for value in data)
    return data[start:stop]


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray[Any, Any]:
    """Normal numbers for every row of both parts."""
    draw = np.random.default_rng([seed, *shape])
    return (scale * draw.normal(size=(ROWS + TEST_ROWS, *shape))).astype("float32")


def labels(*shape: int, upto: int = NUM_CLASSES, seed: int = 0) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng([seed, upto, *shape])
    return draw.integers(0, upto, size=(ROWS + TEST_ROWS, *shape)).astype("int32")


def regression(num_outputs: int = 2) -> Task:
    # Rows grow along the data: replicas that weigh their slices wrongly are found out.
    growing = np.linspace(0.2, 1.5, ROWS + TEST_ROWS, dtype="float32")[:, None]
    x = numbers(NUM_FEATURES) * growing
    mix = np.random.default_rng(5).normal(size=(NUM_FEATURES, num_outputs)).astype("float32")
    return split(x, np.tanh(x @ mix) + growing)


def classes(*, one_hot: bool = False) -> Task:
    y = labels()
    x = numbers(NUM_FEATURES) + 0.8 * np.eye(NUM_CLASSES, NUM_FEATURES, dtype="float32")[y]
    return split(x, np.eye(NUM_CLASSES, dtype="float32")[y] if one_hot else y)


def binary() -> Task:
    x = numbers(NUM_FEATURES)
    return split(x, (x[:, :1] + 0.5 * numbers(1, seed=3) > 0.3).astype("float32"))


def images() -> Task:
    return split(numbers(6, 6, 2, seed=1), labels(seed=1))


def tokens() -> Task:
    """Token ids padded with 0 to one length, and a target for each row."""
    return split(padded_tokens(), numbers(2, seed=2))


def tagged_tokens() -> Task:
    """Token ids padded with 0, and a label for each step."""
    return split(padded_tokens(), labels(NUM_STEPS, seed=2))


def padded_tokens() -> np.ndarray[Any, Any]:
    ids = labels(NUM_STEPS, upto=NUM_TOKENS - 1, seed=4) + 1
    # Lengths from 1 to 5, short ones together: slices of a batch differ in valid steps.
    lengths = 1 + (np.arange(ROWS + TEST_ROWS) // 4) % NUM_STEPS
    return np.where(np.arange(NUM_STEPS) < lengths[:, None], ids, 0).astype("int32")


def row_weights(count: int = ROWS) -> np.ndarray[Any, Any]:
    """Uneven weights for samples, some of them zero."""
    weights = np.linspace(0.1, 3.0, count, dtype="float32")
    weights[::7] = 0.0
    return weights


def step_weights(count: int = ROWS) -> np.ndarray[Any, Any]:
    """Uneven weights for each step of each sample."""
    return (row_weights(count)[:, None] * np.linspace(1.0, 0.2, NUM_STEPS)).astype("float32")


def mlp(num_outputs: int = 2, activation: str | None = None, **dense: Any) -> Any:
    """A small functional network on the features of `regression` and `classes`."""
    inputs = keras.Input((NUM_FEATURES,))
    hidden = layers.Dense(5, activation="tanh", **dense)(inputs)
    return keras.Model(inputs, layers.Dense(num_outputs, activation=activation)(hidden))


def stacked(*parts: Any, shape: tuple[int | None, ...], dtype: str | None = None) -> Any:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts])


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def fit(model: Any, x: Any, y: Any = None, **options: Any) -> Any:
    """`model.fit` as the cases call it; returns the history's dict."""
    settings: dict[str, Any] = {"batch_size": GLOBAL_BATCH, "epochs": EPOCHS, **options}
    if not hasattr(x, "shape") and y is None:
        settings.pop("batch_size")
    return model.fit(x, y, **{"shuffle": False, "verbose": 0, **settings}).history


def evaluate(model: Any, x: Any, y: Any = None, **options: Any) -> Any:
    return model.evaluate(
        x, y, **{"batch_size": GLOBAL_BATCH, "return_dict": True, "verbose": 0, **options}
    )


def predict(model: Any, x: Any, **options: Any) -> Any:
    return model.predict(x, **{"batch_size": GLOBAL_BATCH, "verbose": 0, **options})


def exercise(
    model: Any,
    task: Task | None = None,
    *,
    weights: tuple[Any, Any] | None = None,
    test_batch: int = TEST_ROWS,
    **options: Any,
) -> Results:
    """Fit the compiled model on the task, then everything that can be compared afterwards.

    `weights` are the sample weights of the training and of the test rows. The test rows are one
    batch unless `test_batch` says otherwise: a second shape would be compiled three times more.
    """
    task = task or regression()
    for_fit, for_test = weights or (None, None)
    held_out = (task.x_test, task.y_test) + (() if weights is None else (for_test,))
    validation = {"validation_data": held_out, "validation_batch_size": test_batch}
    settings = {**validation, "sample_weight": for_fit, **options}
    at = {"batch_size": test_batch}
    return {
        "history": fit(model, task.x, task.y, **settings),
        # Before `evaluate`: on JAX, plain Keras gives away the averages of EMA there.
        **state_of(model),
        "evaluate": evaluate(model, task.x_test, task.y_test, sample_weight=for_test, **at),
        "predict": predict(model, task.x_test, **at),
        "afterwards": by_position(model.weights),
    }


def train(
    model: Any,
    task: Task | None = None,
    *,
    weights: tuple[Any, Any] | None = None,
    test_batch: int = TEST_ROWS,
    **compile_options: Any,
) -> Results:
    """Compile with these options (by default SGD on the mean squared error), then `exercise`."""
    model.compile(**{"optimizer": sgd(), "loss": "mse", **compile_options})
    return exercise(model, task, weights=weights, test_batch=test_batch)
