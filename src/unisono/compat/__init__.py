"""Old names translated to unisono's; no behaviour of their own."""

from unisono.compat import mxnet
from unisono.compat.mirrored import MirroredStrategy
from unisono.compat.multi_gpu import multi_gpu_model

__all__ = ["MirroredStrategy", "multi_gpu_model", "mxnet"]
