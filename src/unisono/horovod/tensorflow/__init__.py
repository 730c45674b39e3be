"""The package of `unisono.horovod.tensorflow.keras`, which is `unisono.horovod`."""
