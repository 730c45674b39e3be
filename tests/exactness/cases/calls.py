"""The ways of calling a model: arguments of `fit`, single batches, and calls after one another."""

from typing import Any

import keras
from keras import optimizers

from exactness.case import SEED, Adopt, Group, Results, by_position, state_of
from exactness.exercise import (
    GLOBAL_BATCH,
    TEST_ROWS,
    classes,
    evaluate,
    exercise,
    fit,
    mlp,
    predict,
    regression,
    row_weights,
    sgd,
    train,
)

FIT = Group("Arguments of fit")
BATCHES = Group("Single batches")
ORDER = Group("Order of calls")


def compiled(adopt: Adopt, **options: Any) -> Any:
    model = adopt(mlp())
    model.compile(**{"optimizer": sgd(), "loss": "mse", "metrics": ["mae"], **options})
    return model


def fitted(adopt: Adopt, **options: Any) -> Results:
    """Fit on the regression task with these arguments, without anything afterwards."""
    model, task = compiled(adopt), regression()
    return {"history": fit(model, task.x, task.y, **options), **state_of(model)}


@FIT.case("`steps_per_epoch` below the number of batches")
def steps_per_epoch(adopt: Adopt) -> Results:
    return fitted(adopt, steps_per_epoch=2)


@FIT.case("`validation_split`")
def validation_split(adopt: Adopt) -> Results:
    return fitted(adopt, validation_split=0.3)


@FIT.case("`validation_batch_size`, `validation_steps` and `validation_freq`")
def validation_options(adopt: Adopt) -> Results:
    task = regression()
    return fitted(
        adopt,
        validation_data=(task.x_test, task.y_test),
        validation_batch_size=5,
        validation_steps=3,
        validation_freq=2,
    )


@FIT.case("validation data with sample weights")
def validation_weights(adopt: Adopt) -> Results:
    task = regression()
    return fitted(adopt, validation_data=(task.x_test, task.y_test, row_weights(TEST_ROWS)))


@FIT.case("`initial_epoch`, and no `batch_size` at all")
def initial_epoch(adopt: Adopt) -> Results:
    return fitted(adopt, initial_epoch=3, epochs=10, batch_size=None)


@FIT.case("`shuffle=True`, seed set before each `fit`")
def shuffle(adopt: Adopt) -> Results:
    model, task = compiled(adopt), regression()
    histories = []
    for seed in (SEED, SEED + 1):
        keras.utils.set_random_seed(seed)
        histories.append(fit(model, task.x, task.y, shuffle=True, epochs=3))
    return {"history": histories, **state_of(model)}


@FIT.case('`shuffle="batch"`, seed set before `fit`')
def shuffle_batches(adopt: Adopt) -> Results:
    keras.utils.set_random_seed(SEED)
    return fitted(adopt, shuffle="batch")


@FIT.case("`run_eagerly=True`")
def run_eagerly(adopt: Adopt) -> Results:
    model, task = compiled(adopt, run_eagerly=True), regression()
    return exercise(model, task, epochs=2)


@BATCHES.case("`train_on_batch` with sample weights")
def train_on_batch(adopt: Adopt) -> Results:
    model, task, weights = compiled(adopt), regression(), row_weights()
    logs = []
    for step in range(12):
        part = slice(3 * step, 3 * step + GLOBAL_BATCH)
        logs.append(model.train_on_batch(task.x[part], task.y[part], weights[part]))
    return {"logs": [to_floats(log) for log in logs], **state_of(model)}


