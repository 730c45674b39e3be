"""Old names and what to write today: the table behind `compat.legacy` and `migrate`.

Pure data. `unisono.compat.legacy` makes the old names work while a program runs, `unisono migrate`
rewrites its source. A name that begins with `keras.` stands for all packages of Keras, and one that
begins with `tensorflow.` also for `tensorflow.compat.v1`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

KERAS_HOMES = (
    "tensorflow.compat.v1.keras",
    "tensorflow.compat.v2.keras",
    "keras._tf_keras.keras",
    "tensorflow.keras",
)
"""Other names of `keras`, the longest first."""

TENSORFLOW_HOMES = ("tensorflow.compat.v1", "tensorflow.compat.v2")


@dataclass(frozen=True)
class Change:
    """One old name and its successor."""

    old: str
    write: str
    """What to write today, for messages."""
    new: str | None = None
    """The dotted name of its equivalent; None if it is not a single name."""
    value: str | None = None
    """An equivalent expression."""
    why: str | None = None
    """Why it has no successor; set for names that stop a program."""

    @property
    def module(self) -> str:
        return self.old.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.old.rpartition(".")[2]


@dataclass(frozen=True)
class Method:
    """A method with another name or other arguments today."""

    old: str
    new: str
    write: str
    parameters: tuple[str, ...] = ()
    """Its old parameters in order; none if its arguments are unchanged."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    """Parameters that moved to the dataset."""
    defaults: Mapping[str, str] = field(default_factory=dict)
    """Defaults that were different, as source."""


MODULES = {
    "keras.utils.training_utils": "keras.utils",
    "keras.utils.np_utils": "keras.utils",
    "keras.utils.vis_utils": "keras.utils",
    "keras.utils.data_utils": "keras.utils",
    "keras.utils.generic_utils": "keras.utils",
    "keras.layers.core": "keras.layers",
    "keras.layers.convolutional": "keras.layers",
    "keras.layers.convolutional_recurrent": "keras.layers",
    "keras.layers.pooling": "keras.layers",
    "keras.layers.normalization": "keras.layers",
    "keras.layers.recurrent": "keras.layers",
    "keras.layers.embeddings": "keras.layers",
    "keras.layers.merge": "keras.layers",
    "keras.layers.noise": "keras.layers",
    "keras.layers.wrappers": "keras.layers",
    "keras.layers.advanced_activations": "keras.layers",
    "keras.backend.tensorflow_backend": "keras.backend",
    "keras.engine": "keras",
    "keras.engine.base_layer": "keras",
    "keras.engine.topology": "keras",
    "keras.engine.training": "keras",
    "horovod": "unisono.horovod",
    "horovod.keras": "unisono.horovod",
    "horovod.keras.callbacks": "unisono.horovod.callbacks",
    "horovod.tensorflow": "unisono.horovod",
    "horovod.tensorflow.keras": "unisono.horovod",
    "horovod.tensorflow.keras.callbacks": "unisono.horovod.callbacks",
}
"""Modules that went, and where their names are today."""

OPTIMIZERS = {
    "sgd": "SGD",
    "rmsprop": "RMSprop",
    "adagrad": "Adagrad",
    "adadelta": "Adadelta",
    "adam": "Adam",
    "adamax": "Adamax",
    "nadam": "Nadam",
}

IMAGES = "unisono.compat.images"
_IMAGE_NAMES = (
    "ImageDataGenerator",
    "Iterator",
    "DirectoryIterator",
    "NumpyArrayIterator",
    "apply_affine_transform",
    "apply_brightness_shift",
    "apply_channel_shift",
    "random_brightness",
    "random_channel_shift",
    "random_rotation",
    "random_shear",
    "random_shift",
    "random_zoom",
)

_REDUCTIONS = {
    "AUTO": '"sum_over_batch_size"',
    "NONE": '"none"',
    "SUM": '"sum"',
    "SUM_OVER_BATCH_SIZE": '"sum_over_batch_size"',
}

_GPU_CALLS = ("list_physical_devices", "list_logical_devices", "get_visible_devices")


def _gone(old: str, why: str, write: str) -> Change:
    return Change(old, write, why=why)


_SESSION_WHY = "TensorFlow 2 runs no sessions, and Keras 3 builds no graph for one"
_SESSION_WRITE = "compute eagerly, or in model.fit; settings go to unisono.configure(...)"

CHANGES = (
    Change(
        "keras.utils.multi_gpu_model",
        "unisono.parallel(model, gpus=...)",
        new="unisono.compat.multi_gpu_model",
    ),
    *(
        Change(f"keras.optimizers.{old}", f"keras.optimizers.{new}", new=f"keras.optimizers.{new}")
        for old, new in OPTIMIZERS.items()
    ),
    *(
        Change(f"keras.losses.Reduction.{name}", f"reduction={value}", value=value)
        for name, value in _REDUCTIONS.items()
    ),
    Change("keras.losses.Reduction", 'reduction="none", "sum" or "sum_over_batch_size"'),
    *(
        Change(
            f"keras.preprocessing.image.{name}",
            f"from {IMAGES} import {name}, or layers such as keras.layers.RandomFlip",
            new=f"{IMAGES}.{name}",
        )
        for name in _IMAGE_NAMES
    ),
    Change("keras.layers.CuDNNLSTM", "keras.layers.LSTM", new="keras.layers.LSTM"),
    Change("keras.layers.CuDNNGRU", "keras.layers.GRU", new="keras.layers.GRU"),
    Change("keras.backend.get_value", "keras.ops.convert_to_numpy(variable)"),
    Change("keras.backend.set_value", "variable.assign(value)"),
    Change("keras.backend.set_session", "unisono.configure(...)"),
    Change("keras.backend.get_session", "nothing: settings go to unisono.configure(...)"),
    Change(
        "tensorflow.distribute.MirroredStrategy",
        "unisono.Strategy()",
        new="unisono.compat.MirroredStrategy",
    ),
    *(Change(f"tensorflow.config.experimental.{name}", "unisono.devices()") for name in _GPU_CALLS),
    *(Change(f"tensorflow.config.{name}", "unisono.devices()") for name in _GPU_CALLS),
    Change("tensorflow.config.experimental.set_visible_devices", "unisono.configure(gpus=[...])"),
    Change("tensorflow.config.set_visible_devices", "unisono.configure(gpus=[...])"),
    Change("tensorflow.config.experimental.set_memory_growth", 'unisono.configure(memory="grow")'),
    *(
        Change(name, 'unisono.configure(memory="1GiB")')
        for name in (
            "tensorflow.config.experimental.set_virtual_device_configuration",
            "tensorflow.config.set_logical_device_configuration",
        )
    ),
    Change("tensorflow.ConfigProto", "unisono.configure(gpus=..., memory=..., cpu_threads=...)"),
    Change("tensorflow.GPUOptions", "unisono.configure(gpus=..., memory=...)"),
    Change("tensorflow.Session", "unisono.configure(gpus=..., memory=..., cpu_threads=...)"),
    Change("tensorflow.InteractiveSession", "unisono.configure(...)"),
    Change(
        "tensorflow.set_random_seed", "tf.random.set_seed(...)", new="tensorflow.random.set_seed"
    ),
    Change("tensorflow.logging", "tf.compat.v1.logging", new="tensorflow.compat.v1.logging"),
    _gone("tensorflow.placeholder", _SESSION_WHY, "keras.Input(...)"),
    _gone("tensorflow.global_variables_initializer", _SESSION_WHY, _SESSION_WRITE),
    _gone("tensorflow.get_default_graph", _SESSION_WHY, _SESSION_WRITE),
    _gone("tensorflow.contrib", "tf.contrib left TensorFlow in 2019", "the part's own package"),
    _gone(
        "tensorflow.estimator", "estimators left TensorFlow", "a keras.Model and unisono.parallel"
    ),
    _gone(
        "tensorflow.python.keras",
        "it is a private copy of Keras 2 inside TensorFlow, whose models Keras 3 and unisono do "
        "not know",
        "from tensorflow.keras import ..., or from keras import ...",
    ),
    _gone(
        "keras.wrappers.scikit_learn",
        "Keras' wrappers for scikit-learn have other classes today",
        "keras.wrappers.SKLearnClassifier, or the package scikeras",
    ),
    _gone(
        "horovod.tensorflow.DistributedGradientTape",
        "unisono.horovod has Horovod's interface for Keras, not for tapes",
        "hvd.DistributedOptimizer, or unisono.Strategy for a training loop of your own",
    ),
    _gone("horovod.torch", "unisono.horovod is for Keras", "hvd of unisono.horovod with Keras"),
    _gone("horovod.mxnet", "unisono.horovod is for Keras", "hvd of unisono.horovod with Keras"),
    _gone(
        "horovod.spark", "unisono starts no processes through Spark", "unisono run -np N train.py"
    ),
)

_LOADING = ("max_queue_size", "workers", "use_multiprocessing")
_PASSES = ("generator", "steps", "callbacks", *_LOADING, "verbose")

METHODS = (
    Method(
        "fit_generator",
        "fit",
        "model.fit(data, ...)",
        (
            *("generator", "steps_per_epoch", "epochs", "verbose", "callbacks", "validation_data"),
            *("validation_steps", "validation_freq", "class_weight", *_LOADING),
            *("shuffle", "initial_epoch"),
        ),
        renamed={"generator": "x"},
        dropped=_LOADING,
    ),
    Method(
        "evaluate_generator",
        "evaluate",
        "model.evaluate(data, ...)",
        _PASSES,
        renamed={"generator": "x"},
        dropped=_LOADING,
        defaults={"verbose": "0"},
    ),
    Method(
        "predict_generator",
        "predict",
        "model.predict(data, ...)",
        _PASSES,
        renamed={"generator": "x"},
        dropped=_LOADING,
        defaults={"verbose": "0"},
    ),
    Method("experimental_run_v2", "run", "strategy.run(step, args=(...,))"),
    Method(
        "experimental_distribute_dataset",
        "distribute_dataset",
        "strategy.distribute_dataset(dataset)",
    ),
    Method("reset_states", "reset_state", "metric.reset_state()"),
    Method("predict_proba", "predict", "model.predict(x)"),
)

LOADING = _LOADING
"""Arguments of `fit` in Keras 2, of a `keras.utils.PyDataset` in Keras 3."""

KEYS = {"acc": "accuracy", "val_acc": "val_accuracy"}
"""Keys of histories and logs."""

RATE = Change("lr", "learning_rate", new="learning_rate")
DECAY = Change(
    "decay",
    "learning_rate=keras.optimizers.schedules.InverseTimeDecay("
    "lr, decay_steps=1, decay_rate=decay)",
    new="keras.optimizers.schedules.InverseTimeDecay",
)
"""Arguments of optimizers; the schedule also computes `lr / (1 + decay * step)`."""

SETTINGS = {
    "device_count.GPU": "gpus",
    "device_count.CPU": "cpu_threads",
    "intra_op_parallelism_threads": "cpu_threads",
    "gpu_options.visible_device_list": "gpus",
    "gpu_options.allow_growth": "memory",
    "gpu_options.per_process_gpu_memory_fraction": "memory",
}
"""Fields of a session's configuration and the arguments of `unisono.configure`."""

IGNORED_SETTINGS = ("allow_soft_placement", "log_device_placement", "inter_op_parallelism_threads")
