"""JAX as a framework: device settings, joining a run, and state beside Keras' variables.

Nothing of JAX is imported before it is needed: settings are made before Keras chooses a backend.
"""

import importlib.metadata
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono.backends.base import Build
from unisono.backends.jax.internals import has_started
from unisono.devices import Grant, Policy, has_cuda_started

if TYPE_CHECKING:
    from unisono.launch.client import World

_SHARE = "XLA_CLIENT_MEM_FRACTION"
_OLD_SHARE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_AT_START = "XLA_PYTHON_CLIENT_PREALLOCATE"
# The size of the CPU client's thread pools. XLA_FLAGS has no flag for it that still works.
_THREADS = "PJRT_NPROC"
_FLAGS = "XLA_FLAGS"
# Kernels that give the same bits in every run; the default precision may be TF32.
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
_PRECISION, _FULL = "JAX_DEFAULT_MATMUL_PRECISION", "highest"
_ALL = 0.95  # The driver keeps some of a GPU's memory for itself.


class JaxFramework:
    """See base.Framework. JAX reads its settings from the environment when its devices start."""

    name = "jax"
    title = "JAX"
    first_use = "building a model, making an array, jax.devices()"
    needs_even_batches = True
    donates_buffers = True
    cpu_layers = frozenset({"max_pool"})

    # -- its build ------------------------------------------------------------------------------

    def build(self) -> Build:
        import jax

        cuda = next((each for each in ("12", "13") if _version(f"jax-cuda{each}-plugin")), None)
        rocm = next((each for each in ("6", "7") if _version(f"jax-rocm{each}-plugin")), None)
        wheel = {"12": "-cu12", "13": "-cu13"}.get(cuda or "", "")
        return Build(
            str(jax.__version__),
            cuda=cuda,
            rocm=rocm,
            cudnn=_version(f"nvidia-cudnn{wheel}"),
            nccl=_version(f"nvidia-nccl{wheel}"),
        )

    def gpu_install(self, cuda: tuple[int, int] | None) -> str:
        return f'pip install "jax[cuda{13 if cuda is not None and cuda >= (13, 0) else 12}]"'

    def is_kept_from_gpus(self) -> bool:
        chosen = os.environ.get("JAX_PLATFORMS") or os.environ.get("JAX_PLATFORM_NAME") or ""
        return chosen.strip().lower() == "cpu"

    # -- device settings -----------------------------------------------------------------------

    def why_too_late(self, jax: Any, policy: Policy) -> str | None:
        if has_started():
            return "JAX has started its devices"
        if policy.gpus is not None and has_cuda_started():
            return "CUDA has started in this process"
        return None

    def set_variables(self, grant: Grant) -> None:
        if grant.cpu_threads is not None:
            os.environ[_THREADS] = str(grant.cpu_threads)
        if grant.is_growing is not None:
            os.environ[_AT_START] = "false" if grant.is_growing else "true"
        share = _ALL if grant.is_growing is False else grant.limit_share
        if share is not None:
            os.environ.pop(_OLD_SHARE, None)  # JAX refuses to see both.
            os.environ[_SHARE] = f"{share:.6f}"
        if grant.limit_share is not None:
            os.environ[_AT_START] = "false"
        if grant.is_deterministic:
            own = [flag for flag in os.environ.get(_FLAGS, "").split() if flag != _DETERMINISTIC]
            os.environ[_FLAGS] = " ".join([*own, _DETERMINISTIC])
            os.environ[_PRECISION] = _FULL

    def apply(self, jax: Any, grant: Grant) -> None:
        if grant.is_deterministic:
            # JAX reads the variable on its import, which may have been before.
            jax.config.update("jax_default_matmul_precision", _FULL)

    # -- joining a run -------------------------------------------------------------------------

    def join(self, world: "World") -> None:
        from unisono.backends.jax.distributed import join

        join(world)

    def join_keras(self, world: "World") -> None:
        """Keras needs nothing more on JAX."""

    # -- state: JAX has none, and its replicas see the global batch, so that no step is tried ---

    def set_seed(self, seed: int) -> None:
        """Keras' own generators hold all random state."""

    def random_state(self) -> None:
        return None

    def set_random_state(self, state: None) -> None:
        """Keras' own generators hold all random state."""

    def native_optimizers(self, model: Any) -> list[Any]:
        return []

    def native_optimizer_state(self, model: Any) -> list[tuple[str, Any]]:
        return []

    def trial_state(self, model: Any) -> list[Callable[[], Any]]:
        return []

    def drawing_functions(self) -> list[tuple[Any, str]]:
        return []

    def dropout_functions(self) -> list[tuple[Any, str]]:
        return []

    def is_saved_collectively(self, callback: Any) -> bool:
        import keras

        # On JAX Orbax itself makes all processes save together, and waits for each of them.
        kind = getattr(keras.callbacks, "OrbaxCheckpoint", None)
        return kind is not None and isinstance(callback, kind)

    def save_collectively(self, callback: Any) -> None:
        from unisono.backends.jax.state import save_together

        save_together(callback)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
