"""Records a program as it trains: each optimizer step, each call, and the values at the end.

Keras has no events for calls on a model, so in this process, which exists for the recording alone,
methods of Keras' classes are wrapped when Keras is imported. A program that does not use unisono
gets `parallel` applied to each model at its first call. After enough steps training ends: `fit` is
told to stop, a distributed data set has no more batches, and any other loop is left by an
exception that is no error of the program.
"""

import contextlib
import functools
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import unisono
from unisono.imports import after_import
from unisono.topology import topology
from unisono.verify.loops import LoopRecorder, watch_native_steps
from unisono.verify.random_sources import RandomSources, random_states
from unisono.verify.records import (
    ModelFacts,
    ProgramRecord,
    RandomUse,
    RecordedCall,
    RecordSettings,
    Site,
    Step,
    sample,
    write_record,
)
from unisono.verify.sites import names_unisono, site_of_traceback, user_files, user_site

_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_MOST_IN_STEP = 256
_MOST_AT_END = 1 << 22
_MOST_PREDICTED = 1 << 20
_PERTURBATION = {"float32": 2.0**-22, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_PACKAGE = str(Path(unisono.__file__).parent)


class EnoughSteps(BaseException):
    """Leaves a training loop that has made all steps that are compared."""


class ProgramRecorder:
    """What one process records; see `recording`."""

    def __init__(self, settings: RecordSettings) -> None:
        self.settings = settings
        facts = topology()
        self.record = ProgramRecord(rank=facts.rank, world_size=facts.world_size)
        self._models: list[Any] = []
        self._sites: dict[int, Site | None] = {}
        self._named: bool | None = None
        self._num_done = 0
        self._is_inside = False
        """Whether a call on a model is under way; replicas may be threads of it."""
        self._call = ""
        self._callbacks: list[Any] = []
        self._loop_models: list[Any] = []
        self._batches: list[tuple[int | None, int]] = []
        self._loop_optimizers: list[Any] = []
        self._last: tuple[Any, Any] | None = None
        """The model and the data of the last training, for calls of our own."""

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the program that runs inside."""
        self._install()
        try:
            yield
        except EnoughSteps:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                self._note_error(end)
                self._finish(has_failed=True)
                raise
        except BaseException as error:
            self._note_error(error)
            self._finish(has_failed=True)
            raise
        self._finish(has_failed=False)

    # -- hooks ---------------------------------------------------------------------------------

    def _install(self) -> None:
        settings = self.settings
        self._random = RandomSources(self._note_random, settings.seed, is_exact=settings.is_exact)
        self._random.install()
        warnings.warn = self._noting_warnings(warnings.warn)
        after_import("keras", self._install_keras)

    def _install_keras(self, keras: Any) -> None:
        from unisono import fit, strategy
        from unisono.replication.random_state import set_seed

        self.record.backend = str(keras.backend.backend())
        set_seed(self.settings.seed)
        fit.every_fit.append(lambda: FitObserver(self))
        self._random.install_draws(self._is_training, self._note_draw)
        self._loop = LoopRecorder(self)
        strategy.loop_observers.append(self._loop)
        watch_native_steps(self)
        for name in _CALLS:
            setattr(keras.Model, name, self._recording(name, getattr(keras.Model, name)))
        keras.layers.Layer.__new__ = self._noting_new(keras.layers.Layer.__new__)
        kind = keras.optimizers.Optimizer
        kind.__init__ = self._noting_init(kind.__init__)
        keras.Model.compile = self._noting_compile(keras.Model.compile)

    def _recording(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def method(model: Any, *args: Any, **kwargs: Any) -> Any:
            from unisono.replication.callback_ranks import is_alone

            if self._is_inside or is_alone():
                return plain(model, *args, **kwargs)
            if self._must_adopt(model):
                self.record.adopted.append(user_site())
                unisono.parallel(model)
                return getattr(model, name)(*args, **kwargs)
            bound = inspect.signature(plain).bind(model, *args, **kwargs)
            return self._recorded_call(
                name, model, bound.arguments, lambda: plain(*bound.args, **bound.kwargs)
            )

        return method

    def _must_adopt(self, model: Any) -> bool:
        from unisono.parallel import is_parallel

        if self._named is None:
            self._named = self.record.uses_unisono = names_unisono()
        return not self._named and not is_parallel(model)

    def _noting_new(self, plain: Callable[..., Any]) -> Any:
        """Note where layers are made. Not in `__init__`, whose signature Keras looks at."""

        @functools.wraps(plain)
        def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
            made = plain(cls, *args, **kwargs)
            self._sites[id(made)] = user_site()
            return made

        return staticmethod(__new__)

    def _noting_init(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def __init__(self_: Any, *args: Any, **kwargs: Any) -> None:
            self._sites[id(self_)] = user_site()
            plain(self_, *args, **kwargs)

        return __init__

    def _noting_compile(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def compile(model: Any, *args: Any, **kwargs: Any) -> Any:
            site = user_site()
            result = plain(model, *args, **kwargs)
            facts = self.facts_of(model)
            facts.compile_site, facts.optimizer = site, {}
            return result

        return compile

    def _noting_warnings(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def warn(message: Any, category: Any = None, stacklevel: int = 1, **more: Any) -> None:
            frame = inspect.currentframe()
            caller = frame.f_back if frame is not None else None
            if caller is not None and caller.f_code.co_filename.startswith(_PACKAGE):
                self.record.warnings.append(str(message))
            plain(message, category, stacklevel + 1, **more)

        return warn

    def note_step_draws(self, model: Any, name: str) -> None:
        """A generator's state has changed while a step ran."""
        facts = self.facts_of(model)
        own = [facts.own_methods.get("train_step"), facts.own_methods.get("compute_loss")]
        own += [layer.site for layer in facts.layers if layer.is_custom]
        site = next(filter(None, own), None)
        if site is not None:
            self._note_draw(RandomUse(name, site))

    def _is_training(self) -> bool:
        return self._loop.is_in_step or self._call in ("fit", "train_on_batch")

    def _note_draw(self, use: RandomUse) -> None:
        if use not in self.record.draws:
            self.record.draws.append(use)

    def _note_random(self, use: RandomUse) -> None:
        if use not in self.record.random:
            self.record.random.append(use)

    # -- models --------------------------------------------------------------------------------

    def index_of(self, model: Any) -> int:
        for index, known in enumerate(self._models):
            if known is model:
                return index
        self._models.append(model)  # Kept alive: its values are read at the end.
        self.record.models.append(ModelFacts(name=model.name, kind=type(model).__name__))
        return len(self._models) - 1

    def facts_of(self, model: Any) -> ModelFacts:
        return self.record.models[self.index_of(model)]

    def begin(self, model: Any, *, is_late: bool = False) -> None:
        """A model is about to be trained, and is built; `is_late`: by its first step."""
        from unisono.verify.facts import describe_model, model_variables

        facts = self.facts_of(model)
        is_first = not facts.start
        describe_model(model, facts, self._sites, self._loop_optimizers)
        if not is_first:
            return
        if self.settings.perturbs:
            self._perturb(model, facts.dtype)
        facts.start = [sample(to_numpy(v), _MOST_IN_STEP) for v in model_variables(model)]
        facts.is_built_late = is_late

    def _perturb(self, model: Any, dtype: str) -> None:
        """Change weights in their last bits, as another order of additions does."""
        draw = np.random.RandomState(self.settings.seed)
        for variable in model.trainable_variables:
            value = np.asarray(to_numpy(variable))
            signs = draw.randint(0, 2, value.shape) * 2 - 1
            variable.assign((value * (1 + signs * _PERTURBATION[dtype])).astype(value.dtype))

    # -- steps ---------------------------------------------------------------------------------

    def add_step(
        self, model: Any, logs: Any, *, num_steps: int = 1, batch: tuple[int | None, int] | None
    ) -> None:
        from unisono.keras_internals import layers_of
        from unisono.verify.facts import own_attributes

        step = self._step_of(model)
        step.num_steps, step.logs = num_steps, to_logs(logs)
        step.attributes = own_attributes([*layers_of(model), *self._callbacks])
        self._append(step, batch)

    def _step_of(self, model: Any) -> Step:
        from unisono.verify.facts import model_variables, optimizer_variables

        facts = self.facts_of(model)
        weights, slots = model_variables(model), optimizer_variables(model, self._loop_optimizers)
        if len(weights) != len(facts.variables) or len(slots) != len(facts.optimizer_variables):
            self.begin(model, is_late=True)  # A step has built the rest of it.
        return Step(
            model=self.index_of(model),
            weights=[sample(to_numpy(v), _MOST_IN_STEP) for v in weights],
            optimizer=[sample(to_numpy(v), _MOST_IN_STEP) for v in slots],
            learning_rate=_learning_rate(model, self._loop_optimizers),
        )

    def _append(self, step: Step, batch: tuple[int | None, int] | None) -> None:
        if batch is not None:
            step.data, step.num_rows = batch
        self.record.steps.append(step)
        self._num_done += step.num_steps

    # -- custom training loops -----------------------------------------------------------------

    def find_loop_models(self) -> None:
        """Look for the models and optimizers of a custom loop among all objects."""
        from unisono.keras_internals import layers_of
        from unisono.replication.custom_loop import living_keras_objects

        models, self._loop_optimizers, _ = living_keras_objects()
        inner = {id(layer) for model in models for layer in layers_of(model, include_self=False)}
        self._loop_models = [m for m in models if id(m) not in inner and m.built]
        for model in sorted(self._loop_models, key=lambda model: str(model.name)):
            if not self.facts_of(model).start:
                self.begin(model)

    def add_loop_step(self, batch: tuple[int | None, int] | None) -> None:
        """A loop has made a step, with whichever of the models it trains."""
        steps = [self._step_of(model) for model in self._loop_models]
        steps.sort(key=lambda step: step.model)
        step = steps[0] if steps else Step(model=-1)
        step.others = steps[1:]
        self._append(step, batch)

    @property
    def is_recording_step(self) -> bool:
        """Whether a step is under way that is recorded when it ends."""
        return self._is_inside or self._loop.is_in_step

    def end_loop_if_enough(self) -> None:
        if self.is_enough:
            raise EnoughSteps

    @property
    def is_enough(self) -> bool:
        return self._num_done >= self.settings.num_steps

    # -- calls ---------------------------------------------------------------------------------

    def _recorded_call(
        self, name: str, model: Any, arguments: dict[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Record a call by its arguments, which `run` uses after they may have been changed."""
        from unisono.verify.calls import (
            callbacks_of,
            described,
            remembered,
            results_of,
            watched,
        )

        if name == "train_on_batch" and self.is_enough:
            raise EnoughSteps
        call = RecordedCall(
            name=name,
            model=self.index_of(model),
            site=user_site(),
            arguments=described(arguments),
            first_step=len(self.record.steps),
        )
        self.record.calls.append(call)
        if name in ("fit", "train_on_batch"):
            self._last = (model, remembered(arguments))
        self._batches = []
        if name == "fit":
            self._callbacks = callbacks_of(arguments)
            watched(arguments, self._batches)
        self._is_inside, self._call = True, name
        try:
            result = run()
        finally:
            self._is_inside, self._call = False, ""
        if name == "train_on_batch":
            if not self.facts_of(model).start:
                self.begin(model, is_late=True)
            self.add_step(model, {}, batch=None)
        for step, batch in zip(self.record.steps[call.first_step :], self._batches, strict=False):
            step.data, step.num_rows = batch
        call.results = results_of(name, model, result, _MOST_PREDICTED)
        return result

    def record_training(self, model: Any, arguments: dict[str, Any]) -> None:
        """Train a model until there are enough steps, evaluate and predict: for tests."""
        import keras

        self.record.backend = str(keras.backend.backend())
        given = {"epochs": self.settings.num_steps, **arguments, "verbose": 0}
        self._recorded_call("fit", model, given, lambda: model.fit(**given))
        for name, given in self._own_calls():
            call = functools.partial(getattr(model, name), **given)
            self._recorded_call(name, model, given, call)
        self._note_values(has_failed=False)
        self._probe()

    # -- the end -------------------------------------------------------------------------------

    def _note_error(self, error: BaseException) -> None:
        record = self.record
        record.error = "".join(traceback.format_exception(error))
        record.error_type = next(
            (
                kind.__name__
                for kind in type(error).__mro__
                if kind.__name__ in ("DisagreementError", "PeerLostError")
            ),
            type(error).__name__,
        )
        record.error_message = str(error)
        record.error_site = site_of_traceback(error.__traceback__)

    def _finish(self, *, has_failed: bool) -> None:
        """Record the values at the end, and make the calls that the program did not make."""
        self.record.files = list(user_files())
        try:
            if "unisono.fit" in sys.modules:
                self._note_end(has_failed=has_failed)
        finally:
            write_record(self.record, self.settings.folder)

    def _note_end(self, *, has_failed: bool) -> None:
        self._note_values(has_failed=has_failed)
        if has_failed:
            return
        for index in sorted({step.model for step in self.record.steps if step.model >= 0}):
            self._check_replicas(self._models[index])
        if self._last is None or not self.record.steps:
            return
        self._probe()
        for name, given in self._own_calls():
            try:
                getattr(self._last[0], name)(**given)
                self.record.calls[-1].is_ours = True
            except Exception as error:
                self.record.notes.append(
                    f"{name} on data of the last training: {type(error).__name__}: {error}"
                )

    def _note_values(self, *, has_failed: bool) -> None:
        from unisono.verify.facts import describe_model, model_variables, optimizer_variables

        for index, model in enumerate(self._models):
            facts = self.record.models[index]
            try:
                describe_model(model, facts, self._sites, self._loop_optimizers)
                values = [sample(to_numpy(v), _MOST_AT_END) for v in model_variables(model)]
                slots = optimizer_variables(model, self._loop_optimizers)
                facts.weights = values
                facts.optimizer_state = [sample(to_numpy(v), _MOST_AT_END) for v in slots]
            except Exception as error:  # Freed by a failed step, or never built.
                if not has_failed and facts.start:
                    self.record.notes.append(f"{facts.name}: no values at the end ({error})")

    def _probe(self) -> None:
        """Look for what mixes rows, on one device, where it may explain a difference later."""
        from unisono.parallel import replicated_model
        from unisono.verify.probe import find_mixing

        model, (x, y) = self._last or (None, (None, None))
        replicated = None if model is None else replicated_model(model)
        is_alone = replicated is None or replicated.placement.num_replicas == 1
        if x is None or hasattr(x, "element_spec") or not is_alone or self.record.backend == "jax":
            return
        with contextlib.suppress(Exception):  # A model without a call of its own, say.
            self.facts_of(model).mixing = find_mixing(model, x, y)

    def _check_replicas(self, model: Any) -> None:
        from unisono.errors import DisagreementError
        from unisono.parallel import is_parallel

        if not is_parallel(model):
            return
        try:
            unisono.check_replicas(model)
        except DisagreementError as error:
            self.record.replicas_differ = str(error)

    def _own_calls(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Calls on data of the last training that the program has not made itself."""
        made = {call.name.replace("test", "evaluate") for call in self.record.calls}
        _, (x, y) = self._last or (None, (None, None))
        if x is None:
            return
        is_labelled = y is not None or hasattr(x, "element_spec")
        if is_labelled and not made & {"evaluate", "evaluate_on_batch"}:
            yield "evaluate", {"x": x, "y": y, "verbose": 0, "return_dict": True}
        if not made & {"predict", "predict_on_batch"}:
            yield "predict", {"x": x, "verbose": 0}


class FitObserver:
    """Records the steps of one `fit`; see fit.StepObserver."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder
        self._batch: tuple[int | None, int] | None = None
        self._random_states: dict[str, int] = {}

    def begin(self, model: Any) -> None:
        self._model = model
        self._recorder.begin(model)

    def before(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        from unisono.telemetry import is_plain_iterator

        *rest, data = args
        self._random_states = random_states()
        self._batch = None
        if isinstance(data, list):
            self._note(data[0] if len(data) == 1 else data)
        elif is_plain_iterator(data):
            return (*rest, self._watched(data))
        return args

    def after(self, result: Any) -> None:
        recorder, model = self._recorder, self._model
        logs = result[0] if isinstance(result, tuple) else result
        for name, state in random_states().items():
            if state != self._random_states[name]:
                recorder.note_step_draws(model, name)
        num_steps = int(getattr(model, "steps_per_execution", 1))
        recorder.add_step(model, logs, num_steps=num_steps, batch=self._batch)
        if recorder.is_enough:
            model.stop_training = True

    def end(self, error: BaseException | None) -> None:
        """The call itself is recorded where it ends."""

    def _watched(self, batches: Any) -> Iterator[Any]:
        for batch in batches:
            self._note(batch)
            yield batch

    def _note(self, batch: Any) -> None:
        from unisono.verify.calls import checksum_and_rows

        self._batch = checksum_and_rows(batch)


def to_numpy(variable: Any) -> Any:
    import keras

    return np.asarray(keras.ops.convert_to_numpy(variable))


def to_logs(logs: Any) -> dict[str, float]:
    """The numbers among the logs of a step."""
    found = {}
    for name, value in (logs or {}).items() if isinstance(logs, dict) else ():
        with contextlib.suppress(TypeError, ValueError):
            array = np.asarray(to_numpy(value), "float64")
            if array.size == 1:
                found[str(name)] = float(array.reshape(()))
    return found


def _learning_rate(model: Any, others: Sequence[Any]) -> float | None:
    from unisono.verify.facts import optimizers_for

    for optimizer in optimizers_for(model, others):
        with contextlib.suppress(Exception):
            return float(to_numpy(optimizer.learning_rate))
    return None
