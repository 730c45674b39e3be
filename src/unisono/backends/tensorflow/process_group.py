"""Sums and gathers over processes by TensorFlow's collective ops, eagerly and in a tf.function.

What travels is always one flat vector, padded to one of few lengths (see tensorflow_keys). Floats
of a GPU go through NCCL; integers, which are small here, and everything on a CPU go through
TensorFlow's own rings between the processes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from unisono.backends.tensorflow.instance_keys import instance_key, padded_length, static_length
from unisono.errors import PeerLostError, StrategyError

_PACK_BYTES = 32 * 2**20
_NARROW = (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16)
_SHORT_BYTES = 64 * 2**10
_SUMMED_BY_ALL = (tf.float32, tf.float64, tf.int32, tf.int64)
_REDUCED = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)


def keys_of(size: int) -> int:
    """How many keys a group of so many processes takes: two, and one for each that broadcasts."""
    return 2 + size


class Group:
    """Some processes of a run, and this one's place among them."""

    def __init__(self, rank: int, size: int, key: int, kind: str) -> None:
        """`key`: the first of `keys_of(size)` numbers that no other group of the run has."""
        self.rank = rank
        self.size = size
        self._key = key
        self._kind = kind

    def all_reduce(
        self, tensors: Sequence[Any], op: str = "Add", *, is_traced_alike: bool = False
    ) -> list[Any]:
        """Over all processes, entry by entry: their sum, or "Min", "Max" or "Mul".

        `is_traced_alike`: what is known here of the tensors' shapes is known in all processes.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        wired = [tf.cast(t, tf.int32) if t.dtype in _NARROW else t for t in tensors]
        results: list[Any] = [None] * len(wired)
        for pack in _packs(wired, _PACK_BYTES if is_traced_alike else None):
            flat = tf.concat([tf.reshape(wired[i], [-1]) for i in pack], 0)
            if op == "Add" and self._is_sooner_gathered(flat, is_traced_alike):
                reduced = tf.reduce_sum(self.all_gather(flat), 0)
            else:
                reduced = self._reduce_flat(flat, op)
            parts = tf.split(reduced, [_num_entries(wired[i]) for i in pack])
            for i, part in zip(pack, parts, strict=True):
                results[i] = tf.cast(tf.reshape(part, tf.shape(wired[i])), tensors[i].dtype)
        return results

    def all_gather(self, tensor: Any) -> Any:
        """All processes' tensors of one shape, along a new first axis."""
        wired = _to_gather(tf.convert_to_tensor(tensor))
        flat = tf.reshape(wired, [-1])
        length = static_length(flat)
        every = tf.reshape(self._gather_flat(flat), [self.size, -1])[:, :length]
        every = tf.reshape(every, tf.concat([[self.size], tf.shape(wired)], 0))
        every.set_shape([self.size, *wired.shape])
        return _from_gather(every, tensor.dtype)

    def gather_rows(self, tensor: Any, sizes: Any) -> Any:
        """All processes' rows, in the order of ranks; `sizes` has every process' number of them."""
        missing = tf.reduce_max(sizes) - tf.shape(tensor)[0]
        rest = [[0, 0]] * (len(tensor.shape) - 1)
        if tensor.dtype == tf.bool:
            return tf.cast(self.gather_rows(tf.cast(tensor, tf.int32), sizes), tf.bool)
        every = self.all_gather(tf.pad(tensor, [[0, missing], *rest]))
        return tf.boolean_mask(every, tf.sequence_mask(sizes, tf.shape(every)[1]))

    def row_counts(self, tensor: Any) -> Any:
        """How many rows every process has."""
        return self.all_gather(tf.shape(tensor)[0])

    def sum_slices(self, slices: Sequence[Any]) -> list[Any]:
        """Sparse sums: what all processes add to rows of larger tensors."""
        if not slices:
            return []
        sizes = self.all_gather(tf.stack([tf.shape(s.indices)[0] for s in slices]))
        return [
            tf.IndexedSlices(
                self.gather_rows(one.values, sizes[:, i]),
                self.gather_rows(one.indices, sizes[:, i]),
                one.dense_shape,
            )
            for i, one in enumerate(slices)
        ]

    def broadcast(self, tensors: Sequence[Any], root: int) -> list[Any]:
        """The tensors of one process, whatever their types, in all."""
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        as_bytes = [_to_bytes(tensor) for tensor in tensors]
        flat = tf.concat([*as_bytes, tf.zeros([0], tf.uint8)], 0)
        length = static_length(flat)
        words = tf.bitcast(tf.reshape(_pad(flat, -(-length // 4) * 4), [-1, 4]), tf.int32)
        words = self._broadcast_flat(words, root)
        flat = tf.reshape(tf.bitcast(words, tf.uint8), [-1])[:length]
        parts = tf.split(flat, [_num_entries(part) for part in as_bytes])
        return [_from_bytes(part, like) for part, like in zip(parts, tensors, strict=True)]

    def exchange(self, chunks: Any) -> Any:
        """Chunk r of every process, along the first axis, in process r."""
        wired = _to_gather(chunks)
        flat = tf.reshape(wired, [self.size, -1])
        length = flat.shape[1] if flat.shape[1] is not None else tf.shape(flat)[1]
        padded = padded_length(length)
        flat = tf.pad(flat, [[0, 0], [0, padded - length]])
        with self._on(wired.dtype) as options:
            received = tf.raw_ops.CollectiveAllToAllV2(
                input=flat, instance_key=instance_key("exchange", wired.dtype, padded), **options
            )
        received = tf.reshape(received[:, :length], tf.shape(wired))
        return _from_gather(received, chunks.dtype)

    def _is_sooner_gathered(self, flat: Any, is_traced_alike: bool) -> bool:
        """Whether every process should add up for itself, with half of a ring's round trips.

        Between two processes as much is sent either way.
        """
        if flat.dtype not in _SUMMED_BY_ALL or self._is_on_gpu(flat.dtype):
            return False
        length = flat.shape[0] if is_traced_alike else None
        is_short = length is not None and length * flat.dtype.size * self.size <= _SHORT_BYTES
        return self.size == 2 or is_short

    # -- flat vectors --------------------------------------------------------------------------

    def _reduce_flat(self, flat: Any, op: str) -> Any:
        if flat.dtype not in _REDUCED:
            raise StrategyError(
                f"Asked to reduce a tensor of {flat.dtype.name} over processes. Cast it to one of "
                f"{', '.join(dtype.name for dtype in (*_REDUCED, *_NARROW))}."
            )
        length = static_length(flat)
        padded = padded_length(length)
        with self._on(flat.dtype) as options:
            reduced = tf.raw_ops.CollectiveReduceV2(
                input=_pad(flat, padded),
                instance_key=instance_key(op, flat.dtype, padded),
                merge_op=op,
                final_op="Id",
                **options,
            )
        return reduced[:length]

    def _gather_flat(self, flat: Any) -> Any:
        padded = padded_length(static_length(flat))
        with self._on(flat.dtype) as options:
            return tf.raw_ops.CollectiveGatherV2(
                input=_pad(flat, padded),
                instance_key=instance_key("gather", flat.dtype, padded),
                **options,
            )

    def _broadcast_flat(self, words: Any, root: int) -> Any:
        padded = padded_length(static_length(words))
        with self._on(words.dtype) as options:
            del options["ordering_token"]
            # TensorFlow remembers who sends under a key, and would deliver what nobody sent.
            options["group_key"] = self._key + 2 + root
            options["instance_key"] = instance_key("broadcast", words.dtype, padded)
            if self.rank == root:
                return tf.raw_ops.CollectiveBcastSendV2(input=_pad(words, padded), **options)
            return tf.raw_ops.CollectiveBcastRecvV2(T=words.dtype, shape=[padded], **options)

    @contextmanager
    def _on(self, dtype: Any) -> Iterator[dict[str, Any]]:
        """The device and the arguments by which the processes' ops find each other."""
        is_on_gpu = self._is_on_gpu(dtype)
        with tf.device("GPU:0" if is_on_gpu else "CPU:0"), naming_lost_peers():
            yield {
                "group_size": self.size,
                "group_key": self._key + is_on_gpu,
                "ordering_token": [],
                "communication_hint": "nccl" if is_on_gpu else "ring",
            }

    def _is_on_gpu(self, dtype: Any) -> bool:
        return self._kind == "gpu" and bool(dtype.is_floating)


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Turn TensorFlow's errors about a process that is gone into ours."""
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError) as error:
        raise PeerLostError(
            "Another process of the run does not answer any more: TensorFlow's collectives have "
            "stopped. Look at the first process that failed."
        ) from error


def _packs(tensors: Sequence[Any], most_bytes: int | None) -> list[list[int]]:
    """Positions of tensors that travel together: of one type, and not too large."""
    packs: list[list[int]] = []
    sizes: dict[int, int] = {}
    open_packs: dict[Any, int] = {}
    for i, tensor in enumerate(tensors):
        num_bytes = (tensor.shape.num_elements() or 0) * tensor.dtype.size
        pack = open_packs.get(tensor.dtype)
        is_full = (
            most_bytes is not None and pack is not None and sizes[pack] + num_bytes > most_bytes
        )
        if pack is None or is_full:
            pack = open_packs[tensor.dtype] = len(packs)
            packs.append([])
            sizes[pack] = 0
        packs[pack].append(i)
        sizes[pack] += num_bytes
    return packs


def _num_entries(tensor: Any) -> Any:
    known = tensor.shape.num_elements()
    return tf.size(tensor) if known is None else known


def _pad(flat: Any, length: Any) -> Any:
    missing = length - static_length(flat)
    return flat if isinstance(missing, int) and missing == 0 else tf.pad(flat, [[0, missing]])


def _to_gather(tensor: Any) -> Any:
    """A tensor as a type that can be gathered, with nothing lost."""
    if tensor.dtype == tf.bfloat16:
        return tf.bitcast(tensor, tf.float16)
    return tf.cast(tensor, tf.int32) if tensor.dtype in _NARROW else tensor


def _from_gather(tensor: Any, dtype: Any) -> Any:
    return tf.bitcast(tensor, dtype) if dtype == tf.bfloat16 else tf.cast(tensor, dtype)


def _to_bytes(tensor: Any) -> Any:
    tensor = tf.cast(tensor, tf.uint8) if tensor.dtype == tf.bool else tensor
    return tf.reshape(tf.bitcast(tensor, tf.uint8), [-1])


def _from_bytes(flat: Any, like: Any) -> Any:
    if like.dtype == tf.bool:
        return tf.cast(tf.reshape(flat, tf.shape(like)), tf.bool)
    if like.dtype.size > 1:
        flat = tf.reshape(flat, [-1, like.dtype.size])
    return tf.reshape(tf.bitcast(flat, like.dtype), tf.shape(like))
