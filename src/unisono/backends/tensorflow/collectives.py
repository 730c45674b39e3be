"""Collectives over processes by TensorFlow's collective ops, eagerly and in a tf.function.

What is sent is always one flat vector, padded to one of few lengths (see `instance_key`). Floats of
a GPU go through NCCL; integers, which are small here, and everything on a CPU go through
TensorFlow's own rings between the processes. Keras must not be imported here: processes join a run
while Keras itself is being imported.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from unisono.errors import PeerLostError, StrategyError

_PACK_BYTES = 32 * 2**20
# On GPUs a pack is reduced while the gradients of the next are computed, so there are several.
_NUM_GPU_PACKS = 24
_SMALLEST_GPU_PACK_BYTES = 2**20
_NARROW = (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16)
_SHORT_BYTES = 64 * 2**10
_SUMMED_BY_ALL = (tf.float32, tf.float64, tf.int32, tf.int64)
_REDUCED = (tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64)

_KINDS = ("Add", "Min", "Max", "Mul", "gather", "broadcast", "exchange")
_DTYPES = (tf.float32, tf.int32, tf.int64, tf.float16, tf.bfloat16, tf.float64)

# A padded length keeps six bits after its first one, so that padding adds at most 1/64.
_FINE = 64
_LENGTHS = 32 * _FINE
_SLOTS = len(_KINDS) * len(_DTYPES) * _LENGTHS
_PLACES = (2**31 - 1) // _SLOTS
_POWERS = [_FINE * 2**i for i in range(1, 25)]

_num_places: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_CAPTURE = "unisono_first_place"

_as_written = tf.autograph.experimental.do_not_convert
_OPS = {"sum": "Add", "min": "Min", "max": "Max", "product": "Mul"}


class TensorFlowCollectives:
    """See base.Collectives.

    TensorFlow has no reduce-scatter on a CPU: there, and on a GPU for the same result, each process
    keeps its rows of an all-reduce.
    """

    def __init__(self, group: "Group") -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size

    @_as_written
    def all_reduce(self, tensors: Sequence[Any], op: str) -> list[Any]:
        return self._group.all_reduce(tensors, _named(op))

    @_as_written
    def all_gather(self, tensor: Any) -> list[Any]:
        tensor = tf.convert_to_tensor(tensor)
        if not tensor.shape.rank:
            return list(tf.unstack(self._group.all_gather(tensor)))
        sizes = self._group.row_counts(tensor)
        rows = self._group.gather_rows(tensor, sizes)
        return list(tf.split(rows, sizes, num=self.size))

    @_as_written
    def broadcast(self, tensors: Sequence[Any], root: int) -> list[Any]:
        return self._group.broadcast(tensors, root)

    @_as_written
    def reduce_scatter(self, tensor: Any, op: str) -> Any:
        (reduced,) = self.all_reduce([tensor], op)
        fewest, rest = tf.shape(reduced)[0] // self.size, tf.shape(reduced)[0] % self.size
        start = self.rank * fewest + tf.minimum(self.rank, rest)
        return reduced[start : start + fewest + tf.cast(self.rank < rest, tf.int32)]

    @_as_written
    def all_to_all(self, tensor: Any, splits: Sequence[int]) -> tuple[Any, list[int]]:
        tensor = tf.convert_to_tensor(tensor)
        every = self._group.all_gather(tf.convert_to_tensor(splits, tf.int32))
        shape = tf.concat([[self.size, tf.reduce_max(every)], tf.shape(tensor)[1:]], 0)
        chunks = tf.RaggedTensor.from_row_lengths(tensor, every[self.rank]).to_tensor(shape=shape)
        counts = every[:, self.rank]
        received = self._group.exchange(chunks)
        rows = tf.boolean_mask(received, tf.sequence_mask(counts, tf.shape(received)[1]))
        return rows, counts if tf.is_symbolic_tensor(counts) else counts.numpy().tolist()

    @_as_written
    def barrier(self) -> None:
        self._group.all_reduce([tf.zeros([])])


def _named(op: str) -> str:
    if op not in _OPS:
        raise StrategyError(f"Asked to reduce by {op!r}. Use one of {', '.join(_OPS)}.")
    return _OPS[op]


def keys_of(size: int) -> int:
    """How many group keys a group uses: two, and one for each process that broadcasts."""
    return 2 + size


class Group:
    """Some processes of a run, and the rank of this one among them."""

    def __init__(self, rank: int, size: int, key: int, kind: str) -> None:
        """`key`: the first of `keys_of(size)` numbers that no other group of the run uses."""
        self.rank = rank
        self.size = size
        self._key = key
        self._kind = kind

    def all_reduce(
        self, tensors: Sequence[Any], op: str = "Add", *, is_traced_alike: bool = False
    ) -> list[Any]:
        """The elementwise sum over all processes, or "Min", "Max" or "Mul".

        `is_traced_alike`: all processes know the same static shapes of these tensors.
        """
        tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        wired = [tf.cast(t, tf.int32) if t.dtype in _NARROW else t for t in tensors]
        results: list[Any] = [None] * len(wired)
        for pack in _packs(wired, self._pack_bytes(wired) if is_traced_alike else None):
            flat = tf.concat([tf.reshape(wired[i], [-1]) for i in pack], 0)
            if op == "Add" and self._is_faster_gathered(flat, is_traced_alike):
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
        """The rows of all processes in the order of ranks; `sizes` has their numbers of rows."""
        missing = tf.reduce_max(sizes) - tf.shape(tensor)[0]
        rest = [[0, 0]] * (len(tensor.shape) - 1)
        if tensor.dtype == tf.bool:
            return tf.cast(self.gather_rows(tf.cast(tensor, tf.int32), sizes), tf.bool)
        every = self.all_gather(tf.pad(tensor, [[0, missing], *rest]))
        return tf.boolean_mask(every, tf.sequence_mask(sizes, tf.shape(every)[1]))

    def row_counts(self, tensor: Any) -> Any:
        """The number of rows of every process."""
        return self.all_gather(tf.shape(tensor)[0])

    def sum_slices(self, slices: Sequence[Any]) -> list[Any]:
        """All-reduce IndexedSlices, by gathering their rows."""
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
        """The tensors of the process `root`, of any types."""
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

    def _pack_bytes(self, tensors: Sequence[Any]) -> int:
        """How much is sent at once."""
        if self._kind != "gpu":
            return _PACK_BYTES
        total: int = sum((t.shape.num_elements() or 0) * t.dtype.size for t in tensors)
        return min(max(total // _NUM_GPU_PACKS, _SMALLEST_GPU_PACK_BYTES), _PACK_BYTES)

    def _is_faster_gathered(self, flat: Any, is_traced_alike: bool) -> bool:
        """Whether to all-gather and sum locally, which takes half of a ring's round trips.

        Between two processes both ways send the same number of bytes.
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
            # TensorFlow remembers the sender of a key, so each sender has a group key of its own.
            options["group_key"] = self._key + 2 + root
            options["instance_key"] = instance_key("broadcast", words.dtype, padded)
            if self.rank == root:
                return tf.raw_ops.CollectiveBcastSendV2(input=_pad(words, padded), **options)
            return tf.raw_ops.CollectiveBcastRecvV2(T=words.dtype, shape=[padded], **options)

    @contextmanager
    def _on(self, dtype: Any) -> Iterator[dict[str, Any]]:
        """Enter the device of a collective; its arguments that match the processes' ops."""
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
    """Raise PeerLostError for TensorFlow's errors about a process that is gone."""
    try:
        yield
    except (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError) as error:
        raise PeerLostError(
            "Another process of the run does not answer any more: TensorFlow's collectives have "
            "stopped. Look at the first process that failed."
        ) from error


