"""What old names mean in a process that asked for them; prints what each check came to, as JSON.

A process of its own, since names are patched in it. Run with two simulated GPUs.
"""

import unisono.compat.legacy  # noqa: I001  The first line of an old program.

import importlib
import json
import pickle
import sys
import traceback
import warnings
from pathlib import Path

import keras
import numpy as np

import unisono
from unisono.errors import LegacyError, LegacyImportError

FOLDER = Path(sys.argv[1])
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
HOMES = ["keras", *(["tensorflow.keras"] if HAS_TENSORFLOW else [])]
warnings.simplefilter("ignore")


def raises(error, text, function):
    try:
        function()
    except error as found:
        told = str(found)
    else:
        raise AssertionError(f"no {error.__name__}")
    assert text in told, told
    return told


def run(source):
    """A piece of an old program, on lines of its own."""
    names = {"__name__": "old_program"}
    exec(compile(source, "old_program.py", "exec"), names)
    return names


def small_model():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, activation="softmax")])


X = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")
Y = np.arange(24) % 3


def check_names_are_found_in_every_home():
    for home in HOMES:
        names = run(
            f"import {home} as k\n"
            f"from {home}.utils import multi_gpu_model\n"
            f"from {home}.utils.training_utils import multi_gpu_model as older\n"
            f"from {home}.optimizers import rmsprop, sgd\n"
            f"from {home}.layers.core import Dense\n"
            f"from {home}.preprocessing.image import ImageDataGenerator\n"
            "same = k.utils.multi_gpu_model\n"
            "adam = k.optimizers.adam\n"
            "core = k.layers.core\n"
            "r = k.losses.Reduction.AUTO\n"
        )
        assert names["multi_gpu_model"] is names["older"] is names["same"]
        assert names["rmsprop"] is keras.optimizers.RMSprop
        assert names["adam"] is keras.optimizers.Adam
        assert names["Dense"] is names["core"].Dense is keras.layers.Dense
        assert names["r"] == "sum_over_batch_size"


def check_tf_keras_by_attribute():
    if HAS_TENSORFLOW:
        names = run("import tensorflow as tf\nopt = tf.keras.optimizers.sgd(lr=0.5)\n")
        assert isinstance(names["opt"], keras.optimizers.SGD)
        assert run("import tensorflow as tf\nf = tf.keras.utils.multi_gpu_model\n")["f"]


def check_multi_gpu_model_trains_on_two():
    names = run("from keras.utils import multi_gpu_model\n")
    model = small_model()
    template = names["multi_gpu_model"](model, gpus=2)
    assert template is model
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(X, Y, batch_size=8, verbose=0)
    raises(ValueError, "gpus >= 2", lambda: names["multi_gpu_model"](small_model(), gpus=1))


def check_rate_and_decay_mean_what_they_did():
    opt = keras.optimizers.SGD(lr=0.5, decay=0.1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    model.layers[0].set_weights([np.zeros((1, 1), "float32")])
    model.compile(opt, lambda y, p: y * p)
    ones = np.ones((3, 1), "float32")
    model.fit(ones, ones, batch_size=1, shuffle=False, verbose=0)
    # lr / (1 + decay * step), with gradients of 1.
    expected = -sum(0.5 / (1 + 0.1 * step) for step in range(3))
    assert abs(float(model.get_weights()[0][0, 0]) - expected) < 1e-6
    assert keras.optimizers.SGD(lr=1).learning_rate == 1.0
    assert keras.optimizers.SGD(lr=0.5, decay=0.0).get_config()["learning_rate"] == 0.5


def check_a_decayed_rate_cannot_be_set():
    opt = keras.optimizers.SGD(lr=0.5, decay=0.1)
    told = raises(LegacyError, "made with decay=", lambda: setattr(opt, "learning_rate", 0.1))
    assert "legacy_checks.py, line" in told


def check_lr_is_the_learning_rate():
    opt = keras.optimizers.Adam(lr=0.25)
    assert float(opt.lr) == 0.25
    opt.lr = 0.5
    assert float(opt.learning_rate) == 0.5
    names = run("from keras import backend as K\nget, put = K.get_value, K.set_value\n")
    names["put"](opt.lr, 0.125)
    assert names["get"](opt.lr) == 0.125


def check_generators_with_their_old_arguments():
    def batches():
        while True:
            yield X[:8], Y[:8]

    model = small_model()
    model.compile(keras.optimizers.SGD(lr=0.1), "sparse_categorical_crossentropy", metrics=["acc"])
    history = model.fit_generator(
        batches(), 3, 2, 0, workers=2, max_queue_size=4, use_multiprocessing=False
    )
    assert len(history.history["loss"]) == len(history.history["acc"]) == 2
    assert len(model.evaluate_generator(batches(), steps=2, workers=2)) == 2
    assert model.predict_generator(batches(), 2).shape == (16, 3)
    assert (model.predict_classes(X) == model.predict_proba(X).argmax(-1)).all()


def check_workers_reach_the_data():
    class Data(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8]

    model, data = small_model(), Data()
    model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(data, verbose=0, workers=3, max_queue_size=5)
    assert (data.workers, data.max_queue_size) == (3, 5)


def check_images_from_arrays_and_folders():
    names = run("from keras.preprocessing.image import ImageDataGenerator\n")
    images = np.random.rand(16, 8, 8, 3)
    flow = names["ImageDataGenerator"](horizontal_flip=True).flow(images, Y[:16], batch_size=8)
    for kind in ("a", "b"):
        folder = FOLDER / "images" / kind
        folder.mkdir(parents=True)
        for i in range(4):
            keras.utils.save_img(folder / f"{i}.png", images[i])
    found = names["ImageDataGenerator"](rescale=1 / 255.0).flow_from_directory(
        FOLDER / "images", target_size=(8, 8), batch_size=4, class_mode="sparse"
    )
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(3, "softmax")]
    )
    model = run("from keras.utils import multi_gpu_model as m\n")["m"](model, gpus=2)
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    seen = model.fit_generator(flow, steps_per_epoch=2, epochs=2, verbose=0).history
    assert len(seen["acc"]) == 2
    model.fit_generator(found, steps_per_epoch=2, verbose=0)


