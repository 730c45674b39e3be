"""What `keras.random` functions without a seed draw from in a step: a stream for each replica.

Outside of steps they draw from Keras' global seed generator, which is not replicated itself: plain
models, models on other devices and the program go on using it. Steps draw from a copy of it, whose
state has a value for each replica.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from keras.src.backend.common.global_state import get_global_attribute, set_global_attribute
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, SeedGenerator

from unisono.backends.tensorflow.variables import mirrored, spread_seed
from unisono.replication.step import SEED_STRIDE

_COPIES = "unisono_copies"


class StepSeeds:
    """In the place of the global seed generator while a step runs; made where that is run.

    `strategy` has the replicas of this process; without one it is the replica `rank` of a run.
    """

    def __init__(self, strategy: tf.distribute.Strategy | None = None, rank: int = 0) -> None:
        self._strategy = strategy
        self._rank = rank
        self._generator = get_global_attribute(GLOBAL_SEED_GENERATOR)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Have functions without a seed draw from here, in this thread."""
        set_global_attribute(GLOBAL_SEED_GENERATOR, self)
        try:
            yield
        finally:
            self.finish()

    def finish(self) -> None:
        """Give this thread the global seed generator back, which the step may have been first in
        need of."""
        set_global_attribute(GLOBAL_SEED_GENERATOR, self._generator)

    def next(self, ordered: bool = True) -> Any:
        """See SeedGenerator."""
        copies = {} if self._generator is None else vars(self._generator).get(_COPIES, {})
        if self._strategy not in copies:
            # In a thread that is neither tracing a graph nor one of the replicas'.
            with ThreadPoolExecutor(1) as outside:
                copies = outside.submit(self._copies).result()
        return copies[self._strategy].next(ordered)

    def _copies(self) -> dict[Any, Any]:
        """The copies of the global seed generator by strategy, ours among them."""
        if self._generator is None:
            self._generator = SeedGenerator()  # As Keras does, when one is first needed.
        copies: dict[Any, Any] = vars(self._generator).setdefault(_COPIES, {})
        copies[self._strategy] = self._new_copy()
        return copies

    def _new_copy(self) -> Any:
        first, second = (int(word) for word in self._generator.state.numpy())
        copy = SeedGenerator(0)
        # One step further for all, so that no replica draws what the program draws.
        copy.state.assign([(first + (self._rank + 1) * SEED_STRIDE) % 2**31, second])
        if self._strategy is not None:
            copy.state._value = mirrored(copy.state, self._strategy)
            spread_seed(copy.state)
        return copy
