"""Horovod's elastic training, which is not implemented: every name raises an error when used."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotImplementedError(
        f"hvd.elastic.{name} is not implemented yet. A run has the same processes from its start "
        "to its end: save checkpoints, and restart it from the last one."
    )