@BATCHES.case("`train_on_batch` with class weights, odd sizes, dict results")
def train_on_batch_odd(adopt: Adopt) -> Results:
    model, task = adopt(mlp(4, "softmax")), classes()
    model.compile(sgd(), "sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    logs, weight = [], {0: 0.2, 1: 1.0, 2: 3.0, 3: 0.5}
    for count in (7, 1, 3, 7):
        logs.append(
            model.train_on_batch(
                task.x[:count], task.y[:count], class_weight=weight, return_dict=True
            )
        )
        model.reset_metrics()
    return {"logs": [to_floats(log) for log in logs], **state_of(model)}


@BATCHES.case("`test_on_batch` and `predict_on_batch`")
def test_and_predict_on_batch(adopt: Adopt) -> Results:
    model, task = compiled(adopt), regression()
    counts = (12, 7, 2, 1)
    return {
        "test": [to_floats(model.test_on_batch(task.x[:n], task.y[:n])) for n in counts],
        "predict": [keras.ops.convert_to_numpy(model.predict_on_batch(task.x[:n])) for n in counts],
        "weights": by_position(model.weights),
    }


@BATCHES.case("calling the model itself after training")
def direct_call(adopt: Adopt) -> Results:
    model, task = compiled(adopt), regression()
    fit(model, task.x, task.y, epochs=1)
    output = keras.ops.convert_to_numpy(model(task.x_test))
    return {"call": output, "predict": predict(model, task.x_test)}


def to_floats(logs: Any) -> Any:
    """Logs as plain numbers, whether Keras gives a list, a dict or one number."""
    if isinstance(logs, dict):
        return {key: float(value) for key, value in logs.items()}
    return [float(value) for value in logs] if isinstance(logs, list) else float(logs)


@ORDER.case("second `fit` with another global batch")
def second_fit(adopt: Adopt) -> Results:
    model, task = compiled(adopt, optimizer=optimizers.Adam(0.01)), regression()
    first = fit(model, task.x, task.y, epochs=2)
    return {"first": first, **exercise(model, task, batch_size=10, epochs=3)}


@ORDER.case("compiled before `parallel`")
def compiled_before(adopt: Adopt) -> Results:
    model = mlp()
    model.compile(optimizers.Adam(0.01), "mse", metrics=["mae"])
    return exercise(adopt(model))


@ORDER.case("trained before `parallel`: the optimizer's state carries over")
def trained_before(adopt: Adopt) -> Results:
    model, task = mlp(), regression()
    model.compile(optimizers.AdamW(0.01), "mse", metrics=["mae"])
    first = fit(model, task.x, task.y, steps_per_epoch=3, epochs=1)
    return {"first": first, **exercise(adopt(model), task)}


@ORDER.case("compiled again with another optimizer between two fits")
def compiled_again(adopt: Adopt) -> Results:
    model, task = compiled(adopt), regression()
    first = fit(model, task.x, task.y, epochs=2)
    model.compile(optimizers.Adam(0.01), "mae")
    return {"first": first, **exercise(model, task, epochs=3)}


@ORDER.case("`parallel` called twice")
def adopted_twice(adopt: Adopt) -> Results:
    return train(adopt(adopt(mlp())))


@ORDER.case("`predict` before `compile`, `evaluate` before `fit`")
def predict_first(adopt: Adopt) -> Results:
    model, task = adopt(mlp()), regression()
    before = predict(model, task.x_test)
    model.compile(sgd(), "mse")
    tested = evaluate(model, task.x_test, task.y_test)
    return {"before": before, "tested": tested, **exercise(model, task, epochs=2)}


@ORDER.case("weights and learning rate set between two fits")
def set_between(adopt: Adopt) -> Results:
    model, task = compiled(adopt), regression()
    initial = model.get_weights()
    first = fit(model, task.x, task.y, epochs=2)
    model.set_weights([0.5 * weight for weight in initial])
    model.optimizer.learning_rate = 0.01
    return {"first": first, **exercise(model, task, epochs=3)}


@ORDER.case("two parallel models trained in turns")
def two_models(adopt: Adopt) -> Results:
    models, task = [compiled(adopt), compiled(adopt, optimizer=optimizers.Adam(0.01))], regression()
    histories = []
    for _ in range(2):
        for model in models:
            histories.append(fit(model, task.x, task.y, epochs=2))
    return {"history": histories, "models": [state_of(model) for model in models]}


@ORDER.case("a model of inner layers, held by the user, shows the trained values")
def shared_layers(adopt: Adopt) -> Results:
    model, task = mlp(), regression()
    features = keras.Model(model.inputs, model.layers[1].output)
    results = train(adopt(model), task)
    return {"features": predict(features, task.x_test), **results}
