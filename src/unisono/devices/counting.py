"""Ask Keras' backend for its GPUs from a process that must not start them itself.

A launcher that initialized a GPU would hold memory of it, so a child process counts. This is the
second choice: it takes seconds, while NVML takes milliseconds.
"""

import functools
import os
import sys

from unisono.topology import JOINED

_PATIENCE_S = 60.0
# A string, as no package below the backends may import one.
_COUNT = "from unisono.backends import load_backend; print('GPUs:', load_backend().num_gpus())"
_CHOICE = ("KERAS_BACKEND", "KERAS_HOME", "JAX_PLATFORMS")


def count_in_child() -> int | None:
    """How many GPUs the chosen backend sees; None where it can't be asked."""
    relevant = tuple(
        sorted(
            (name, value)
            for name, value in os.environ.items()
            if name in _CHOICE or name.endswith("_VISIBLE_DEVICES")
        )
    )
    return _count(relevant)


@functools.cache
def _count(relevant: tuple[tuple[str, str], ...]) -> int | None:
    import subprocess  # Rarely needed: `import unisono` is to be quick.

    # What a launcher has set is meant for this process: a child that joined would be one too many.
    env = {**os.environ, JOINED: str(os.getpid())}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT],
            env=env,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    counts = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("GPUs: ")]
    return int(counts[-1]) if counts and not done.returncode else None
