"""Weight files with names of Keras 2: `weights.h5`, `w.hdf5`, or without an extension.

Keras 3 writes weights only to `*.weights.h5`, and reads other files as those of Keras 2. Here a
file keeps the name that the program gives it, with contents of Keras 3.
"""

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono.compat.legacy.lines import announce
from unisono.scratch import temporary_folder

_ENDING = ".weights.h5"
_ENDINGS_OF_MODELS = (".keras", ".h5")
_OLD_ENDING = ".hdf5"


def patch(keras: Any) -> None:
    model, checkpoint = keras.Model, keras.callbacks.ModelCheckpoint
    model.save_weights = _saving(model.save_weights)
    model.load_weights = _loading(model.load_weights)
    checkpoint.__init__ = _naming(checkpoint.__init__)


def _saving(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def save_weights(self: Any, filepath: Any, overwrite: bool = True, **more: Any) -> Any:
        path = os.fspath(filepath)
        if path.endswith(_ENDING):
            return plain(self, filepath, overwrite, **more)
        announce("a file of weights of another name", f"model.save_weights('…{_ENDING}')")
        draft = path + _ENDING
        plain(self, draft, overwrite, **more)
        os.replace(draft, path)
        return None

    return save_weights


def _loading(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def load_weights(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        path = Path(os.fspath(filepath))
        if path.name.endswith(_ENDING) or not _is_keras_3(path):
            return plain(self, filepath, *args, **kwargs)
        with temporary_folder() as folder:
            named = folder / f"named{_ENDING}"
            try:
                named.symlink_to(path.resolve())
            except OSError:
                shutil.copy(path, named)
            return plain(self, named, *args, **kwargs)

    return load_weights


def _naming(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Let a checkpoint have any name, as in Keras 2."""

    @functools.wraps(plain)
    def __init__(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        path = os.fspath(filepath)
        # The fourth argument after the path, in Keras 2 and 3.
        is_weights = kwargs.get("save_weights_only", args[3] if len(args) > 3 else False)
        endings = (_ENDING,) if is_weights else _ENDINGS_OF_MODELS
        if path.endswith(endings) or not (is_weights or path.endswith(_OLD_ENDING)):
            plain(self, filepath, *args, **kwargs)
            return
        announce("ModelCheckpoint with a file of another name", f"'…{endings[0]}'")
        plain(self, path + endings[-1], *args, **kwargs)
        self.filepath = path

    return __init__


def _is_keras_3(path: Path) -> bool:
    """Whether Keras 3 wrote a file: Keras 2 listed the layers' names."""
    import h5py  # type: ignore[import-untyped]

    if not path.is_file() or not h5py.is_hdf5(path):
        return False
    with h5py.File(path) as file:
        return "layer_names" not in file.attrs and "model_weights" not in file
