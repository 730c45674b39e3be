"""What a process has of Keras' own functions and methods, to be compared later."""

import builtins
import sys
from types import ModuleType
from typing import Any

import keras

# Replaced until the last parallel model is released, which they write completely or not at all.
SAVING = {
    "keras.src.saving.saving_lib.save_model",
    "keras.src.saving.saving_lib.save_weights_only",
    "keras.src.legacy.saving.legacy_h5_format.save_model_to_hdf5",
}


def names_of_keras() -> dict[str, Any]:
    """The values of all names of Keras' modules, of its model class, and of Python's builtins."""
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "keras"]
    owners = [*modules, builtins, *keras.Model.__mro__, keras.callbacks.Callback]
    return {
        f"{owner.__name__}.{name}": value
        for owner in owners
        for name, value in vars(owner).items()
        if not isinstance(value, ModuleType) and callable(value)
    }


def changed(before: dict[str, Any]) -> list[str]:
    """Names that mean another thing now, or are gone, or are new on the model's class."""
    now = names_of_keras()
    kept = [name for name, value in before.items() if now.get(name) is not value]
    classes = tuple(f"{cls.__name__}." for cls in keras.Model.__mro__)
    return kept + [name for name in now.keys() - before.keys() if name.startswith(classes)]