def check_keys_of_logs_and_histories():
    seen = []

    class Old(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((logs["acc"], logs.get("val_acc"), sorted(logs)))

    model = small_model()
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    path = str(FOLDER / "w-{epoch}-{val_acc:.2f}.weights.h5")
    checkpoint = keras.callbacks.ModelCheckpoint(path, monitor="val_acc", save_weights_only=True)
    stop = keras.callbacks.EarlyStopping(monitor="val_acc", patience=3)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="acc", mode="min")
    watching = [Old(), checkpoint, stop, plateau]
    history = model.fit(X, Y, validation_data=(X, Y), callbacks=watching, verbose=0)
    # As in Keras 2: more accuracy is better, unless the program says otherwise.
    assert [each.mode for each in watching[1:]] == ["max", "max", "min"]
    lines = []
    show = keras.callbacks.LambdaCallback(on_epoch_end=lambda e, logs: lines.append(logs["acc"]))
    for _ in range(2):  # A callback that is used again is not changed again.
        model.fit(X, Y, callbacks=[show], verbose=0)
    assert len(lines) == 2
    assert history.history["acc"] == history.history["accuracy"] == [seen[0][0]]
    assert type(pickle.loads(pickle.dumps(history.history))) is dict
    assert history.history["val_acc"] == history.history["val_accuracy"] == [seen[0][1]]
    assert list(FOLDER.glob("w-1-0.*.weights.h5"))


def check_metrics_are_reset():
    metric = keras.metrics.Mean()
    metric.update_state([1.0, 3.0])
    metric.reset_states()
    assert float(metric.result()) == 0.0


def check_mirrored_strategy():
    if not HAS_TENSORFLOW:
        return
    names = run(
        "import tensorflow as tf\ns = tf.distribute.MirroredStrategy()\nt = tf.distribute\n"
    )
    strategy = names["s"]
    assert isinstance(strategy, unisono.Strategy)
    assert strategy.num_replicas_in_sync == 2
    listed = run(
        "import tensorflow as tf\n"
        "s = tf.distribute.MirroredStrategy(devices=['/gpu:0', '/gpu:1'])\n"
    )
    assert listed["s"].num_replicas_in_sync == 2
    with strategy.scope():
        model = small_model()
        model.compile(keras.optimizers.SGD(lr=0.1), "sparse_categorical_crossentropy")
    model.fit(X, Y, batch_size=8, verbose=0)


def check_lists_of_gpus():
    if HAS_TENSORFLOW:
        names = run(
            "import tensorflow as tf\n"
            "gpus = tf.config.experimental.list_physical_devices('GPU')\n"
            "new = tf.config.list_physical_devices('GPU')\n"
            "cpus = tf.config.experimental.list_physical_devices('CPU')\n"
        )
        assert [gpu.name for gpu in names["gpus"]] == [f"/physical_device:GPU:{i}" for i in (0, 1)]
        assert names["new"] == names["gpus"]
        assert [cpu.device_type for cpu in names["cpus"]] == ["CPU"]


def check_a_gpu_is_not_divided():
    if HAS_TENSORFLOW:
        source = (
            "import tensorflow as tf\n"
            "gpu = tf.config.experimental.list_physical_devices('GPU')[0]\n"
            "half = tf.config.experimental.VirtualDeviceConfiguration(memory_limit=1024)\n"
            "tf.config.experimental.set_virtual_device_configuration(gpu, [half, half])\n"
        )
        raises(LegacyError, "old_program.py, line 4 makes 2 devices", lambda: run(source))


