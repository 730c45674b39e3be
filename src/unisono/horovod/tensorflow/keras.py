"""`import unisono.horovod.tensorflow.keras as hvd`, for programs that imported it from Horovod."""

from unisono.horovod import *  # noqa: F403
from unisono.horovod import __all__ as __all__
