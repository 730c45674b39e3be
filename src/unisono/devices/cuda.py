"""Whether CUDA has started in this process, asked without starting it.

CUDA reads `CUDA_VISIBLE_DEVICES` once, when the first library of the process starts it. That may
be long before a framework counts as started: Keras' torch backend does it on import.
"""

import os
import sys

_NOT_INITIALIZED = 3


def has_cuda_started() -> bool:
    """Whether the list of visible GPUs is fixed for this process."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes

    try:
        # NOLOAD: only a driver that somebody else has loaded.
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    count = ctypes.c_int()
    return bool(driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALIZED)