def check_sessions_are_their_settings():
    if not HAS_TENSORFLOW:
        return
    names = run(
        "import tensorflow as tf\nfrom keras import backend as K\n"
        "K.set_session(tf.Session())\n"
        "with tf.compat.v1.Session() as s: pass\n"
        "config = tf.ConfigProto(device_count={'GPU': 1, 'CPU': 56})\n"
        "config.gpu_options.allow_growth = True\n"
    )
    from unisono.compat.legacy import devices

    asked = devices._asked(names["config"])
    assert asked == {"gpus": 1, "cpu_threads": 56, "memory": "grow"}
    told = raises(LegacyError, "runs a session", lambda: names["s"].run(1))
    assert "legacy_checks.py, line" in told
    raises(LegacyError, "runs a session", lambda: names["s"].graph)


def check_horovod():
    if importlib.machinery.PathFinder.find_spec("horovod") is None:
        for line in ("import horovod.keras as hvd", "import horovod.tensorflow.keras as hvd"):
            hvd = run(line + "\nhvd.init()\n")["hvd"]
            assert hvd.size() == 1
            assert (
                hvd.DistributedOptimizer
                is importlib.import_module("unisono.horovod").DistributedOptimizer
            )
        run("from horovod.keras.callbacks import MetricAverageCallback\n")
        source = "import horovod.tensorflow as hvd\nhvd.DistributedGradientTape\n"
        raises(LegacyImportError, "old_program.py, line 2", lambda: run(source))
        raises(LegacyImportError, "for Keras", lambda: run("import horovod.torch\n"))


def check_what_cannot_be_translated_says_so():
    source = "\n\nfrom tensorflow.python.keras.layers import Dense\n"
    told = raises(LegacyImportError, "old_program.py, line 3", lambda: run(source))
    assert "private copy" in told
    assert "from tensorflow.keras import" in told
    if HAS_TENSORFLOW:
        source = (
            "import tensorflow as tf\nif not hasattr(tf, 'placeholder'):\n    tf.placeholder(1)\n"
        )
        raises(LegacyError, "old_program.py, line 3", lambda: run(source))
        both = "from tensorflow.python import keras\n"
        raises(LegacyImportError, "old_program.py, line 1", lambda: run(both))
        library = {"__name__": "tensorflow.some_part"}
        exec("from tensorflow.python.keras.layers import Dense\n", library)
        assert library["Dense"] is not keras.layers.Dense
        line = "from tensorflow.python.keras.layers import Dense\n"
        package = {"__name__": "other.part"}
        exec(compile(line, "/env/site-packages/other/part.py", "exec"), package)
        assert package["Dense"] is library["Dense"]
        raises(LegacyError, "tf.contrib left", lambda: run("import tensorflow.contrib.slim\n"))


def check_names_that_never_were():
    raises(ImportError, "multi_gpu_modle", lambda: run("from keras.utils import multi_gpu_modle\n"))
    source = "import keras\nkeras.optimizers.magic\n"
    raises(AttributeError, "magic", lambda: run(source))
    assert not hasattr(keras.utils, "np_util")


def check_a_fallback_works():
    names = run(
        "try:\n    from keras.utils import multi_gpu_model\n"
        "except ImportError:\n    multi_gpu_model = None\n"
    )
    assert names["multi_gpu_model"] is not None


def check_files_are_plain():
    model = small_model()
    model.compile(keras.optimizers.Adam(lr=0.25, decay=0.5), "sparse_categorical_crossentropy")
    model.fit(X, Y, verbose=0)
    model.save(FOLDER / "plain.keras")
    config = keras.optimizers.serialize(model.optimizer)
    assert config["module"].startswith("keras")
    assert config["config"]["learning_rate"]["class_name"] == "InverseTimeDecay"


def check_files_keep_their_names():
    model = small_model()
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["acc"])
    whole = keras.callbacks.ModelCheckpoint(str(FOLDER / "m.{epoch:02d}-{val_acc:.2f}.hdf5"))
    weights = keras.callbacks.ModelCheckpoint(str(FOLDER / "w.h5"), save_weights_only=True)
    model.fit(X, Y, validation_data=(X, Y), callbacks=[whole, weights], verbose=0)
    (saved,) = FOLDER.glob("m.01-*.hdf5")
    for name in ("final.h5", "final.hdf5", "final", "final.weights.h5"):
        model.save_weights(FOLDER / name)
    expected = model.get_weights()
    for name in ("w.h5", "final.h5", "final.hdf5", "final", "final.weights.h5"):
        other = small_model()
        other.load_weights(FOLDER / name)
        for one, two in zip(expected, other.get_weights(), strict=True):
            np.testing.assert_array_equal(one, two)
    loaded = keras.models.load_model(saved)
    np.testing.assert_array_equal(loaded.get_weights()[0], expected[0])
    # A file of Keras 2 itself, which lists its layers, is read as such.
    model.save(FOLDER / "whole.h5")
    small_model().load_weights(FOLDER / "whole.h5")


def check_libraries_see_plain_names():
    if HAS_TENSORFLOW:
        # As a library would: code whose module is one of TensorFlow's.
        names = {"__name__": "tensorflow.some_part"}
        exec("import tensorflow as tf\nfound = tf.distribute.MirroredStrategy\n", names)
        assert not issubclass(names["found"], unisono.Strategy)


def main():
    report = {}
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check()
                report[name] = ""
            except BaseException:
                report[name] = traceback.format_exc()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
