"""Old names translated to unisono's."""

from unisono.compat import mxnet
from unisono.compat.multi_gpu import MirroredStrategy, multi_gpu_model

__all__ = ["MirroredStrategy", "multi_gpu_model", "mxnet"]
