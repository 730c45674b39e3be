"""One training as its program sees it: its settings, its replicas, its data and its results."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from unisono.devices import num_gpus, simulated_gpus
from unisono.errors import DataError, UnisonoError
from unisono.launch.client import current_world
from unisono.topology import topology
from unisono.training.datasets import Form, Split, load
from unisono.training.replicas import place
from unisono.training.settings import Settings

if TYPE_CHECKING:
    from unisono.training.recorder import Recorder


class Run:
    """What `unisono.training.begin` returns: one training, in each of its processes."""

    def __init__(self, settings: Settings, *, is_program: bool = False) -> None:
        self.settings = settings
        self._is_program = is_program
        self._is_in_world = current_world() is not None
        if self._is_in_world:
            self.num_replicas = topology().world_size
        else:
            self._placement = place(settings)
            self.num_replicas = self._placement.num_replicas

    @property
    def num_processes(self) -> int:
        """How many processes the replicas are."""
        return self.num_replicas if self._is_in_world else 1

    @property
    def devices(self) -> dict[str, Any]:
        """The arguments of `unisono.parallel` that put a model on this training's replicas."""
        if self._is_in_world:
            return {}
        placement = self._placement
        is_on_gpus = placement.kind == "gpu" or placement.is_simulated
        return {"gpus": placement.indices} if is_on_gpus else {"replicas": placement.num_replicas}

    @property
    def epochs(self) -> int:
        """The epochs of the whole schedule."""
        return self.settings.epochs

    @property
    def num_epochs(self) -> int:
        """The epochs to train now: all, or the first ones that `--stop-after` names."""
        return self.settings.num_epochs

    @property
    def learning_rate(self) -> float:
        """The learning rate of one replica."""
        return self.settings.learning_rate

    @property
    def lr_scaling(self) -> str:
        return self.settings.lr_scaling

    @property
    def warmup_epochs(self) -> int:
        return self.settings.warmup_epochs

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def global_batch(self) -> int:
        """The samples of one step over all replicas."""
        return self.settings.batch_per_replica * self.num_replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return topology().is_chief

    def num_steps(self, num_samples: int) -> int:
        """The steps of one epoch over so many samples."""
        return math.ceil(num_samples / self.global_batch)

    def load(
        self,
        name: str,
        image_shape: tuple[int, int, int],
        num_classes: int | None = None,
        *,
        folder_shape: tuple[int, int, int] | None = None,
        otherwise: Callable[[], tuple[Split, Split]] | None = None,
    ) -> tuple[Split, Split]:
        """`(x_train, y_train), (x_test, y_test)`, from `--data`, `UNISONO_DATA` or a download.

        `folder_shape` is for images of folders, if not `image_shape`; `otherwise` brings what is
        trained on where `--data` says nothing.
        """
        form = Form(name, image_shape, num_classes, folder_shape)
        world = current_world()
        # The chief first, as it may have to download what the others then find.
        if world is not None and not world.is_chief:
            world.all_gather(f"data of {name}", None)
        try:
            splits = load(form, self.settings.data, self.seed, otherwise)
        except DataError as error:
            self.fail(error)
        if world is not None and world.is_chief:
            world.all_gather(f"data of {name}", None)
        return splits

    def fail(self, error: UnisonoError) -> NoReturn:
        """Raise an error; a program that owns its process ends with the message alone."""
        if self._is_program:
            raise SystemExit(f"{self.settings.recipe}: {error}") from None
        raise error

    def prepare_keras(self) -> None:
        """Seed every random generator, and choose the numbers that are computed with."""
        import keras

        from unisono.replication.random_state import set_seed

        set_seed(self.seed)
        if self.settings.is_mixed_precision:
            is_on_gpus = num_gpus() and not simulated_gpus()
            # CPUs have no fast way with float16, and bfloat16 needs no loss scaling.
            name = "mixed_float16" if is_on_gpus else "mixed_bfloat16"
            keras.mixed_precision.set_dtype_policy(name)

    @contextlib.contextmanager
    def recording(self, model: Any, num_samples: int) -> Iterator["Recorder"]:
        """A callback for `fit` that shows progress; results are written at the end of the block.

        A Ctrl-C ends the training after its present step, and what there is is written.
        """
        from unisono.training.recorder import Recorder, ShownRecorder

        is_shown = self.is_chief and sys.stdout.isatty()
        recorder = (ShownRecorder if is_shown else Recorder)(self, model, num_samples)
        with recorder:
            yield recorder

    def describe(self) -> str:
        """The global batch and the learning rate, and how they came about."""
        per_replica, count = self.settings.batch_per_replica, self.num_replicas
        batch = f"{per_replica} per replica × {count} = {self.global_batch} global"
        if count == 1 or self.lr_scaling == "none":
            return f"{batch}; learning rate {self.learning_rate:g}, not scaled"
        factor = count if self.lr_scaling == "linear" else math.sqrt(count)
        sign = f"{count}" if self.lr_scaling == "linear" else f"√{count}"
        rate = f"learning rate {self.learning_rate:g} × {sign} = {self.learning_rate * factor:g}"
        if not self.warmup_epochs:
            return f"{batch}; {rate}"
        noun = "epoch" if self.warmup_epochs == 1 else "epochs"
        warmup = f"{self.warmup_epochs} {noun} of warm-up"
        if self.num_epochs <= self.warmup_epochs:
            return f"{batch}; {rate} after {warmup}; this run ends after {self.num_epochs}"
        return f"{batch}; {rate} after {warmup}"
