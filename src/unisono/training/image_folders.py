"""Images in folders, one for each class: `cat/1.png`, `dog/2.jpg`; or that in `train` and `test`.

They are read into memory, at the size that a recipe takes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.errors import DataError

_ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".tif", ".tiff"}
_TEST_NAMES = ("test", "val", "validation")
_TEST_SHARE = 0.2
Split = tuple[NDArray[Any], NDArray[Any]]


def has_class_folders(folder: Path) -> bool:
    """Whether there are at least two classes of images, here or under `train`."""
    return len(_classes(_train_part(folder))) > 1


def load_folder(folder: Path, shape: tuple[int, int, int], seed: int) -> tuple[Split, Split]:
    """All images, at one size; without a folder for tests, a fifth of each class is for those."""
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
                f"{path} is damaged, cut off or no image ({error}). Bring it again or remove it; "
                "nothing was trained on it."
            ) from error
        images[i] = np.asarray(plain).reshape(shape)
    return images, np.array([label for _, label in files], "int64")
