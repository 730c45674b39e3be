"""The handwritten digits that come with the package, so that the demo needs no download.

1,797 images of 8x8 pixels: the test part of "Optical Recognition of Handwritten Digits" by
E. Alpaydin and C. Kaynak (1998), UCI Machine Learning Repository, https://doi.org/10.24432/C50P49,
licensed CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/). Stored here as `digits.npz`;
the values are unchanged.
"""

from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

Split = tuple[NDArray[np.float32], NDArray[np.uint8]]


def load_digits(num_test: int = 360, seed: int = 0) -> tuple[Split, Split]:
    """Return `(x_train, y_train), (x_test, y_test)`; the same seed gives the same split.

    Images are float32 of shape (n, 8, 8, 1) with values from 0 to 1, labels are 0 to 9.

        (x_train, y_train), (x_test, y_test) = load_digits()
    """
    with files("unisono.recipes").joinpath("digits.npz").open("rb") as file, np.load(file) as data:
        images, labels = data["images"], data["labels"]
    if not 0 < num_test < len(images):
        raise ValueError(
            f"Asked for {num_test} test images; there are {len(images)} images in all. "
            f"Choose num_test from 1 to {len(images) - 1}."
        )
    order = np.random.default_rng(seed).permutation(len(images))
    x = (images[order, :, :, np.newaxis] / 16).astype(np.float32)
    y = labels[order]
    return (x[num_test:], y[num_test:]), (x[:num_test], y[:num_test])
