"""The start of a training program, and the training as the program sees it.

One process drives all GPUs. CPU replicas are fastest as one pinned process each, so there the
program is started again by the launcher, as `unisono run` would.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from unisono.devices import (
    Placement,
    choose,
    claimed_replicas,
    num_gpus,
    remark_on_cores,
    select,
    simulated_gpus,
)
from unisono.errors import ConfigurationError, DataError, UnisonoError
from unisono.launch.client import current_world
from unisono.launch.failure import Failure
from unisono.launch.launcher import perform
from unisono.launch.request import Request
from unisono.topology import topology
from unisono.training.datasets import Form, Split, check_source, load
from unisono.training.results import compare
from unisono.training.settings import Settings, read, to_words

if TYPE_CHECKING:
    from unisono.training.recorder import Recorder


class Run:
    """A training, in each of its processes; `unisono.training.begin` returns it.

    See docs/training.md for a program that uses it.
    """

    def __init__(self, settings: Settings, *, is_program: bool = False) -> None:
        self.settings = settings
        self._is_program = is_program
        self._is_in_world = current_world() is not None
        if self._is_in_world:
            self.num_replicas = topology().world_size
        else:
            self._placement = place(settings)
            self.num_replicas = claimed_replicas(self._placement.num_replicas)

    @property
    def num_processes(self) -> int:
        """The number of processes of this training."""
        return self.num_replicas if self._is_in_world else 1

    @property
    def devices(self) -> dict[str, Any]:
        """The arguments of `unisono.parallel` for this training's replicas."""
        if self._is_in_world:
            return {}
        placement = self._placement
        is_on_gpus = placement.kind == "gpu" or placement.is_simulated
        return {"gpus": placement.indices} if is_on_gpus else {"replicas": placement.num_replicas}

    @property
    def epochs(self) -> int:
        """The number of epochs of the full schedule."""
        return self.settings.epochs

    @property
    def num_epochs(self) -> int:
        """The number of epochs to train: all, or the first `--stop-after`."""
        return self.settings.num_epochs

    @property
    def learning_rate(self) -> float:
        """The learning rate for one replica."""
        return self.settings.learning_rate

    @property
    def lr_scaling(self) -> str:
        """How the learning rate grows with the replicas."""
        return self.settings.lr_scaling

    @property
    def warmup_epochs(self) -> int:
        """The number of epochs until the scaled learning rate is reached."""
        return self.settings.warmup_epochs

    @property
    def seed(self) -> int:
        """The seed of all random generators."""
        return self.settings.seed

    @property
    def global_batch(self) -> int:
        """The global batch size: the samples of one step over all replicas."""
        return self.settings.batch_per_replica * self.num_replicas

    @property
    def is_chief(self) -> bool:
        """Whether this process prints and writes files."""
        return topology().is_chief

    def num_steps(self, num_samples: int) -> int:
        """Count the steps of an epoch.

        Args:
            num_samples: The number of training samples.

        Returns:
            The number of global batches; the last one may be smaller.
        """
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
        """Load images and labels from `--data`, `UNISONO_DATA` or a download.

        Args:
            name: The name of the data set, for its file and for messages.
            image_shape: The shape of an image: height, width, channels.
            num_classes: The number of classes; by default any.
            folder_shape: The shape of images from folders, if not `image_shape`.
            otherwise: Makes the data if there is no `--data`.

        Returns:
            `(x_train, y_train), (x_test, y_test)`.

        Raises:
            DataError: If the data is missing or malformed. A program exits with the message
                instead.
        """
        form = Form(name, image_shape, num_classes, folder_shape)
        world = current_world()
        # The chief first: it may have to download what the others then read.
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
        """Raise an error; in a program, exit with the message instead of a traceback.

        Args:
            error: The error.

        Returns:
            Never.

        Raises:
            UnisonoError: The error itself.
        """
        if self._is_program:
            raise SystemExit(f"{self.settings.recipe}: {error}") from None
        raise error

    def prepare_keras(self) -> None:
        """Seed all random generators, and set the dtype policy that the options ask for."""
        import keras

        from unisono.replication.random_state import set_seed

        set_seed(self.seed)
        if self.settings.is_mixed_precision:
            is_on_gpus = num_gpus() and not simulated_gpus()
            # float16 is slow on CPUs, and bfloat16 needs no loss scaling.
            name = "mixed_float16" if is_on_gpus else "mixed_bfloat16"
            keras.mixed_precision.set_dtype_policy(name)

    @contextlib.contextmanager
    def recording(self, model: Any, num_samples: int) -> Iterator["Recorder"]:
        """Show the progress of a `fit` inside a `with` block, and write results at its end.

        Ctrl-C ends the training after the current step, and the results so far are written.

        Args:
            model: The model that is trained.
            num_samples: The number of training samples.

        Returns:
            A context manager, whose value is a callback for `fit`.

        Raises:
            OutputError: If results cannot be written.
        """
        from unisono.training.recorder import Recorder, ShownRecorder

        is_shown = self.is_chief and sys.stdout.isatty()
        recorder = (ShownRecorder if is_shown else Recorder)(self, model, num_samples)
        with recorder:
            yield recorder

    def describe(self) -> str:
        """Describe the global batch size and the learning rate.

        Returns:
            A line of text that says how they are computed.
        """
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


