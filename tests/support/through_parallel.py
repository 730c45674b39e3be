"""A plugin of pytest that sends Keras' own trainer tests through `unisono.parallel`.

With `UNISONO_THROUGH=2` the first `fit`, `evaluate` or `predict` of each model makes it parallel on
two replicas; without it nothing changes, for comparison. `make trainer-tests` runs both.
"""

import functools
import os
import sys
from typing import Any

import keras
import pytest

import unisono

REPLICAS = int(os.environ.get("UNISONO_THROUGH", "0"))
BACKEND = keras.backend.backend()
_num_models = 0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "requires_trainable_backend: of Keras' own tests")
    if not REPLICAS:
        return
    # Most of these models are no keras.Model, but a layer and a trainer.
    sys.modules["unisono.parallel"].check_model = lambda *args: None  # type: ignore[attr-defined]
    module = f"keras.src.backend.{BACKEND}.trainer"
    trainer = next(cls for cls in keras.Model.__mro__ if cls.__module__ == module)
    for name in ("fit", "evaluate", "predict"):
        setattr(trainer, name, _through_parallel(name, getattr(trainer, name)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"{BACKEND}: {_num_models} models were made parallel")


def _through_parallel(name: str, plain: Any) -> Any:
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _num_models
        if "_unisono" in vars(self):
            return plain(self, *args, **kwargs)
        unisono.parallel(self, replicas=REPLICAS)
        _num_models += 1
        return getattr(self, name)(*args, **kwargs)

    return call
