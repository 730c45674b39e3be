"""Images and labels for a training, from wherever they are, checked before they are trained on.

Arrays of `uint8` stay that: a quarter of the memory and of the way to a device. A file that is
cut off, a label out of range or a shape that does not fit is named here, and not by a framework
in the middle of an epoch.
"""

import dataclasses
import os
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError
from unisono.training.image_folders import has_class_folders, load_folder

DATA = "UNISONO_DATA"
SYNTHETIC = "synthetic"
Split = tuple[NDArray[Any], NDArray[Any]]

_PARTS = ("x_train", "y_train", "x_test", "y_test")
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError)


@dataclass(frozen=True)
class Form:
    """What the images and labels of a recipe look like."""

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int | None = None
    """None where any number of classes will do."""
    folder_shape: tuple[int, int, int] | None = None
    """What images of folders are brought to, where that is another shape."""


def load(
    form: Form,
    data: str | None,
    seed: int = 0,
    otherwise: Callable[[], tuple[Split, Split]] | None = None,
) -> tuple[Split, Split]:
    """`(x_train, y_train), (x_test, y_test)`, from what was asked for or from where they are found.

    In this order: `data` as given, `UNISONO_DATA`, what the recipe brings itself (`otherwise`),
    what was brought to this machine before, Keras' download.
    """
    source = data or (os.environ.get(DATA) if otherwise is None else None)
    if source and _num_synthetic(source) is not None:
        return synthetic(form, seed, _num_synthetic(source) or 0)
    if source:
        return _from_path(form, Path(source), seed)
    if otherwise is not None:
        return otherwise()
    cached = Path.home() / ".cache" / "unisono" / "data" / f"{form.name}.npz"
    if cached.is_file():
        return _checked(form, str(cached), read_npz(cached))
    return _checked(form, f"keras.datasets.{form.name}", _download(form.name))


def check_source(data: str | None) -> None:
    """Refuse a source that is not there, before anything is started."""
    source = data or os.environ.get(DATA)
    if source and _num_synthetic(source) is None and not Path(source).exists():
        raise DataError(
            f"Asked for data from {source!r}; there is no such file or folder. {_choices()}"
        )


