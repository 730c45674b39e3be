"""What a backend is and sees, and whether each of its devices computes.

    python -m unisono.doctor.programs.facts RECORDS

Each device multiplies two matrices, and the product is compared with NumPy's. The numbers are
small integers, so that every product is exact in float32 and a difference is a defect.
"""

import dataclasses
import time
from typing import Any

import numpy as np

from unisono.backends import load_framework
from unisono.doctor.programs.records import record, short

_SIZE = 1024
_ROUNDS = 4


def main() -> None:
    framework = load_framework()
    record("build", **dataclasses.asdict(framework.build()))
    import keras

    record("keras", version=keras.__version__)
    from unisono.backends import load_backend

    count = load_backend().num_gpus()
    record("devices", num_gpus=count)
    names = [f"gpu:{i}" for i in range(count)] or ["cpu"]
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, (_SIZE, _SIZE)).astype("float32") for _ in range(2))
    expected = a @ b
    for name in names:
        record("begin", device=name)
        try:
            record("compute", device=name, **_compute(name, a, b, expected))
        except Exception as error:
            record("compute", device=name, error=short(error))


def _compute(name: str, a: Any, b: Any, expected: Any) -> dict[str, Any]:
    import keras

    import unisono

    with unisono.device(name):
        x, y = keras.ops.convert_to_tensor(a), keras.ops.convert_to_tensor(b)
        found = keras.ops.convert_to_numpy(keras.ops.matmul(x, y))
        began = time.perf_counter()
        for _ in range(_ROUNDS):
            z = keras.ops.matmul(x, y)
        keras.ops.convert_to_numpy(z)
        seconds = (time.perf_counter() - began) / _ROUNDS
    return {
        "difference": float(np.max(np.abs(found - expected))),
        "gflops": round(2 * _SIZE**3 / seconds / 1e9, 1),
    }


if __name__ == "__main__":
    main()
