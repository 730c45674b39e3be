"""What one process of a verified program has recorded, as plain data.

Written by the process that runs the program and read by the command, so nothing of a framework is
in it. Arrays of a step are samples; those of the end are complete, up to a size.
"""

import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SETTINGS = "UNISONO_VERIFY"
"""The variable that makes a process record itself: a `Settings` as JSON."""
EXACT = "UNISONO_VERIFY_EXACT"
"""As in replication.exact_draws, which imports Keras."""


@dataclass(frozen=True)
class RecordSettings:
    """What a recording process has to know."""

    folder: str
    num_steps: int = 20
    seed: int = 1234
    is_exact: bool = False
    """Whether generators that a program leaves without a seed get one."""
    perturbs: bool = False
    """Whether initial weights are changed in their last bits: how much does rounding grow?"""


@dataclass(frozen=True, order=True)
class Site:
    """A line of the user's program."""

    file: str
    line: int
    text: str = ""

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"


@dataclass
class Step:
    """One execution of a train function, which may be several optimizer steps at once."""

    model: int
    """Position in `Record.models`."""
    num_steps: int = 1
    logs: dict[str, float] = field(default_factory=dict)
    weights: list[Any] = field(default_factory=list)
    optimizer: list[Any] = field(default_factory=list)
    learning_rate: float | None = None
    num_rows: int | None = None
    data: int | None = None
    """A checksum of the global batch; None where it is not known."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """Numbers and words that the program's own classes (model, layers, callbacks) hold."""
    program: dict[str, list[Any]] = field(default_factory=dict)
    """Arrays of the program's own variables, in a stateless loop of JAX."""
    others: "list[Step]" = field(default_factory=list)
    """Of further models that a custom loop has."""


@dataclass
class RecordedCall:
    """A call of the program on a model, in the order of calls."""

    name: str
    model: int
    site: Site | None
    arguments: dict[str, Any] = field(default_factory=dict)
    """Numbers and words as given, arrays as shape and checksum."""
    first_step: int = 0
    results: dict[str, Any] = field(default_factory=dict)
    """Arrays by name: metrics of `evaluate`, outputs of `predict`, the history of `fit`."""
    is_ours: bool = False
    """Made by `unisono verify` after the program, which has no such call."""


@dataclass
class LayerFacts:
    """A layer of a model."""

    name: str
    path: str
    kind: str
    """The name of its class."""
    site: Site | None = None
    is_random: bool = False
    is_batch_norm: bool = False
    is_custom: bool = False
    is_stateful: bool = False
    inner_batch_norms: list[str] = field(default_factory=list)
    """Batch norms of a framework's own module inside the layer."""


@dataclass(frozen=True)
class Mixing:
    """What of a model computes with other rows than its own."""

    layer: str = ""
    is_loss: bool = False


@dataclass
class ModelFacts:
    """A model that was trained or asked."""

    name: str
    kind: str
    num_replicas: int = 1
    is_parallel: bool = False
    is_sync: bool = True
    """Whether batch norm is synchronized."""
    variables: list[str] = field(default_factory=list)
    """Paths, in the order of the arrays of steps."""
    optimizer_variables: list[str] = field(default_factory=list)
    optimizer: dict[str, Any] = field(default_factory=dict)
    """The configuration of the optimizer."""
    optimizer_site: Site | None = None
    compile_site: Site | None = None
    parallel_site: Site | None = None
    dtype: str = "float32"
    layers: list[LayerFacts] = field(default_factory=list)
    own_methods: dict[str, Site] = field(default_factory=dict)
    """Steps and losses that the class of the model defines itself."""
    mixing: Mixing = Mixing()
    start: list[Any] = field(default_factory=list)
    """Samples of the variables before the first step."""
    is_built_late: bool = False
    """Whether its first step has built it, so that they are of later."""
    weights: list[Any] = field(default_factory=list)
    optimizer_state: list[Any] = field(default_factory=list)
    """Of the end of the program."""


@dataclass
class RandomUse:
    """A generator that the program made or seeded."""

    what: str
    site: Site | None
    seed: str | None = None
    """As text; None without a seed."""


@dataclass
class ProgramRecord:
    """What one process has recorded."""

    rank: int = 0
    world_size: int = 1
    backend: str = ""
    models: list[ModelFacts] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    calls: list[RecordedCall] = field(default_factory=list)
    random: list[RandomUse] = field(default_factory=list)
    draws: list[RandomUse] = field(default_factory=list)
    """Functions that drew random numbers while a model was trained; the site is the program's."""
    warnings: list[str] = field(default_factory=list)
    """Those that unisono has issued."""
    notes: list[str] = field(default_factory=list)
    adopted: list[Site | None] = field(default_factory=list)
    """Where models were made parallel for a program that does not use unisono."""
    uses_unisono: bool = False
    files: list[str] = field(default_factory=list)
    """The program's own."""
    loop_sites: list[Site] = field(default_factory=list)
    """Custom training loops."""
    num_distributed: int = 0
    """Batches of distributed data sets that loops were given."""
    error: str = ""
    """The traceback that ended the program."""
    error_type: str = ""
    error_message: str = ""
    error_site: Site | None = None
    replicas_differ: str = ""
    """What `check_replicas` found."""

    @property
    def num_steps(self) -> int:
        return sum(step.num_steps for step in self.steps)


def write_record(record: ProgramRecord, folder: str) -> None:
    """Write a record completely or not at all."""
    target = Path(folder, f"record-{record.rank}-{os.getpid()}")
    draft = target.with_suffix(".draft")
    with draft.open("wb") as file:
        pickle.dump(record, file)
    draft.replace(target.with_suffix(".pickle"))


def read_records(folder: Path) -> list[ProgramRecord]:
    """The records of all processes of a run, those that trained first, by rank."""
    # Written by processes that this one has started, into a folder that only this user can open.
    found = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("*.pickle"))]
    return sorted(found, key=lambda record: (not record.steps, record.rank))


def sample(values: Any, most: int) -> Any:
    """Evenly spread elements of an array that stand for all of it."""
    flat = np.asarray(values).reshape(-1)
    if flat.dtype.kind not in "fiub":
        flat = flat.astype("float32")  # bfloat16, which NumPy does not know.
    return np.array(flat[:: max(1, -(-flat.size // most))])
