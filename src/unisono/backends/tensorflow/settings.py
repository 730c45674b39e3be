"""A policy on TensorFlow: `tf.config`, once it is imported and before it starts its devices."""

from typing import Any

from unisono.devices import Grant, Policy
from unisono.errors import DeviceError

_MEGABYTE = 2**20


class TensorFlowSettings:
    """TensorFlow can be told all of it by calls, and lists GPUs before it starts them."""

    framework = "TensorFlow"
    module = "tensorflow"
    first_use = "building a model, making a tensor or a data set"

    def why_too_late(self, tf: Any, policy: Policy) -> str | None:
        # The setters only answer by raising, when half of the settings may be made already.
        from tensorflow.python.eager.context import context

        return "TensorFlow has started its devices" if context()._initialized else None

    def set_variables(self, grant: Grant) -> None:
        """There is nothing that it reads from the environment."""

    def apply(self, tf: Any, grant: Grant) -> None:
        try:
            _set_gpus(tf, grant)
            if grant.cpu_threads is not None:
                tf.config.threading.set_intra_op_parallelism_threads(grant.cpu_threads)
                tf.config.threading.set_inter_op_parallelism_threads(grant.cpu_threads)
        except (RuntimeError, ValueError) as error:
            raise DeviceError(
                f"Asked TensorFlow to keep to unisono.configure; it says: {error}. Remove the "
                "program's own calls of tf.config for GPUs, or what configure says of them."
            ) from error


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
