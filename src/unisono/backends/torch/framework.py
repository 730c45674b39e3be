"""torch as a framework: device settings, joining a run, and state beside Keras' variables.

Nothing of torch is imported before it is needed: settings are made before Keras chooses a backend.
"""

import base64
import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono.backends.base import Build
from unisono.devices import Grant, Policy, has_cuda_started

if TYPE_CHECKING:
    from unisono.launch.client import World

_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
_EXPANDABLE = "expandable_segments:True"
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_DETERMINISTIC = ":4096:8"
_DRAWS = (
    *("normal", "randint", "randn", "randn_like", "rand", "rand_like", "bernoulli"),
    *("binomial", "multinomial", "randperm"),
)


class TorchFramework:
    """See base.Framework. CUDA starts late and threads can be set at any time, but the workers of
    unisono start early."""

    name = "torch"
    title = "torch"
    first_use = "`import keras`, which asks CUDA for its GPUs, or `unisono.parallel`"
    needs_even_batches = False
    donates_buffers = False
    cpu_layers = frozenset({"batch_norm", "conv", "pool"})

    # -- its build ------------------------------------------------------------------------------

    def build(self) -> Build:
        import torch

        nccl = cudnn = None
        if torch.version.cuda is not None:
            number = torch.backends.cudnn.version()
            cudnn = None if number is None else str(number)
            if torch.distributed.is_available() and torch.distributed.is_nccl_available():
                nccl = ".".join(map(str, torch.cuda.nccl.version()))
        return Build(
            str(torch.__version__),
            cuda=torch.version.cuda,
            rocm=getattr(torch.version, "hip", None),
            cudnn=cudnn,
            nccl=nccl,
        )

    def gpu_install(self, cuda: tuple[int, int] | None) -> str:
        # A CPU build that is installed would satisfy a plain `pip install torch`.
        line = "pip install --force-reinstall torch"
        if cuda is not None and cuda < (13, 0):
            line += " --index-url https://download.pytorch.org/whl/cu126"
        return line

    def is_kept_from_gpus(self) -> bool:
        return os.environ.get("KERAS_TORCH_DEVICE", "").strip().lower() == "cpu"

    # -- device settings -----------------------------------------------------------------------

    def why_too_late(self, torch: Any, policy: Policy) -> str | None:
        pool = sys.modules.get("unisono.backends.torch.worker_pool")
        if pool is not None and pool.has_started():
            return "unisono has started torch's worker processes"
        if policy.gpus is not None and has_cuda_started():
            return "CUDA has started in this process"
        is_read_at_start = policy.memory is not None or policy.deterministic
        if is_read_at_start and torch.cuda.is_initialized():
            return "torch has started its GPUs"
        return None

    def set_variables(self, grant: Grant) -> None:
        if grant.is_deterministic:
            os.environ.setdefault(_CUBLAS, _CUBLAS_DETERMINISTIC)
        if not grant.is_growing:
            return
        name = _OLD_ALLOCATOR if _OLD_ALLOCATOR in os.environ else _ALLOCATOR
        own = [part for part in os.environ.get(name, "").split(",") if part]
        if not any(part.startswith("expandable_segments") for part in own):
            os.environ[name] = ",".join([*own, _EXPANDABLE])

    def apply(self, torch: Any, grant: Grant) -> None:
        if grant.cpu_threads is not None:
            torch.set_num_threads(grant.cpu_threads)
            # Fixed by the first work of that kind; nothing in Keras does any.
            with contextlib.suppress(RuntimeError):
                torch.set_num_interop_threads(grant.cpu_threads)
        if grant.limit_bytes is not None:
            # Setting it starts CUDA, which is for the program to do.
            torch.cuda._lazy_call(lambda: _limit_memory(torch, grant))
        if grant.is_deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False
            torch.backends.cudnn.allow_tf32 = False
            torch.backends.cuda.matmul.allow_tf32 = False

    # -- joining a run -------------------------------------------------------------------------

    def join(self, world: "World") -> None:
        from unisono.backends.torch.process_group import join

        join(world)

    def join_keras(self, world: "World") -> None:
        """Reduce the gradients of torch's own optimizers in custom training loops."""
        from unisono.backends.torch.native_optimizers import hook_for_good

        hook_for_good(world)

    # -- state ---------------------------------------------------------------------------------

    def set_seed(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def random_state(self) -> str:
        import torch

        return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()

    def set_random_state(self, state: str) -> None:
        import torch

        found = bytearray(base64.b64decode(state))
        torch.set_rng_state(torch.frombuffer(found, dtype=torch.uint8))

    def native_optimizers(self, model: Any) -> list[Any]:
        import torch

        return [v for v in vars(model).values() if isinstance(v, torch.optim.Optimizer)]

    def native_optimizer_state(self, model: Any) -> list[tuple[str, Any]]:
        from unisono.backends.torch.native_optimizers import native_state

        return native_state(model)

    def trial_state(self, model: Any) -> list[Callable[[], Any]]:
        """Generators, `.grad` of variables (cleared for the trial) and buffers of layers."""
        from unisono.backends.torch.devices import generators

        values = [variable.value for variable in model.trainable_variables]
        found: list[Callable[[], Any]] = [
            *(functools.partial(g.set_state, g.get_state()) for g in generators()),
            *(functools.partial(setattr, value, "grad", value.grad) for value in values),
        ]
        for value in values:
            value.grad = None
        buffers = {id(b): b for layer in model._flatten_layers() for b in layer.buffers()}
        return [*found, *(functools.partial(b.copy_, b.clone()) for b in buffers.values())]

    def drawing_functions(self) -> list[tuple[Any, str]]:
        import torch

        return [(torch, name) for name in _DRAWS]

    def dropout_functions(self) -> list[tuple[Any, str]]:
        import torch

        return [(torch.nn.functional, "dropout")]

    def is_saved_collectively(self, callback: Any) -> bool:
        return False

    def save_collectively(self, callback: Any) -> None:
        """No callback does."""


def _limit_memory(torch: Any, grant: Grant) -> None:
    assert grant.limit_bytes is not None
    for i in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(i).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, grant.limit_bytes / total), i)
