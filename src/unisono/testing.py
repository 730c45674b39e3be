"""For test suites: a model trains on replicas as it trains on one device."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from unisono.devices import FORCED_REPLICAS, OVERSUBSCRIBE
from unisono.parallel import FORCED_SYNC, is_parallel, parallel, release

if TYPE_CHECKING:
    import keras

    from unisono.verify.records import ProgramRecord
    from unisono.verify.run import ChildRun, Variant


def assert_same_as_one_device(
    build: Callable[[], "keras.Model"],
    data: Any,
    replicas: int = 2,
    *,
    steps: int = 10,
    batch_size: int | None = None,
    seed: int = 1234,
    exact: bool = False,
) -> None:
    """Assert that a model gives on replicas what it gives on one device.

    Trains the model that `build` makes on one device twice and on replicas, from the same seed, and
    compares weights, optimizer state, losses, metrics, `evaluate` and `predict`, with the limits of
    `unisono verify`. All of it happens in this process.

    Args:
        build: Makes a compiled model; it is called for each training.
        data: What `fit` takes: arrays `(x, y)` or `(x, y, sample_weight)`, a dictionary of
            arguments of `fit`, or a data set.
        replicas: How many replicas are compared with one device.
        steps: How many optimizer steps are compared.
        batch_size: The global batch size, if `data` is arrays.
        seed: The seed of all generators, set before `build`.
        exact: Whether generators without a seed get one. Replicas of TensorFlow and torch draw
            random numbers of their own in layers such as dropout; `unisono verify --exact`, which
            starts processes of its own, compares such nets on torch.

    Raises:
        AssertionError: They differ; the message has the table, the first difference and its cause.

    Example:
        >>> import keras, numpy as np
        >>> def build():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     return model
        >>> assert_same_as_one_device(build, (np.ones((8, 4)), np.ones((8, 1))), batch_size=4)
    """
    from unisono.verify.report import as_text
    from unisono.verify.session import Options, VerifySession

    options = Options(num_replicas=replicas, num_steps=steps, seed=seed, is_exact=exact)
    training = _Training(build, _arguments(data, batch_size), steps, seed)
    with contextlib.redirect_stdout(None):
        result = VerifySession(["build()"], options, training.run, lambda text: None).result()
    if result.code:
        raise AssertionError(as_text(result))


class _Training:
    """Trains the model once for each run that is asked for."""

    def __init__(
        self, build: Callable[[], Any], arguments: dict[str, Any], steps: int, seed: int
    ) -> None:
        self._build = build
        self._arguments = arguments
        self._steps = steps
        self._seed = seed
        self._first: ProgramRecord | None = None

    def run(self, variant: "Variant") -> "ChildRun":
        from unisono.verify.records import EXACT
        from unisono.verify.run import ChildRun

        env = {FORCED_REPLICAS: str(variant.num_replicas), OVERSUBSCRIBE: "1"}
        env |= {FORCED_SYNC: "1"} if variant.forces_sync else {}
        env |= {EXACT: "1"} if variant.is_exact else {}
        with _environment(env):
            record = self._recorded(variant)
        self._first = self._first or record
        for model, first in zip(record.models, self._first.models, strict=False):
            # Keras numbers names as models are built: dense, dense_1 in the next model.
            if len(model.variables) == len(first.variables):
                model.variables = first.variables
            if len(model.optimizer_variables) == len(first.optimizer_variables):
                model.optimizer_variables = first.optimizer_variables
        return ChildRun(variant, records=[record])

    def _recorded(self, variant: "Variant") -> "ProgramRecord":
        from unisono import fit
        from unisono.replication.random_state import set_seed
        from unisono.verify.record import FitObserver, ProgramRecorder
        from unisono.verify.records import RecordSettings

        set_seed(self._seed)
        model = self._build()
        if not is_parallel(model):
            parallel(model)
        settings = RecordSettings("", self._steps, self._seed, variant.is_exact, variant.perturbs)
        recorder = ProgramRecorder(settings)
        maker = lambda: FitObserver(recorder)  # noqa: E731
        fit.every_fit.append(maker)
        try:
            recorder.record_training(model, self._arguments)
        finally:
            fit.every_fit.remove(maker)
            release(model)
        return recorder.record


def _arguments(data: Any, batch_size: int | None) -> dict[str, Any]:
    if isinstance(data, Mapping):
        found = dict(data)
    elif isinstance(data, tuple):
        found = dict(zip(("x", "y", "sample_weight"), data, strict=False))
    else:
        found = {"x": data}
    if batch_size is not None:
        found["batch_size"] = batch_size
    return found


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
