"""Collectives between the processes of a run on JAX: arrays in, arrays of this process out.

Each is a small program of the whole mesh, compiled once per shape and type. Before one runs, the
processes compare what they are about to do, so that a difference is an error in all of them. 64-bit
types keep their precision, whether or not the program has enabled them in JAX.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import PartitionSpec

from unisono.backends.jax.mesh import AXIS, ReplicaMesh, peers_watched
from unisono.errors import DisagreementError, StrategyError

_EVERY, _OWN = PartitionSpec(), PartitionSpec(AXIS)
_REDUCTIONS = ("sum", "min", "max", "product")
# What each program does to the rows of one process, and whether every process gets the same.
_PROGRAMS: dict[str, tuple[Callable[[Any], Any], PartitionSpec]] = {
    "sum": (lambda x: jax.lax.psum(x, AXIS), _EVERY),
    "min": (lambda x: jax.lax.pmin(x, AXIS), _EVERY),
    "max": (lambda x: jax.lax.pmax(x, AXIS), _EVERY),
    "product": (lambda x: jax.lax.all_gather(x, AXIS).prod(0, dtype=x.dtype), _EVERY),
    "gather": (lambda x: jax.lax.all_gather(x, AXIS), _EVERY),
    "scatter": (lambda x: jax.lax.psum_scatter(x, AXIS, tiled=True), _OWN),
    "exchange": (lambda x: jax.lax.all_to_all(x, AXIS, 0, 0), _OWN),
}


class JaxCollectives:
    """See base.Collectives; over the processes of a mesh that has one device of each."""

    def __init__(self, mesh: ReplicaMesh) -> None:
        assert mesh.world is not None
        self._mesh = mesh
        self._world = mesh.world
        self.rank = mesh.position
        self.size = mesh.size

    def all_reduce(self, tensors: Sequence[Any], op: str) -> list[Any]:
        """The sum, minimum, maximum or product of every tensor over the processes.

        Booleans are reduced as NumPy does it: a sum is "any", a product is "all".
        """
        _check_op(op)
        own = [_as_array(tensor) for tensor in tensors]
        self._agree(f"reduce by {op}", [_describe(x) for x in own], must_equal=True)
        return self._reduced(own, op)

    def all_gather(self, tensor: Any) -> list[Any]:
        """Every process' tensor; their first dimensions may differ."""
        own = _as_array(tensor)
        every = self._agree("gather", _describe(own))
        self._check_rows("gather", every)
        if own.ndim == 0:
            return [self._out(x, own) for x in self._stacked(_as_rows(own))]
        sizes = [shape[0] for _, shape in every]
        parts = self._stacked(_padded(own, max(sizes)))
        return [self._put(part[:n]) for part, n in zip(parts, sizes, strict=True)]

    def broadcast(self, tensors: Sequence[Any], root: int) -> list[Any]:
        """The tensors of the process at this position of the mesh."""
        own = [_as_array(tensor) for tensor in tensors]
        self._agree(f"broadcast from {root}", [_describe(x) for x in own], must_equal=True)
        if not 0 <= root < self.size:
            raise StrategyError(
                f"Asked to broadcast from process {root} of {self.size}. Name one of 0 to "
                f"{self.size - 1}."
            )
        words = _packed(own)
        if not words.size:
            return [self._put(x) for x in own]
        # A sum of unsigned words with zeros, and not of floats: no bit changes.
        (received,) = self._run("sum", words if root == self.rank else words * 0)
        return [self._put(x) for x in _unpacked(np.asarray(received), own)]

    def reduce_scatter(self, tensor: Any, op: str) -> Any:
        """This process' rows of a reduction; if it does not divide, the first get one more."""
        _check_op(op)
        own = _with_rows(tensor)
        self._agree(f"reduce_scatter by {op}", _describe(own), must_equal=True)
        each, more = divmod(own.shape[0], self.size)
        if op == "sum" and own.size and not more and own.dtype != bool:
            return self._run("scatter", own)[0]
        (reduced,) = self._reduced([own], op)
        start = self.rank * each + min(self.rank, more)
        return self._put(np.asarray(reduced)[start : start + each + (self.rank < more)])

    def all_to_all(self, tensor: Any, splits: Sequence[int]) -> tuple[Any, list[int]]:
        """Send each process `splits[i]` rows; the rows received, and how many came from each."""
        own = _with_rows(tensor)
        wanted = [int(n) for n in splits]
        every = self._agree("all_to_all", [*_describe(own), wanted])
        self._check_rows("all_to_all", [found[:2] for found in every])
        self._check_splits(every)
        counts = [splits[self.rank] for *_, splits in every]
        most = max(max(splits) for *_, splits in every)
        starts = np.cumsum([0, *wanted])
        values = np.asarray(own)
        parts = [_padded(values[a:b], most) for a, b in itertools.pairwise(starts)]
        together = np.stack(parts)
        if together.size:
            together = np.asarray(self._run("exchange", together)[0])
        rows = np.concatenate([part[:n] for part, n in zip(together, counts, strict=True)])
        return self._put(rows), counts

    def barrier(self) -> None:
        """Wait until every process has called this."""
        self._agree("barrier", None)

    # -- comparing and running -----------------------------------------------------------------

    def _agree(self, what: str, value: Any, *, must_equal: bool = False) -> list[Any]:
        every = self._world.all_gather(what, value, self._mesh.ranks)
        if must_equal and any(found != every[0] for found in every[1:]):
            self._refuse(what, every)
        return every

    def _check_rows(self, what: str, every: list[Any]) -> None:
        first_type, first_shape = every[0]
        for dtype, shape in every[1:]:
            is_same_shape = len(shape) == len(first_shape) and shape[1:] == first_shape[1:]
            if dtype != first_type or not is_same_shape:
                self._refuse(what, every)

    def _check_splits(self, every: list[Any]) -> None:
        for rank, (_, shape, splits) in zip(self._mesh.ranks, every, strict=True):
            rows = shape[0]
            if len(splits) != self.size or min(splits) < 0 or sum(splits) != rows:
                raise StrategyError(
                    f"Asked to send {rows} rows to {self.size} processes by splits={splits} (rank "
                    f"{rank}). Give one number of rows for each process, {rows} together."
                )

    def _refuse(self, what: str, every: list[Any]) -> None:
        found = [f"rank {r}: {x}" for r, x in zip(self._mesh.ranks, every, strict=True)]
        raise DisagreementError(
            f"The processes came to “{what}” with different types or shapes ({'; '.join(found)}). "
            "Give tensors of one type and shape in every process."
        )

    def _reduced(self, own: Sequence[Any], op: str) -> list[Any]:
        rows = [_as_rows(x) for x in own]
        full = [x for x in rows if x.size]
        done = iter(self._run(op, *full) if full else [])
        results = [next(done) if x.size else x for x in rows]
        return [self._out(y, x) for y, x in zip(results, own, strict=True)]

    def _stacked(self, own: Any) -> Any:
        """Arrays of one shape from all processes, stacked along a new first axis."""
        if not own.size:
            return np.broadcast_to(np.asarray(own), (self.size, *own.shape))
        return np.asarray(self._run("gather", own)[0])

    def _run(self, name: str, *arrays: Any) -> list[Any]:
        with peers_watched(), jax.enable_x64(True):
            rows = [self._mesh.put_rows(x) for x in arrays]
            results = _compiled(self._mesh, name)(rows)
            jax.block_until_ready(results)
        # This process' data: the same as in all others, or its own rows.
        return [result.addressable_data(0) for result in results]

    def _out(self, result: Any, like: Any) -> Any:
        if isinstance(result, jax.Array) and (result.dtype, result.shape) == (
            like.dtype,
            like.shape,
        ):
            return result
        values = np.asarray(result).reshape(like.shape)
        if like.dtype == bool:
            values = values.astype(bool)
        return self._put(values)

    def _put(self, values: Any) -> Any:
        with jax.enable_x64(True):
            return jax.device_put(values, self._mesh.own_device)


