"""A place for `unisono.horovod.tensorflow.keras`; the interface is that of `unisono.horovod`."""
