"""Data and the way to train on it, shared with programs that have no unisono."""

from typing import Any

import numpy as np


def rows(count: int = 24, *, seed: int = 0) -> tuple[Any, Any]:
    """Inputs and targets of a small regression; later rows are larger, so order matters."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 4)) * np.linspace(0.5, 1.5, count)[:, None]
    return x.astype("float32"), np.tanh(x @ draw.normal(size=(4, 1))).astype("float32")


def fit(model: Any, x: Any, y: Any = None, **options: Any) -> Any:
    """`model.fit`, quiet and in order; returns the history's dict."""
    if isinstance(x, np.ndarray):
        options = {"batch_size": 8, **options}
    return model.fit(x, y, **{"shuffle": False, "verbose": 0, **options}).history
