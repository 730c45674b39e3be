"""Where data comes from: tensors, data sets, loaders and generators, plain and nested."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from exactness.case import Adopt, Group, Results, state_of
from exactness.cases.inputs import LOSS_OF_EACH, two_part_data, two_parts, weights_by_output
from exactness.exercise import GLOBAL_BATCH, ROWS, Task, mlp, regression, rows, sgd, train

SOURCES = Group("Sources of data")
NUM_EPOCHS = 4
TEST_BATCH = 11  # of 23 test rows: leaves one

Source = Callable[[], Any]


def feed(model: Any, source: Source, test_source: Source, **options: Any) -> Results:
    """Train, validate, evaluate and predict from sources that make the batches themselves."""
    settings = {"epochs": NUM_EPOCHS, "shuffle": False, "verbose": 0, **options}
    return {
        "history": model.fit(source(), validation_data=test_source(), **settings).history,
        "evaluate": model.evaluate(test_source(), return_dict=True, verbose=0),
        "predict": model.predict(test_source(), verbose=0),
        **state_of(model),
    }


def compiled_mlp(adopt: Adopt) -> Any:
    model = adopt(mlp())
    model.compile(sgd(), "mse", metrics=["mae"], weighted_metrics=["mse"])
    return model


def compiled_two_parts(adopt: Adopt) -> Any:
    (wide, ids), (near, kind) = two_parts()
    model = adopt(keras.Model({"wide": wide, "ids": ids}, {"near": near, "kind": kind}))
    model.compile(sgd(), LOSS_OF_EACH)
    return model


def as_tensors(task: Task) -> Task:
    return Task(*(keras.tree.map_structure(keras.ops.convert_to_tensor, part) for part in task))


@SOURCES.case("tensors of the backend")
def backend_tensors(adopt: Adopt) -> Results:
    return train(adopt(mlp()), as_tensors(regression()))


@SOURCES.case("tensors of the backend, in dicts")
def dict_of_tensors(adopt: Adopt) -> Results:
    task = as_tensors(two_part_data(as_dicts=True))
    return train(compiled_two_parts(adopt), task, loss=LOSS_OF_EACH)


@SOURCES.case("float64 and integer arrays")
def other_dtypes(adopt: Adopt) -> Results:
    task = regression()
    x, x_test = (np.round(3 * part).astype("int64") for part in (task.x, task.x_test))
    return train(adopt(mlp()), Task(x, task.y.astype("float64"), x_test, task.y_test))


def cut(data: tuple[Any, ...], sizes: Iterable[int]) -> Iterator[tuple[Any, ...]]:
    """Consecutive batches of these sizes from nested arrays."""
    start = 0
    for size in sizes:
        yield tuple(rows(part, start, start + size) for part in data)
        start += size


def repeated(data: tuple[Any, ...], sizes: Iterable[int]) -> Iterator[tuple[Any, ...]]:
    while True:
        yield from cut(data, sizes)


@SOURCES.case("generators, batches of changing sizes")
def generator(adopt: Adopt) -> Results:
    task = regression()
    return feed(
        compiled_mlp(adopt),
        lambda: repeated((task.x, task.y), (12, 5, 12, 1, 12, 5)),
        lambda: cut((task.x_test, task.y_test), (12, 5, 1, 5)),
        steps_per_epoch=6,
        epochs=3,
        validation_steps=4,
    )


@SOURCES.case("generator of dicts with sample weights")
def generator_of_dicts(adopt: Adopt) -> Results:
    task = two_part_data(as_dicts=True)
    model = compiled_two_parts(adopt)
    history = model.fit(
        repeated((task.x, task.y, weights_by_output(ROWS)), (12, 12, 12, 11)),
        steps_per_epoch=4,
        epochs=NUM_EPOCHS,
        verbose=0,
    ).history
    return {"history": history, **state_of(model)}


@SOURCES.case("tf.data, with a remainder and with batches of one row")
def tf_data(adopt: Adopt) -> Results:
    import tensorflow as tf

    task = regression()

    def dataset(x: Any, y: Any, global_batch: int) -> Any:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(global_batch)

    return feed(
        compiled_mlp(adopt),
        lambda: dataset(task.x, task.y, GLOBAL_BATCH),
        lambda: dataset(task.x_test, task.y_test, TEST_BATCH),
    )


@SOURCES.case("tf.data of dicts with sample weights, repeated, `steps_per_epoch`")
def tf_data_of_dicts(adopt: Adopt) -> Results:
    import tensorflow as tf

    task = two_part_data(as_dicts=True)
    dataset = tf.data.Dataset.from_tensor_slices((task.x, task.y, weights_by_output(ROWS))).batch(
        GLOBAL_BATCH
    )
    model = compiled_two_parts(adopt)
    history = model.fit(dataset.repeat(), steps_per_epoch=3, epochs=NUM_EPOCHS, verbose=0).history
    return {"history": history, **state_of(model)}


@SOURCES.case("torch DataLoader")
def data_loader(adopt: Adopt) -> Results:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    def loader(x: Any, y: Any, global_batch: int) -> Any:
        return DataLoader(
            TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=global_batch
        )

    task = regression()
    return feed(
        compiled_mlp(adopt),
        lambda: loader(task.x, task.y, GLOBAL_BATCH),
        lambda: loader(task.x_test, task.y_test, TEST_BATCH),
    )


def of_samples(data: tuple[Any, ...], global_batch: int) -> Any:
    """A grain data set of batches, the last of which holds what is left over."""
    import grain

    count = len(keras.tree.flatten(data)[0])
    samples = [keras.tree.map_structure(lambda part, i=i: part[i], data) for i in range(count)]
    return grain.MapDataset.source(samples).seed(3).batch(global_batch, drop_remainder=False)


# With `steps_per_epoch`, as Keras does not know how many batches a grain data set has, and plain
# Keras on TensorFlow then counts a step too many at the end of each epoch.
NUM_STEPS = -(-ROWS // GLOBAL_BATCH)


@SOURCES.case("grain MapDataset, shuffled, `steps_per_epoch`")
def grain_map(adopt: Adopt) -> Results:
    task = regression()
    return feed(
        compiled_mlp(adopt),
        lambda: of_samples((task.x, task.y), GLOBAL_BATCH).shuffle().repeat(),
        lambda: of_samples((task.x_test, task.y_test), TEST_BATCH),
        steps_per_epoch=NUM_STEPS,
    )


@SOURCES.case("grain IterDataset of dicts with sample weights, `steps_per_epoch`")
def grain_iter(adopt: Adopt) -> Results:
    task = two_part_data(as_dicts=True)
    batches = of_samples((task.x, task.y, weights_by_output(ROWS)), GLOBAL_BATCH)
    model = compiled_two_parts(adopt)
    history = model.fit(
        batches.repeat().to_iter_dataset(), steps_per_epoch=3, epochs=NUM_EPOCHS, verbose=0
    ).history
    test_batches = of_samples((task.x_test,), TEST_BATCH).to_iter_dataset()
    predicted = model.predict(test_batches, verbose=0)
    return {"history": history, "predict": predicted, **state_of(model)}


class Pairs:
    """Rows of two arrays, as grain's loader reads them."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.x[index], self.y[index]


