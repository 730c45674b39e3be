"""Arrays on TensorFlow: each process reads its shard of any kind of array."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from twins import BACKEND

if BACKEND != "tensorflow":
    pytest.skip("TensorFlow's input", allow_module_level=True)

import tensorflow as tf
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from unisono.backends.tensorflow.feed import ArrayShards
from unisono.data.arrays import ShardedArrays
from unisono.data.feed import Feed

DENSE = np.arange(33, dtype="float32").reshape(11, 3)
EMPTY = DENSE[:0]
ROWS = [[0.0] * (row % 3) for row in range(11)]
KINDS = {
    "numpy": DENSE,
    "whole numbers": DENSE.astype("int64"),
    "double": DENSE.astype("float64"),
    "words": np.array([f"word {row}" for row in range(11)], dtype=object),
    "tensor": tf.constant(DENSE),
    "ragged": tf.ragged.constant(ROWS),
    "sparse": tf.sparse.from_dense(DENSE * (DENSE % 2)),
}


def adapter_of(x, **options):
    y = EMPTY if x is EMPTY else DENSE
    return ArrayDataAdapter(x, y, batch_size=4, **options)


def shares_of(rank, x, **options):
    """What one of two processes reads of arrays that are given to all."""
    feed = Feed(SimpleNamespace(size=2, rank=rank, seed=7), needs_even_shards=False)
    return ArrayShards(ShardedArrays(adapter_of(x, **options), feed))


def dense(leaf):
    if isinstance(leaf, tf.SparseTensor):
        leaf = tf.sparse.to_dense(leaf)
    return leaf.to_list() if isinstance(leaf, tf.RaggedTensor) else np.asarray(leaf).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_shares_join_to_the_rows_of_the_whole(kind, shuffle):
    keras.utils.set_random_seed(3)
    plain = adapter_of(KINDS[kind], shuffle=shuffle).get_tf_dataset()
    whole = [dense(batch[0]) for batch in plain]
    joined = []
    keras.utils.set_random_seed(3)
    first = shares_of(0, KINDS[kind], shuffle=shuffle)
    keras.utils.set_random_seed(3)
    second = shares_of(1, KINDS[kind], shuffle=shuffle)
    for one, other in zip(first, second, strict=True):
        assert (one.num_rows, one.checksum) == (other.num_rows, other.checksum)
        joined.append(dense(one.data[0]) + dense(other.data[0]))
    assert joined == whole


@pytest.mark.parametrize("kind", KINDS)
def test_the_specification_fits_every_share(kind):
    shares = shares_of(0, {"a": KINDS[kind]})
    (x, y) = shares.element_spec.data
    for share in shares:
        assert x["a"].is_compatible_with(share.data[0]["a"])
        assert y.is_compatible_with(share.data[1])


def test_no_rows_have_a_specification_too():
    spec = shares_of(0, EMPTY).element_spec
    assert spec.data[0].shape.as_list() == [None, 3]


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_without_a_seed_epochs_differ_and_processes_do_not(shuffle):
    tf.random.set_seed(7)  # As a run does for its processes: not the program's own choice.
    read = shares_of(0, DENSE, shuffle=shuffle)
    epochs = [[dense(share.data[0]) for share in read] for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    for epoch in epochs:
        rows = [int(row[0]) // 3 for batch in epoch for row in batch]
        assert len(set(rows)) == len(rows)
        if shuffle == "batch":
            assert all(row // 4 == i for i, batch in enumerate(epoch) for row in rows_of(batch))


def rows_of(batch):
    return [int(row[0]) // 3 for row in batch]


def test_an_epoch_may_be_left_in_its_middle():
    shares = shares_of(1, DENSE)
    epoch = iter(shares)
    next(epoch)
    epoch.close()
    assert [share.num_rows for share in shares] == [4, 4, 3]
