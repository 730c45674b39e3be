"""What most cases do with a model: fit with validation data, evaluate, predict, and look at it."""

from typing import Any

import keras
from keras import layers

from exactness.case import Results, by_position, state_of
from exactness.tasks import EPOCHS, GLOBAL_BATCH, NUM_FEATURES, TEST_ROWS, Task, regression


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
