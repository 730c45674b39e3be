"""One process of `unisono.bench.processes`: trains a net a pass at a time, when a file says so.

    python -m unisono.bench.passes FOLDER WAY MODEL NUM_STEPS

`together` is `unisono.parallel` in a run of several processes, on a global batch of as many
per-replica batches; `apart` is plain Keras, alone on one of them. It writes FOLDER/WAY-ready-RANK
after a warm-up, and FOLDER/WAY-N-RANK with its images per second after the Nth pass, which begins
when FOLDER/WAY-N appears.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

PER_REPLICA = {"mnist_cnn": 256, "minigooglenet": 64}
_POLL_S = 0.005


def main(folder: Path, way: str, name: str, num_steps: int) -> None:
    import keras

    import unisono

    facts = unisono.topology()
    rank = int(os.environ.get("BENCH_RANK", facts.rank))
    keras.utils.set_random_seed(0)
    model = make(name)
    per_replica = PER_REPLICA[name]
    if way == "together":
        model = unisono.parallel(model)
    global_batch = per_replica * (facts.world_size if way == "together" else 1)
    x, y = data(model, global_batch * num_steps)

    def fit(num_rows: int) -> None:
        model.fit(x[:num_rows], y[:num_rows], batch_size=global_batch, verbose=0)

    fit(2 * global_batch)
    fit(2 * global_batch)
    (folder / f"{way}-ready-{rank}").touch()
    for number in range(1_000_000):
        if not wait_for(folder / f"{way}-{number}", folder / "end"):
            return
        start = time.perf_counter()
        fit(len(x))
        own = per_replica * num_steps / (time.perf_counter() - start)
        part = folder / f"{way}-{number}-{rank}.part"
        part.write_text(str(own))
        part.rename(part.with_suffix(""))


def wait_for(file: Path, end: Path) -> bool:
    """Whether a file has appeared, and not the one that ends it all."""
    while not file.exists():
        if end.exists():
            return False
        time.sleep(_POLL_S)
    return True


def make(name: str) -> Any:
    import keras

    from unisono.bench import minigooglenet, mnist_cnn

    if name == "mnist_cnn":
        return mnist_cnn.build()
    model = minigooglenet.build()
    optimizer = keras.optimizers.SGD(5e-3, momentum=0.9)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def data(model: Any, num_rows: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    x = rng.random((num_rows, *model.input_shape[1:]), dtype=np.float32)
    return x, rng.integers(0, 10, num_rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
