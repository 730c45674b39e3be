"""Randomness: JAX draws the masks of one device; elsewhere each replica draws its own, which is
tested by behaviour in the test suite and not by comparison.
"""

from typing import Any

import keras
from keras import layers, ops

from exactness.case import Adopt, Group, Results, to_numpy
from exactness.exercise import NUM_FEATURES, NUM_STEPS, NUM_TOKENS, stacked, tokens, train

DROPOUT = Group("Dropout and noise")
NO_GLOBAL_SEED = {"jax": "Keras has no global seed in compiled steps there"}
OWN_MASKS = dict.fromkeys(("tensorflow", "torch"), "replicas draw masks of their own there")


@DROPOUT.case("dropout and Gaussian noise, the masks of one device", unpromised=OWN_MASKS)
def dropout(adopt: Adopt) -> Results:
    model = stacked(
        layers.GaussianNoise(0.1),
        layers.Dense(8, "tanh"),
        layers.Dropout(0.4),
        layers.Dense(2),
        shape=(NUM_FEATURES,),
    )
    results = train(adopt(model))
    seeds = [to_numpy(v) for v in model.non_trainable_variables if "seed" in v.path]
    return {"seeds": seeds, **results}


@DROPOUT.case("recurrent and spatial dropout", unpromised=OWN_MASKS)
def recurrent_dropout(adopt: Adopt) -> Results:
    model = stacked(
        layers.Embedding(NUM_TOKENS, 3, mask_zero=True),
        layers.SpatialDropout1D(0.3),
        layers.SimpleRNN(3, dropout=0.2, recurrent_dropout=0.2),
        layers.Dense(2),
        shape=(NUM_STEPS,),
        dtype="int32",
    )
    return train(adopt(model), tokens())


@DROPOUT.case("dropout of rate 0")
def no_dropout(adopt: Adopt) -> Results:
    model = stacked(layers.Dropout(0.0), layers.Dense(2), shape=(NUM_FEATURES,))
    return train(adopt(model))


class Unseeded(layers.Layer):
    """Draws without a seed, and adds nothing of it."""

    def call(self, inputs: Any) -> Any:
        return inputs + 0.0 * keras.random.normal(ops.shape(inputs))


@DROPOUT.case("`keras.random` without a seed, times 0", lacks=NO_GLOBAL_SEED)
def unseeded(adopt: Adopt) -> Results:
    return train(adopt(stacked(Unseeded(), layers.Dense(2), shape=(NUM_FEATURES,))))
