"""`import unisono.horovod.keras as hvd`, for programs with `import horovod.keras as hvd`."""

from unisono.horovod import *  # noqa: F403
from unisono.horovod import __all__ as __all__
