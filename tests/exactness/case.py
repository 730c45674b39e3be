"""A case of the exactness contract: one feature of Keras, exercised on what `adopt` returns.

Each case runs from the same weights, seed and data order, once on plain Keras (`adopt` hands the
model back) and once on `unisono.parallel`. What both return is compared in compare.py.
"""

import gc
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

Adopt = Callable[[Any], Any]
Results = dict[str, Any]
Run = Callable[[Adopt], Results]

SEED = 11

# The one tolerance of float32. Half precision is compared at its own resolution: two spacings of
# its numbers around 1, one for each layer that rounds its outputs in the nets compared.
FLOAT32 = 1e-5
TOLERANCES: Mapping[str, float] = {"float32": FLOAT32, "float16": 2.0**-9, "bfloat16": 2.0**-6}


@dataclass(frozen=True)
class Case:
    """One row of the table.

    `lacks` says what plain Keras refuses on a backend, `unpromised` what docs/exactness.md leaves
    out there. `sharpest` is the number of replicas that the case was made for, where it has one.
    """

    name: str
    group: str
    title: str
    run: Run
    lacks: Mapping[str, str] = field(default_factory=dict)
    unpromised: Mapping[str, str] = field(default_factory=dict)
    resolution: str = "float32"
    sharpest: int | None = None

    def reason_to_skip(self, backend: str) -> str | None:
        return self.lacks.get(backend) or self.unpromised.get(backend)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.resolution]


class Group:
    """A section of the table: cases are added to it where they are defined."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.cases: list[Case] = []

    def add(self, name: str, title: str, run: Run, **options: Any) -> None:
        self.cases.append(Case(name, self.title, title, run, **options))

    def case(self, title: str, **options: Any) -> Callable[[Run], Run]:
        """Add the decorated function; its name becomes the name of the case."""

        def add(run: Run) -> Run:
            self.add(run.__name__.strip("_"), title, run, **options)
            return run

        return add


def run_case(case: Case, adopt: Adopt) -> Results:
    """Run the case from its fixed seed on the models that `adopt` returns."""
    keras.utils.set_random_seed(SEED)
    try:
        return case.run(adopt)
    finally:
        keras.config.set_dtype_policy("float32")
        gc.collect()  # parallel models hold processes and devices until they are collected


def replicas_of(adopt: Adopt) -> int | None:
    """The number of replicas that `adopt` uses; None on plain Keras."""
    replicas: int | None = getattr(adopt, "keywords", {}).get("replicas")
    return replicas


def state_of(model: Any) -> Results:
    """Every weight and optimizer variable of the model, by position."""
    return {
        "weights": by_position(model.weights),
        "optimizer": optimizer_state(getattr(model, "optimizer", None)),
    }


def optimizer_state(optimizer: Any) -> Results:
    return {} if optimizer is None else by_position(optimizer.variables)


def by_position(variables: Iterable[Any]) -> Results:
    """Values by position and name, without the numbers that Keras counts up in a process."""
    return {f"{i} {re.sub(r'_[0-9]+', '', v.name)}": to_numpy(v) for i, v in enumerate(variables)}


def to_numpy(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(keras.ops.convert_to_numpy(value))


def files_in(folder: str | Path) -> list[str]:
    """The names of all files below the folder, sorted."""
    root = Path(folder)
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())
