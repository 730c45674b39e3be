"""TensorFlow as a framework: device settings, joining a run, and state beside Keras' variables.

Nothing of TensorFlow is imported before it is needed: settings are made before Keras chooses a
backend.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono.backends.base import Build
from unisono.devices import Grant, Policy
from unisono.errors import DeviceError

if TYPE_CHECKING:
    from unisono.launch.client import World

_MEGABYTE = 2**20
_DRAWS = ("normal", "uniform", "truncated_normal", "categorical", "shuffle", "gamma")


class TensorFlowFramework:
    """See base.Framework. Settings are calls of `tf.config`, before the devices start."""

    name = "tensorflow"
    title = "TensorFlow"
    first_use = "building a model, making a tensor or a data set"
    needs_even_batches = False
    donates_buffers = False
    cpu_layers: frozenset[str] = frozenset()

    # -- its build ------------------------------------------------------------------------------

    def build(self) -> Build:
        import tensorflow as tf

        found = tf.sysconfig.get_build_info()
        return Build(
            str(tf.__version__),
            cuda=found.get("cuda_version") if found.get("is_cuda_build") else None,
            rocm=str(found.get("rocm_version", "yes")) if found.get("is_rocm_build") else None,
            cudnn=found.get("cudnn_version") if found.get("is_cuda_build") else None,
        )

    def gpu_install(self, cuda: tuple[int, int] | None) -> str:
        return 'pip install "tensorflow[and-cuda]"'

    def is_kept_from_gpus(self) -> bool:
        return False  # Only by CUDA_VISIBLE_DEVICES, which hides GPUs from all.

    # -- device settings -----------------------------------------------------------------------

    def why_too_late(self, tf: Any, policy: Policy) -> str | None:
        # The setters only answer by raising, when half of the settings may be made already.
        return "TensorFlow has started its devices" if _context()._initialized else None

    def set_variables(self, grant: Grant) -> None:
        """TensorFlow reads none of it from the environment."""

    def apply(self, tf: Any, grant: Grant) -> None:
        try:
            _set_gpus(tf, grant)
            if grant.cpu_threads is not None:
                tf.config.threading.set_intra_op_parallelism_threads(grant.cpu_threads)
                tf.config.threading.set_inter_op_parallelism_threads(grant.cpu_threads)
            if grant.is_deterministic:
                tf.config.experimental.enable_op_determinism()
                tf.config.experimental.enable_tensor_float_32_execution(False)
        except (RuntimeError, ValueError) as error:
            raise DeviceError(
                f"Asked TensorFlow to keep to unisono.configure; it says: {error}. Remove the "
                "program's own calls of tf.config for GPUs, or what configure says of them."
            ) from error

    # -- joining a run -------------------------------------------------------------------------

    def join(self, world: "World") -> None:
        from unisono.backends.tensorflow.distributed import join

        join(world)

    def join_keras(self, world: "World") -> None:
        """Keras needs nothing more on TensorFlow."""

    # -- state ---------------------------------------------------------------------------------

    def set_seed(self, seed: int) -> None:
        """TensorFlow is seeded wherever it is imported: tf.data shuffles for every backend."""

    def random_state(self) -> list[Any]:
        """The global seed, and the generator that gives each eager op its own."""
        context = _context()
        generator = getattr(context, "_rng", None)
        if generator is None:
            return [context._seed, None]
        version, numbers, gauss = generator.getstate()
        return [context._seed, [version, list(numbers), gauss]]

    def set_random_state(self, state: list[Any]) -> None:
        import tensorflow as tf

        seed, numbers = state
        if seed != _context()._seed:
            tf.random.set_seed(seed)
        generator = getattr(_context(), "_rng", None)
        if generator is not None and numbers is not None:
            generator.setstate((numbers[0], tuple(numbers[1]), numbers[2]))

    def native_optimizers(self, model: Any) -> list[Any]:
        return []

    def native_optimizer_state(self, model: Any) -> list[tuple[str, Any]]:
        return []

    def trial_state(self, model: Any) -> list[Callable[[], Any]]:
        """The eager ops' generator, and the tf.Variables that layers keep by themselves."""
        import tensorflow as tf

        from unisono.replication.introspection import values_in_attributes

        generator = functools.partial(self.set_random_state, self.random_state())
        of_keras = {id(variable._value) for variable in model.variables}  # Restored already.
        found = [
            value
            for value in values_in_attributes(model)
            if isinstance(value, tf.Variable) and id(value) not in of_keras
        ]
        return [generator, *(functools.partial(v.assign, tf.identity(v)) for v in found)]

    def drawing_functions(self) -> list[tuple[Any, str]]:
        import tensorflow as tf

        return [(tf.random, name) for name in _DRAWS]

    def dropout_functions(self) -> list[tuple[Any, str]]:
        import tensorflow as tf

        return [(tf.nn, "dropout")]

    def is_saved_collectively(self, callback: Any) -> bool:
        return False

    def save_collectively(self, callback: Any) -> None:
        """No callback does."""


def _context() -> Any:
    from tensorflow.python.eager.context import context

    return context()


def _set_gpus(tf: Any, grant: Grant) -> None:
    gpus = tf.config.list_physical_devices("GPU")
    if grant.gpus is not None and len(gpus) > len(grant.gpus):
        # CUDA had started, so that it did not read the list of visible devices again.
        tf.config.set_visible_devices([gpus[i] for i in grant.gpus], "GPU")
    for gpu in tf.config.get_visible_devices("GPU"):
        if grant.limit_bytes is not None:
            limit = max(1, grant.limit_bytes // _MEGABYTE)
            part = tf.config.LogicalDeviceConfiguration(memory_limit=limit)
            tf.config.set_logical_device_configuration(gpu, [part])
        elif grant.is_growing is not None:
            tf.config.experimental.set_memory_growth(gpu, grant.is_growing)
