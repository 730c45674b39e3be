"""Random generators beside Keras' own: where a program makes or seeds them, and with what.

A generator without a seed is found where it asks the operating system for entropy. With `--exact`
it gets a seed there instead, the same in every run and process. Only calls that the program itself
makes count: libraries draw names of temporary files in the same way.
"""

import functools
import importlib
import os
import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from unisono.imports import after_import
from unisono.verify.records import RandomUse, Site
from unisono.verify.sites import is_of_user, site_at, user_site

_DRAWS = (
    *("normal", "uniform", "truncated_normal", "randint", "categorical", "shuffle", "gamma"),
    *("binomial", "beta", "dropout"),
)
_INITIALIZERS = os.path.join("keras", "src", "initializers")
Note = Callable[[RandomUse], None]


class RandomSources:
    """Hooks on the functions that make and seed generators, for as long as the process lives."""

    def __init__(self, note: Note, seed: int, *, is_exact: bool) -> None:
        self._note = note
        self._seed = seed
        self._is_exact = is_exact
        self._num_given = 0
        self._is_seeding = False

    def install(self) -> None:
        """Hook what is imported, and frameworks once they are."""
        bits: Any = importlib.import_module("numpy.random.bit_generator")
        bits.randbits = self._entropy_of_numpy(bits.randbits)
        random.Random.seed = self._seed_of_python(random.Random.seed)  # type: ignore[method-assign]
        for owner, name in ((random, "seed"), (np.random, "seed"), (np.random, "default_rng")):
            self._watch_seeding(owner, name)
        np.random.RandomState = self._watched_random_state()  # type: ignore[misc]
        after_import("tensorflow", self._install_tensorflow)
        after_import("torch", self._install_torch)
        after_import("keras", lambda keras: self._watch_seeding(keras.utils, "set_random_seed"))

    def _install_tensorflow(self, tensorflow: Any) -> None:
        self._watch_seeding(tensorflow.random, "set_seed")
        kind = tensorflow.data.Dataset
        plain = kind.shuffle

        @functools.wraps(plain)
        def shuffle(
            dataset: Any, buffer_size: Any, seed: Any = None, *rest: Any, **more: Any
        ) -> Any:
            site = _caller()
            if site is not None:
                self._note(RandomUse("shuffle", site, None if seed is None else str(seed)))
            if seed is None and self._is_exact:
                seed = self._next_seed() % 2**31
            return plain(dataset, buffer_size, seed, *rest, **more)

        kind.shuffle = shuffle

    def _install_torch(self, torch: Any) -> None:
        self._watch_seeding(torch, "manual_seed")
        kind = importlib.import_module("torch.utils.data").DataLoader
        plain = kind.__init__

        @functools.wraps(plain)
        def init(
            loader: Any,
            dataset: Any,
            batch_size: Any = 1,
            shuffle: Any = None,
            *rest: Any,
            **more: Any,
        ) -> None:
            if shuffle and more.get("generator") is None and (site := _caller()) is not None:
                self._note(RandomUse("shuffle", site))
            plain(loader, dataset, batch_size, shuffle, *rest, **more)

        kind.__init__ = init

    def _entropy_of_numpy(self, plain: Callable[[int], int]) -> Callable[[int], int]:
        def randbits(count: int) -> int:
            site = _caller()
            if site is None or self._is_seeding:
                return plain(count)
            self._note(RandomUse("numpy", site))
            return self._next_seed() % 2**count if self._is_exact else plain(count)

        return randbits

    def _watched_random_state(self) -> Any:
        """NumPy's old generator, which asks for entropy also where it is given a seed."""
        sources, plain = self, np.random.RandomState
        base: Any = plain

        class AnyRandomState(type):
            def __instancecheck__(cls, found: Any) -> bool:
                return isinstance(found, plain)

        class RandomState(base, metaclass=AnyRandomState):
            def __init__(self, seed: Any = None) -> None:
                if seed is not None and (site := _caller()) is not None:
                    what = "numpy.random.RandomState"
                    sources._note(RandomUse(what, site, repr(seed)[:80]))
                sources._is_seeding = seed is not None
                try:
                    super().__init__(seed)
                finally:
                    sources._is_seeding = False

        return RandomState

    def _seed_of_python(self, plain: Callable[..., None]) -> Callable[..., None]:
        def seed(generator: Any, a: Any = None, version: int = 2) -> None:
            site = _caller(random.__file__) if a is None else None
            if site is not None:
                self._note(RandomUse("python", site))
                a = self._next_seed() if self._is_exact else None
            plain(generator, a, version)

        return seed

    def _watch_seeding(self, owner: Any, name: str) -> None:
        plain = getattr(owner, name)
        what = f"{owner.__name__}.{name}"

        @functools.wraps(plain)
        def function(*args: Any, **kwargs: Any) -> Any:
            given = [*args, *kwargs.values()]
            site = _caller()
            if site is not None and given and given[0] is not None:
                self._note(RandomUse(what, site, repr(given[0])[:80]))
            return plain(*args, **kwargs)

        setattr(owner, name, function)

    def install_draws(self, is_training: Callable[[], bool], note: Note) -> None:
        """Note functions that draw while a model is trained; Keras is imported."""
        from unisono.keras_internals import random_module
        from unisono.replication.framework import framework

        of_keras = [(random_module(), name) for name in _DRAWS]
        of_framework = [*framework().drawing_functions(), *framework().dropout_functions()]
        for owner, name in of_keras:
            _note_calls(owner, name, f"keras.random.{name}", is_training, note, _site_of_draw)
        for owner, name in of_framework:
            what = f"{owner.__name__.removeprefix('tensorflow._api.v2.')}.{name}"
            _note_calls(owner, name, what, is_training, note, _caller)

    def _next_seed(self) -> int:
        self._num_given += 1
        # Not a stream of `random`, whose state a program may depend on.
        return int(np.random.SeedSequence([self._seed, self._num_given]).generate_state(1)[0])


def random_states() -> dict[str, int]:
    """Checksums of the states of the generators that belong to no framework."""
    numbers: Any = np.random.get_state()
    return {
        "random": hash(random.getstate()),
        "numpy.random": hash((numbers[1].tobytes(), numbers[2])),
    }


def _note_calls(
    owner: Any,
    name: str,
    what: str,
    is_training: Callable[[], bool],
    note: Note,
    find_site: Callable[[], Site | None],
) -> None:
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def function(*args: Any, **kwargs: Any) -> Any:
        if is_training() and (site := find_site()) is not None:
            note(RandomUse(what, site))
        return plain(*args, **kwargs)

    setattr(owner, name, function)


def _site_of_draw() -> Site | None:
    """The line of the program that led to a draw; None for that of initial weights."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _INITIALIZERS in frame.f_code.co_filename:
            return None
        frame = frame.f_back
    return user_site()


def _caller(*skipped: str) -> Site | None:
    """The line of the program that has called a hooked function itself."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, *skipped):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return site_at(file, frame.f_lineno) if is_of_user(file) else None