def begin(
    description: str | None = None,
    *,
    epochs: int,
    batch_per_replica: int,
    learning_rate: float,
    lr_scaling: str = "linear",
    warmup_epochs: int = 0,
    seed: int = 0,
    name: str | None = None,
    arguments: Sequence[str] | None = None,
) -> Run:
    """Read the options of a training program and start its replicas.

    Call it before Keras is imported, as it chooses the backend. If each replica has its own
    process, it returns in those only.

    Args:
        description: The text of `--help`.
        epochs: The default of `--epochs`, and so on below.
        batch_per_replica: The rows of a batch on each replica.
        learning_rate: The learning rate for one replica.
        lr_scaling: How it grows with the replicas; see `unisono.schedules.scaling_factor`.
        warmup_epochs: The epochs until the scaled learning rate is reached.
        seed: The seed of all random generators.
        name: The name of the program, in its output.
        arguments: The options, instead of those of the command line. All replicas then stay in this
            process, and errors are raised.

    Returns:
        The training, as the program sees it.

    Raises:
        UnisonoError: If `arguments` are given and are wrong, or what they name does not exist. A
            program exits with the message instead.

    Example:
        >>> options = ["--epochs", "3"]
        >>> run = begin(epochs=2, batch_per_replica=32, learning_rate=0.1, arguments=options)
        >>> run.epochs, run.global_batch // run.num_replicas
        (3, 32)
    """
    defaults = {
        "epochs": epochs,
        "batch_per_replica": batch_per_replica,
        "learning_rate": learning_rate,
        "lr_scaling": lr_scaling,
        "warmup_epochs": warmup_epochs,
        "seed": seed,
    }
    name = name or own_name()
    try:
        settings = read(name, description or "", defaults, arguments, command=own_command())
        _check(settings)
        if arguments is None and current_world() is None:
            _start_again(settings)
        return Run(settings, is_program=arguments is None)
    except UnisonoError as error:
        if arguments is not None:
            raise
        sys.exit(f"{name}: {error}")


def _check(settings: Settings) -> None:
    """Raise errors before anything is started."""
    world = current_world()
    if world is None:
        place(settings)
    elif settings.replicas not in (None, world.size) or settings.is_compared:
        raise ConfigurationError(
            f"Asked for --replicas or --compare in a run of {world.size} processes, each of which "
            "is one replica. Leave them out, or start the program without a launcher."
        )
    if world is None or world.is_chief:
        settings.outputs.check()
    check_source(settings.data)


def _start_again(settings: Settings) -> None:
    """Launch this program once per replica and exit with it, if replicas are processes."""
    placement = place(settings)
    if settings.is_compared:
        sys.exit(compare(settings, placement, own_program()))
    if are_processes(placement):
        sys.exit(start_processes(placement, [*own_program(), *to_words(settings)]))


# After the first Ctrl-C the replicas finish their step and save; a second one kills them.
_INTERRUPT_S = 600.0


def place(settings: Settings) -> Placement:
    """The requested devices; raises DeviceError if there are fewer."""
    return choose(replicas=settings.replicas, gpus=settings.gpus, num_visible_gpus=num_gpus())


def are_processes(placement: Placement) -> bool:
    """Whether each replica has its own process."""
    return placement.kind == "cpu" and placement.num_replicas > 1


def start_processes(placement: Placement, program: list[str]) -> int:
    """Run a program as one process per replica; returns the exit code."""
    gpus = select(placement.indices) if placement.is_simulated else None
    if remark := remark_on_cores(placement.num_replicas):
        print(f"warning: {remark}", file=sys.stderr, flush=True)
    outcome = perform(
        Request(
            program=tuple(program),
            num_processes=placement.num_replicas,
            gpus=gpus,
            interrupt_s=_INTERRUPT_S,
        )
    )
    if not _is_explained(outcome.first):
        sys.stdout.flush()
        sys.stderr.write(outcome.text)
    return outcome.code


def _is_explained(failure: Failure | None) -> bool:
    """Whether the program itself has printed why it ended."""
    if failure is None:
        return True
    return failure.kind == "interrupt" or (failure.kind == "exit" and failure.rank == 0)


def own_program() -> list[str]:
    """How to start this program: its file, or `-m` and the module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    if not os.path.exists(sys.argv[0]):
        raise ConfigurationError(
            "Asked for replicas in separate processes, which run the file of this program; it has "
            "none. Save it to a file, or give begin arguments=[...] to stay in one process."
        )
    return [os.path.abspath(sys.argv[0])]


def own_command() -> str | None:
    """The command that starts this program, if it is a recipe."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    folder, _, name = spec.name.rpartition(".") if spec is not None else ("", "", "")
    return f"unisono train {name}" if folder == "unisono.recipes" else None


def own_name() -> str:
    """The name of this program."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return str(spec.name).removesuffix(".__main__").rpartition(".")[2]
    return Path(sys.argv[0]).stem if os.path.isfile(sys.argv[0]) else "training"