@SOURCES.case("grain DataLoader, `steps_per_epoch`")
def grain_loader(adopt: Adopt) -> Results:
    import grain

    def loader(x: Any, y: Any, global_batch: int, num_epochs: int = 1) -> Any:
        order = grain.samplers.IndexSampler(len(x), shuffle=True, num_epochs=num_epochs, seed=3)
        batch = grain.transforms.Batch(global_batch, drop_remainder=False)
        return grain.DataLoader(data_source=Pairs(x, y), sampler=order, operations=[batch])

    task = regression()
    return feed(
        compiled_mlp(adopt),
        lambda: loader(task.x, task.y, GLOBAL_BATCH, NUM_EPOCHS + 1),
        lambda: loader(task.x_test, task.y_test, TEST_BATCH),
        steps_per_epoch=NUM_STEPS,
    )


class Batches(keras.utils.PyDataset):
    """Cuts arrays into batches; `on_epoch_end` moves the cut, so that epochs differ."""

    def __init__(self, x: Any, y: Any, global_batch: int, shift: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.x, self.y, self.global_batch = x, y, global_batch
        self.shift, self.offset = shift, 0

    def __len__(self) -> int:
        return -(-len(self.x) // self.global_batch)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        part = slice(index * self.global_batch, (index + 1) * self.global_batch)
        return np.roll(self.x, self.offset, 0)[part], np.roll(self.y, self.offset, 0)[part]

    def on_epoch_end(self) -> None:
        self.offset += self.shift


@SOURCES.case("PyDataset with two workers")
def py_dataset(adopt: Adopt) -> Results:
    task = regression()
    model = compiled_mlp(adopt)
    # Keras takes a batch to build metrics by, after which the order of those that its workers
    # have read ahead depends on their speed. So it must find them built.
    model.evaluate(task.x_test, task.y_test, verbose=0)
    return feed(
        model,
        lambda: Batches(task.x, task.y, GLOBAL_BATCH, workers=2),
        lambda: Batches(task.x_test, task.y_test, TEST_BATCH, workers=2),
    )


@SOURCES.case("PyDataset that changes after each epoch, `class_weight`")
def changing_dataset(adopt: Adopt) -> Results:
    task = regression()
    x, y = task.x, (task.y[:, 0] > 0.8).astype("int32")
    model = adopt(mlp(1, "sigmoid"))
    model.compile(sgd(), "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(
        Batches(x, y, GLOBAL_BATCH, shift=5),
        epochs=NUM_EPOCHS,
        shuffle=False,
        class_weight={0: 0.4, 1: 1.8},
        verbose=0,
    ).history
    return {"history": history, **state_of(model)}
