"""What a process of a run feeds its steps: its shard of every global batch, agreed on before use.

Arrays are indexed, so a process reads its own rows only, in the order that Keras itself would take
them. Any other data yields the same global batches in every process, which keeps its rows. Before
each step the processes compare what they are about to do: a difference is an error in all of them,
never a collective in which one is missing.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np

from unisono.data.shards import shard_bounds
from unisono.errors import DisagreementError
from unisono.launch.client import World
from unisono.launch.preemption_signal import is_preempting

_MOST_BYTES_COMPARED = 1 << 20


class Shard(NamedTuple):
    """A process' part of a global batch; Keras' iterators pass it on as they pass tuples."""

    data: Any
    """This process' rows, or all of them if `is_replicated`."""
    num_rows: int
    """Rows of the global batch."""
    is_replicated: bool
    checksum: int
    """Of the global batch, or of the indices of its rows."""


@dataclass
class _Call:
    name: str
    step: int = 0


class Feed:
    """The shards of one model's data in one process.

    `needs_even_shards`: a batch that does not divide by the processes is given to each of them.
    `rows_between(leaf, start, stop)` takes rows of what cannot be indexed, too.
    `batches_of(arrays)` is what Keras on TensorFlow and torch reads a `ShardedArrays` by.
    """

    def __init__(
        self,
        world: World,
        *,
        needs_even_shards: bool,
        rows_between: Callable[[Any, int, int], Any] = lambda leaf, start, stop: leaf[start:stop],
        batches_of: Callable[[Any], Any] | None = None,
    ) -> None:
        self.world = world
        self.batches_of = batches_of
        self._needs_even_shards = needs_even_shards
        self._rows_between = rows_between
        self._calls: list[_Call] = []

    @contextmanager
    def calling(self, name: str) -> Iterator[None]:
        """Steps inside belong to a call of this name."""
        self._calls.append(_Call(name))
        try:
            yield
        finally:
            self._calls.pop()

    @property
    def is_calling(self) -> bool:
        return bool(self._calls)

    def where(self) -> str:
        """The calls under way, as a reader of an error knows them."""
        return " > ".join(call.name for call in self._calls) or "a step"

    def bounds(self, num_rows: int) -> tuple[int, int, bool]:
        """First and past-the-last row of this process, and whether that is all of the batch."""
        size = self.world.size
        if num_rows < size or (self._needs_even_shards and num_rows % size):
            return 0, num_rows, True
        return *shard_bounds(num_rows, size, self.world.rank), False

    def shard(self, batch: Any) -> Shard:
        """This process' shard of a global batch that every process has."""
        if isinstance(batch, Shard):
            return batch
        num_rows = _num_rows(batch)
        start, stop, is_replicated = self.bounds(num_rows)

        def rows(leaf: Any) -> Any:
            is_split = not is_replicated and _rows_of(leaf) == num_rows
            return self._rows_between(leaf, start, stop) if is_split else leaf

        data = keras.tree.map_structure(rows, batch)
        return Shard(data, num_rows, is_replicated, checksum_of(batch))

    def agree(
        self, shard: Shard, changed: Sequence[int], describe: Callable[[], list[str]]
    ) -> list[int]:
        """Agree on a step with all processes; which variables to take over from the chief.

        `changed` are the variables that this process wrote since its last step, by position among
        those that `describe` describes.
        """
        call = self._calls[-1] if self._calls else _Call("step")
        call.step += 1
        topic = f"{self.where()}, step {call.step}"
        digest = zlib.crc32("\n".join(describe()).encode()) if changed else 0
        own = [int(shard.num_rows), int(shard.checksum), list(changed), digest, is_preempting()]
        every = self.world.all_gather(topic, own)
        # First, since other models may well come with other data.
        if len({digest for *_, changed, digest, _ in every if changed}) > 1:
            _refuse_variables(self.world.all_gather(f"{topic}: variables", describe()))
        _check_rows(topic, every)
        self.world.is_preempting |= any(is_preempting for *_, is_preempting in every)
        return sorted({place for _, _, changed, *_ in every for place in changed})


def agree_on_batch(world: World, topic: str, batch: Any, num_rows: int) -> None:
    """Compare a global batch of a custom training loop between the processes."""
    _check_rows(topic, world.all_gather(topic, [num_rows, checksum_of(batch)]))


def _check_rows(topic: str, every: list[list[Any]]) -> None:
    rows = [num_rows for num_rows, *_ in every]
    if len(set(rows)) > 1:
        found = f"global batches of {rows} rows"
    elif len({checksum for _, checksum, *_ in every}) > 1:
        found = "different rows"
    else:
        return
    raise DisagreementError(
        f"The processes came to {topic} with {found} (rank 0 first). Every process must be given "
        "the same global batches in the same order; fit and strategy.distribute_dataset take its "
        "shard of each. Give all the same data and seed (for a shuffled tf.data.Dataset: "
        "shuffle(..., seed=...)), and do not split it by process yourself."
    )


def _refuse_variables(every: list[list[str]]) -> None:
    for rank, found in enumerate(every[1:], start=1):
        for i in range(max(len(every[0]), len(found))):
            first, other = (names[i] if i < len(names) else "none" for names in (every[0], found))
            if first != other:
                raise DisagreementError(
                    f"The processes train different models: variable {i} is {first} on rank 0 and "
                    f"{other} on rank {rank}. Build the same model in every process."
                )


def checksum_of(batch: Any) -> int:
    """A checksum of a batch's values; of evenly spread rows where there is very much of it."""
    total = 0
    for leaf in keras.tree.flatten(batch):
        if not _rows_of(leaf):
            continue
        num_bytes = int(np.prod([size or 1 for size in leaf.shape])) * 8
        step = max(1, min(_rows_of(leaf), num_bytes // _MOST_BYTES_COMPARED))
        total = zlib.crc32(_bytes_of(leaf, step), total)
    return short(total)


def short(checksum: int) -> int:
    """A checksum that any backend's default integer can hold."""
    return checksum & 0x7FFFFFFF


def _bytes_of(rows: Any, step: int) -> bytes:
    try:
        rows = rows[::step] if step > 1 else rows
        values = np.asarray(keras.ops.convert_to_numpy(rows))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return b""  # Sparse or ragged: the number of rows is compared, and the dense parts.
    if values.dtype == object:
        return repr(values.tolist()).encode()
    return np.ascontiguousarray(values).tobytes()


def _num_rows(batch: Any) -> int:
    return next((n for n in map(_rows_of, keras.tree.flatten(batch)) if n), 0)


def _rows_of(leaf: Any) -> int:
    shape: Any = getattr(leaf, "shape", ())
    return int(shape[0]) if len(shape) else 0
