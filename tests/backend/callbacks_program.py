"""A program for several processes: callbacks of Keras, of other packages, and of the program.

`unisono run --replicas N callbacks_program.py FOLDER` makes the checks with packages, and each
process writes what they returned to FOLDER/rank-R.json; world_program.py makes the quick ones. What
lies in the folder site-packages counts as an installed package.
"""

import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import keras
import numpy as np
from patches import SAVING, changed, names_of_keras

import unisono

FOLDER = Path(sys.argv[1])
VALUE = "module/rank/.ATTRIBUTES/VARIABLE_VALUE"
PLAIN_KERAS = names_of_keras()
RANK = unisono.topology().rank
X = np.random.RandomState(0).rand(24, 6).astype("float32")
Y = X[:, :2] * 2
sys.path.append(str(Path(__file__).parent / "site-packages"))


def make() -> Any:
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return unisono.parallel(model)


def fit(model: Any, *callbacks: Any, **options: Any) -> dict[str, Any]:
    options = {"batch_size": 12, "epochs": 2, "verbose": 0, **options}
    return model.fit(X, Y, callbacks=list(callbacks), **options).history


def rate(model: Any) -> float:
    return float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))


def is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


class Count(keras.callbacks.Callback):
    """A callback of the program itself."""

    num_epochs = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.num_epochs += 1


# -- checks --------------------------------------------------------------------------------------


def tensorboard() -> Any:
    if not is_installed("tensorboard"):
        return None
    model = make()
    losses = fit(model, keras.callbacks.TensorBoard(FOLDER / "tensorboard", histogram_freq=1))
    return [losses["loss"], unisono.check_replicas(model)]


def orbax() -> Any:
    if not is_installed("orbax"):
        return None
    model = make()
    fit(model, keras.callbacks.OrbaxCheckpoint(str(FOLDER / "orbax"), save_on_background=False))
    return [unisono.check_replicas(model), model.layers[0].bias.numpy().tolist()]


def wandb() -> Any:
    if not is_installed("wandb"):
        return None
    import wandb
    from wandb.integration.keras import WandbMetricsLogger

    wandb.init(project="test", dir=str(FOLDER / "wandb"))
    fit(make(), WandbMetricsLogger(log_freq="batch"))
    wandb.finish()
    return True


def mlflow() -> Any:
    if not is_installed("mlflow"):
        return None
    import mlflow
    from mlflow.keras import MlflowCallback

    mlflow.set_tracking_uri((FOLDER / "mlflow").as_uri())
    fit(make(), MlflowCallback())
    mlflow.end_run()
    return True


def library() -> Any:
    """A callback of a package that nobody here has named, which also acts on the model."""
    from some_logger import Logger

    model = make()
    logger = Logger(X[:7], Y[:7])
    history = fit(model, logger, Count(), epochs=4)
    same = unisono.check_replicas(model)
    return {
        "events": logger.events,
        "rate": rate(model),
        "losses": history["loss"],
        "same": same,
        "answers": logger.answers,
        # What all processes find together, with the values that the last answer was given with.
        "predict": model.predict(X[:7], verbose=0).tolist(),
        "evaluate": model.evaluate(X[:7], Y[:7], batch_size=4, verbose=0),
    }


def answers_change_nothing() -> Any:
    """Training beside a chief that predicts and evaluates is training without it."""
    from some_logger import Logger

    expected = fit(make())
    return [expected, fit(make(), Logger(X[:7], Y[:7], is_quiet=True))]


def switches() -> Any:
    from some_logger import Logger

    own, quiet = Count(), unisono.callbacks.chief_only(Count())
    everywhere = unisono.callbacks.every_rank(Logger(X[:7], Y[:7], is_quiet=True))

    class Derived(Logger):
        pass

    derived = Derived(X[:7], Y[:7], is_quiet=True)
    model = make()
    fit(model, own, quiet, everywhere, derived, epochs=1)
    model.evaluate(X, Y, callbacks=[derived], verbose=0)
    return {
        "own": own.num_epochs,
        "chief_only": quiet.num_epochs,
        "every_rank": everywhere.events,
        "answers": [everywhere.answers, model.predict(X[:7], verbose=0).tolist()],
        "derived": derived.events,
    }


def given_to_the_chief_alone() -> Any:
    path = str(FOLDER / "chief-{epoch}.weights.h5")
    save = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    model = make()
    fit(model, *([save] if RANK == 0 else []))
    return [unisono.check_replicas(model), sorted(p.name for p in FOLDER.glob("chief-*"))]


def chief_does_not_train_alone() -> Any:
    model = make()

    class Train(Count):
        told = ""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            try:
                model.train_on_batch(X, Y)
            except unisono.errors.StrategyError as error:
                self.told = str(error)

    train = Train()
    fit(model, unisono.callbacks.chief_only(train), epochs=1)
    return [train.told, unisono.check_replicas(model)]


def saves_that_fail() -> Any:
    (FOLDER / "a-file").write_text("")
    model = make()
    calls = [
        lambda: model.save(FOLDER / "a-file" / "model.keras"),
        lambda: model.export(str(FOLDER / "exported"), format="of no kind"),
    ]
    told = []
    for call in calls:
        try:
            call()
            told.append(["no error", ""])
        except (OSError, ValueError) as error:
            builtin = next(c for c in type(error).__mro__ if c.__module__ == "builtins")
            told.append([f"{type(error).__name__}, {builtin.__name__}", str(error)])
    return told


def keras_is_itself() -> Any:
    return sorted(set(changed(PLAIN_KERAS)) - SAVING)


def tensorflow_files() -> Any:
    if keras.backend.backend() != "tensorflow":
        return None
    import tensorflow as tf

    # Values that differ show who wrote, and who comes late would write last.
    module = tf.Module()
    module.rank = tf.Variable(RANK)
    time.sleep(RANK)
    checkpoint = tf.train.Checkpoint(module=module)
    paths = [checkpoint.save(FOLDER / "checkpoints" / "saved"), checkpoint.write(FOLDER / "alone")]
    manager = tf.train.CheckpointManager(checkpoint, FOLDER / "managed", max_to_keep=1)
    paths += [manager.save(), manager.save()]
    tf.saved_model.save(module, str(FOLDER / "module"))
    is_there = (FOLDER / "module" / "saved_model.pb").exists()
    # A path of its own is a process' own business.
    tf.train.Checkpoint(module=module).write(str(FOLDER / f"own-{RANK}"))
    values = [
        int(tf.train.load_checkpoint(path).get_tensor(VALUE)) for path in (paths[0], paths[3])
    ]
    return [paths, manager.latest_checkpoint, int(checkpoint.save_counter), is_there, values]


QUICK = [
    saves_that_fail,
    library,
    answers_change_nothing,
    switches,
    given_to_the_chief_alone,
    chief_does_not_train_alone,
    keras_is_itself,
    tensorflow_files,
]
PACKAGES = [tensorboard, mlflow, wandb, orbax]


def main() -> None:
    found: dict[str, Any] = {}
    for check in PACKAGES:
        try:
            found[check.__name__] = check()
        except Exception:
            found[check.__name__] = {"failed": traceback.format_exc()}
            break  # The processes may not be at the same place any more.
    (FOLDER / f"rank-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
