"""Images and labels from files, folders or a download, checked before training.

`uint8` arrays stay `uint8`, a quarter of the memory and of the transfer to a device. A truncated
file, a label out of range or a wrong shape is reported here, and not by a framework in the middle
of an epoch. Folders hold one folder of images per class (`cat/1.png`), or these in `train` and
`test`.
"""

import dataclasses
import os
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError

DATA = "UNISONO_DATA"
SYNTHETIC = "synthetic"
Split = tuple[NDArray[Any], NDArray[Any]]

_PARTS = ("x_train", "y_train", "x_test", "y_test")
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError)


@dataclass(frozen=True)
class Form:
    """The images and labels that a recipe takes."""

    name: str
    image_shape: tuple[int, int, int]
    num_classes: int | None = None
    """None for any number of classes."""
    folder_shape: tuple[int, int, int] | None = None
    """The shape to which images from folders are resized, if not `image_shape`."""


def load(
    form: Form,
    data: str | None,
    seed: int = 0,
    otherwise: Callable[[], tuple[Split, Split]] | None = None,
) -> tuple[Split, Split]:
    """`(x_train, y_train), (x_test, y_test)`.

    From the first of: `data`, `UNISONO_DATA`, the recipe's own data (`otherwise`), the cache in
    the home folder, Keras' download.
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
    """Raise DataError if the source does not exist."""
    source = data or os.environ.get(DATA)
    if source and _num_synthetic(source) is None and not Path(source).exists():
        raise DataError(
            f"Asked for data from {source!r}; there is no such file or folder. {_choices()}"
        )


def synthetic(form: Form, seed: int = 0, num_train: int = 0) -> tuple[Split, Split]:
    """Synthetic images that can be classified: a pattern per class, with noise."""
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
    """The number in `synthetic:64`, 0 for `synthetic` alone, None for anything else."""
    word, _, count = source.partition(":")
    if word != SYNTHETIC or (count and not count.isdecimal()):
        return None
    return int(count or 0)


def read_npz(path: Path) -> tuple[Split, Split]:
    """The four arrays of an .npz; reading checks the checksum of each."""
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
        # For other files NumPy advises to load them as pickles, which is unsafe.
        is_other = "allow_pickle" in str(error)
        why = "not an .npz archive" if is_other else f"{type(error).__name__}: {error}"
        raise DataError(
            f"{path} is damaged or truncated ({why}). Copy or download it again; nothing was "
            "trained on it."
        ) from error
    except TypeError as error:  # A plain .npy.
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
    # No network, no such host, a truncated file, a wrong checksum.
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
        return f"x_{part} is empty. Give at least one image."
    if x.dtype.kind not in "uif":
        return f"x_{part} holds {x.dtype}. Give numbers."
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        return f"x_{part} has values that are not finite. Repair or remove them."
    return None


def _fault_of_labels(part: str, num_images: int, y: NDArray[Any], num_classes: int) -> str | None:
    if y.shape != (num_images,):
        found = f"x_{part} has {num_images} images and y_{part} the shape {y.shape}"
        return f"{found}. Give each image one label."
    if y.dtype.kind not in "ui":
        return f"y_{part} holds {y.dtype}. Give integers."
    outside = y[(y < 0) | (y >= num_classes)]
    if len(outside):
        last = num_classes - 1
        found = f"y_{part} has the label {outside[0]}"
        return f"{found}. Labels of {num_classes} classes are 0 to {last}."
    return None


_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff"}
_TEST_NAMES = ("test", "val", "validation")
_TEST_SHARE = 0.2


def has_class_folders(folder: Path) -> bool:
    """Whether there are at least two folders of images, here or in `train`."""
    return len(_classes(_train_part(folder))) > 1


def load_folder(folder: Path, shape: tuple[int, int, int], seed: int) -> tuple[Split, Split]:
    """All images, resized; without a test folder, a fifth of each class is for the test."""
    train_folder = _train_part(folder)
    classes = _classes(train_folder)
    train = _files(train_folder, classes)
    test_folder = next((folder / name for name in _TEST_NAMES if (folder / name).is_dir()), None)
    if train_folder != folder and test_folder is not None:
        unknown = set(_classes(test_folder)) - set(classes)
        if unknown:
            raise DataError(
                f"{test_folder} has the classes {sorted(unknown)}, which {train_folder} has not. "
                "Give both the same folders."
            )
        test = _files(test_folder, classes)
    else:
        train, test = _split(train, len(classes), seed)
    return _read(train, shape), _read(test, shape)


def _train_part(folder: Path) -> Path:
    return folder / "train" if (folder / "train").is_dir() else folder


def _classes(folder: Path) -> list[str]:
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    return [path.name for path in folders if any(map(_is_image, path.iterdir()))]


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in _ENDINGS


def _files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    return [
        (path, label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if _is_image(path)
    ]


def _split(
    files: list[tuple[Path, int]], num_classes: int, seed: int
) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    rng = np.random.default_rng(seed)
    train, test = [], []
    for label in range(num_classes):
        own = [file for file in files if file[1] == label]
        num_test = max(1, round(len(own) * _TEST_SHARE))
        if len(own) < 2:
            raise DataError(
                f"{own[0][0].parent} has one image. A class needs at least two: one to train on "
                "and one to test with."
            )
        order = [own[i] for i in rng.permutation(len(own))]
        test += order[:num_test]
        train += order[num_test:]
    return train, test


def _read(files: list[tuple[Path, int]], shape: tuple[int, int, int]) -> Split:
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "Asked for images from a folder, which needs Pillow: pip install pillow."
        ) from error
    height, width, channels = shape
    images = np.empty((len(files), *shape), "uint8")
    for i, (path, _) in enumerate(files):
        try:
            with Image.open(path) as image:
                plain = image.convert("L" if channels == 1 else "RGB").resize((width, height))
        except (OSError, SyntaxError, ValueError) as error:
            raise DataError(
                f"{path} is damaged, truncated or not an image ({error}). Replace or remove it; "
                "nothing was trained on it."
            ) from error
        images[i] = np.asarray(plain).reshape(shape)
    return images, np.array([label for _, label in files], "int64")