def _packs(tensors: Sequence[Any], most_bytes: int | None) -> list[list[int]]:
    """Positions of tensors that are sent as one vector: of one type, and not too large."""
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
    """A tensor as a type that can be gathered without loss."""
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


# -- instance keys --------------------------------------------------------------------------------
# An instance key says which of the processes' collective ops belong together. TensorFlow keeps a
# record of every key and fixes one length and type for each, so keys are reused from call to call.
# A key is made of what the op is: its position among the collectives of a call, its kind and type,
# and its padded length. None of these depends on how often a process has traced a function, which
# may differ between processes.


def instance_key(kind: str, dtype: Any, length: Any) -> Any:
    """The key of the next collective of this call; `length` comes from `padded_length`."""
    steps = _steps(length)
    bucket = steps * _FINE + length // 2**steps
    slot = _KINDS.index(kind) * len(_DTYPES) + _DTYPES.index(dtype)
    return _take_places(1) * _SLOTS + slot * _LENGTHS + bucket


def padded_length(length: Any) -> Any:
    """The length to which a vector is padded: an integer, or a scalar of a graph."""
    step = 2 ** _steps(length)
    padded = -(-length // step) * step
    # At least one: TensorFlow crashes where no process sends anything.
    return max(padded, 1) if isinstance(padded, int) else tf.maximum(padded, 1)


def static_length(vector: Any) -> Any:
    """The length of a vector, as an integer where it is known."""
    known = vector.shape[0]
    return tf.shape(vector)[0] if known is None else known


def _steps(length: Any) -> Any:
    """How often a length is halved until it fits into the bits that keys distinguish."""
    if isinstance(length, int):
        return sum(length > power for power in _POWERS)
    return tf.reduce_sum(tf.cast(length > tf.constant(_POWERS), tf.int32))


def _take_places(count: int) -> Any:
    """Reserve positions among the collectives of the current call; returns the first one."""
    if tf.executing_eagerly():
        return 0
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "is_control_flow_graph", False):
        graph = graph.outer_graph
    first = _num_places.get(graph, 0)
    _num_places[graph] = first + count
    if first + count > _PLACES:
        raise StrategyError(
            f"Asked for more than {_PLACES} collectives in one tf.function. Call it more often, "
            "for fewer steps each."
        )
    # Functions that call this one have collectives of their own before it.
    own = weakref.ref(graph)
    with graph.as_default():
        before = graph.capture_call_time_value(
            lambda: tf.convert_to_tensor(_take_places(_num_places[own()])),
            tf.TensorSpec([], tf.int32),
            key=_CAPTURE,
        )
        return before + first