def synthetic(form: Form, seed: int = 0, num_train: int = 0) -> tuple[Split, Split]:
    """Made-up images that can be told apart: a pattern for each class, under noise."""
    rng = np.random.default_rng(seed)
    num_classes = form.num_classes or 10
    num_train = num_train or 2048
    patterns = rng.integers(64, 192, (num_classes, *form.image_shape))

    def split(count: int) -> Split:
        labels = np.arange(count) % num_classes
        rng.shuffle(labels)
        noise = rng.normal(0, 40, (count, *form.image_shape))
        return (patterns[labels] + noise).clip(0, 255).astype("uint8"), labels.astype("uint8")

    return split(num_train), split(max(num_classes, num_train // 4))


def _num_synthetic(source: str) -> int | None:
    """How many made-up images `synthetic:64` asks for, 0 for `synthetic` alone; None if neither."""
    word, _, count = source.partition(":")
    if word != SYNTHETIC or (count and not count.isdecimal()):
        return None
    return int(count or 0)


def read_npz(path: Path) -> tuple[Split, Split]:
    """The four arrays of an .npz, every byte of which is checked while it is read."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            missing = [part for part in _PARTS if part not in file]
            if missing:
                raise DataError(
                    f"Found no {', '.join(missing)} in {path}, only "
                    f"{', '.join(file) or 'nothing'}. Give an .npz with {', '.join(_PARTS)}."
                )
            x_train, y_train, x_test, y_test = (file[part] for part in _PARTS)
    except DataError:
        raise
    except _BROKEN as error:
        # Of other files NumPy says to load them as pickles, unsafely.
        is_other = "allow_pickle" in str(error)
        why = "no archive of arrays" if is_other else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{path} is damaged or cut off ({why}). Copy or download it again; nothing was trained "
            "on it."
        ) from error
    except TypeError as error:  # A plain .npy, whose array is no archive.
        raise DataError(f"{path} is not an .npz with {', '.join(_PARTS)}.") from error
    return (x_train, y_train), (x_test, y_test)


def _from_path(form: Form, path: Path, seed: int) -> tuple[Split, Split]:
    if path.is_dir():
        file = path / f"{form.name}.npz"
        if file.is_file():
            return _checked(form, str(file), read_npz(file))
        if has_class_folders(path):
            shape = form.folder_shape or form.image_shape
            form = dataclasses.replace(form, image_shape=shape)
            return _checked(form, str(path), load_folder(path, shape, seed))
        raise DataError(
            f"Asked for data from {path}; found neither {file.name} nor folders of images there, "
            f"one for each class. {_choices()}"
        )
    check_source(str(path))
    return _checked(form, str(path), read_npz(path))


def _download(name: str) -> tuple[Split, Split]:
    import keras

    source = getattr(keras.datasets, name, None)
    if source is None:
        raise DataError(f"The recipe {name} has no data that can be downloaded. {_choices()}")
    try:
        train, test = source.load_data()
    # Whatever goes wrong on the way: no network, no such host, a file cut off, a wrong checksum.
    except Exception as error:
        raise DataError(
            f"Could not download {name} with keras.datasets ({type(error).__name__}: {error}). "
            f"{_choices()}"
        ) from error
    return train, test


def _choices() -> str:
    return (
        "Choose: --data FILE.npz with x_train, y_train, x_test, y_test; --data FOLDER with that "
        f"file or with one folder of images for each class; the variable {DATA} set to either; or "
        f"--data {SYNTHETIC} to try a recipe without data."
    )


def _checked(form: Form, source: str, splits: tuple[Split, Split]) -> tuple[Split, Split]:
    labels = [y for _, y in splits if y.dtype.kind in "ui"]
    num_classes = form.num_classes or 1 + max((int(y.max(initial=0)) for y in labels), default=0)
    (x_train, y_train), (x_test, y_test) = splits
    train = _checked_split(form, source, "train", x_train, y_train, num_classes)
    return train, _checked_split(form, source, "test", x_test, y_test, num_classes)


def _checked_split(
    form: Form, source: str, part: str, x: NDArray[Any], y: NDArray[Any], num_classes: int
) -> Split:
    if x.shape[1:] == form.image_shape[:2] and form.image_shape[2] == 1:
        x = x[..., np.newaxis]
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    fault = _fault_of_images(form, part, x) or _fault_of_labels(part, len(x), y, num_classes)
    if fault is not None:
        raise DataError(f"{source}: {fault}")
    return x, y


def _fault_of_images(form: Form, part: str, x: NDArray[Any]) -> str | None:
    if x.shape[1:] != form.image_shape:
        shape = " x ".join(map(str, form.image_shape))
        return f"x_{part} is {x.shape}. The recipe {form.name} takes images of {shape}."
    if len(x) == 0:
        return f"x_{part} is empty. There is nothing to train on or to test with."
    if x.dtype.kind not in "uif":
        return f"x_{part} holds {x.dtype}. Images are numbers."
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        return f"x_{part} has values that are not finite. Repair or remove them."
    return None


def _fault_of_labels(part: str, num_images: int, y: NDArray[Any], num_classes: int) -> str | None:
    if y.shape != (num_images,):
        found = f"x_{part} has {num_images} images and y_{part} the shape {y.shape}"
        return f"{found}. Give each image one label."
    if y.dtype.kind not in "ui":
        return f"y_{part} holds {y.dtype}. Labels are whole numbers."
    outside = y[(y < 0) | (y >= num_classes)]
    if len(outside):
        last = num_classes - 1
        found = f"y_{part} has the label {outside[0]}"
        return f"{found}. Labels of {num_classes} classes are 0 to {last}."
    return None