@functools.cache
def _compiled(mesh: ReplicaMesh, name: str) -> Any:
    function, out = _PROGRAMS[name]
    mapped = jax.shard_map(
        lambda arrays: [function(x) for x in arrays],
        mesh=mesh.mesh,
        in_specs=_OWN,
        out_specs=out,
        check_vma=False,
    )
    return jax.jit(mapped)


# -- arrays ------------------------------------------------------------------------------------


def _as_array(tensor: Any) -> Any:
    if isinstance(tensor, keras.Variable):
        tensor = tensor.value
    if isinstance(tensor, (np.ndarray, np.generic, jax.Array)):
        return np.asarray(tensor) if isinstance(tensor, np.generic) else tensor
    return np.asarray(jax.numpy.asarray(tensor))


def _as_rows(x: Any) -> Any:
    """With rows to shard over a mesh, and without booleans, which devices cannot add."""
    if x.dtype == bool:
        x = np.asarray(x).astype("int32")
    return np.asarray(x).reshape(1) if x.ndim == 0 else x


def _describe(x: Any) -> list[Any]:
    return [str(x.dtype), list(x.shape)]


def _check_op(op: str) -> None:
    if op not in _REDUCTIONS:
        raise StrategyError(f"Asked to reduce by {op!r}. Use one of {', '.join(_REDUCTIONS)}.")


def _padded(x: Any, num_rows: int) -> Any:
    if x.shape[0] == num_rows:
        return x
    padded = np.zeros((num_rows, *x.shape[1:]), x.dtype)
    padded[: x.shape[0]] = np.asarray(x)
    return padded


def _with_rows(tensor: Any) -> Any:
    found = _as_array(tensor)
    if found.ndim == 0:
        raise StrategyError(
            "Asked to split the rows of a tensor over processes; it has none, its shape is (). "
            "Give a tensor with at least one dimension."
        )
    return found


def _packed(arrays: Sequence[Any]) -> Any:
    """The bytes of arrays as words, their number rounded up so that few programs are compiled."""
    num_bytes = sum(x.size * x.dtype.itemsize for x in arrays)
    if not num_bytes:
        return np.zeros(0, "uint32")
    num_words = 1 << max(8, math.ceil(math.log2(math.ceil(num_bytes / 4))))
    if num_words > 1 << 20:
        num_words = -(-num_bytes // (1 << 22)) * (1 << 20)
    packed = np.zeros(num_words * 4, "uint8")
    start = 0
    for x in arrays:
        found = np.ascontiguousarray(np.asarray(x)).reshape(-1).view("uint8")
        packed[start : start + found.size] = found
        start += found.size
    return packed.view("uint32")


def _unpacked(words: Any, like: Sequence[Any]) -> list[Any]:
    found = np.ascontiguousarray(words).view("uint8")
    results, start = [], 0
    for x in like:
        num_bytes = x.size * x.dtype.itemsize
        part = found[start : start + num_bytes].copy()
        results.append(part.view(x.dtype).reshape(x.shape))
        start += num_bytes
    return results
