"""A layer whose digits depend on the device, as those of kernels that add in any order do."""

import jax
import keras
import numpy as np
from jax.sharding import Mesh, PartitionSpec


class Drifting(keras.layers.Layer):
    """Multiplies by 1 on the first device and by a little more on each of the others."""

    def __init__(self, num_devices, **options):
        super().__init__(**options)
        self.num_devices = num_devices

    def build(self, shape):
        for dtype in ("int16", "bool"):
            variable = self.add_weight(shape=(), dtype=dtype, initializer="zeros", trainable=False)
            setattr(self, f"seen_{dtype}", variable)

    def call(self, x):
        # Another number on each device, in an array that XLA takes for replicated.
        mesh = Mesh(np.array(jax.devices()[: self.num_devices]), ("device",))
        number = jax.shard_map(
            lambda: jax.lax.axis_index("device"),
            mesh=mesh,
            in_specs=(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )()
        for variable in (self.seen_int16, self.seen_bool):
            variable.assign(keras.ops.cast(number, variable.dtype))
        return x * (1 + 1e-3 * keras.ops.cast(number, x.dtype))
