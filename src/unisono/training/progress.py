"""One line that shows how far an epoch is: where there is a terminal, and nowhere else."""

import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

_WIDTH = 20
_PAUSE_S = 0.1


class Bar:
    """The progress of one pass over the data, redrawn in place."""

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        self._is_drawn = False
        self._last_drawn_s = 0.0

    def begin(self, title: str, num_steps: int | None, num_samples: int | None) -> None:
        self._title = title
        self._num_steps = num_steps
        self._num_samples = num_samples
        self._begin_s = time.perf_counter()

    def update(self, num_done: int, logs: Mapping[str, Any]) -> None:
        now = time.perf_counter()
        if now - self._last_drawn_s < _PAUSE_S:
            return
        self._last_drawn_s = now
        spent_s = now - self._begin_s
        parts = [self._title, *self._shares(num_done, spent_s)]
        parts += [f"{name} {float(value):.4f}" for name, value in logs.items()]
        columns = shutil.get_terminal_size().columns - 1
        sys.stdout.write("\r\x1b[K" + "  ".join(parts)[:columns])
        sys.stdout.flush()
        self._is_drawn = True

    def clear(self) -> None:
        if self._is_drawn:
            sys.stdout.write("\r\x1b[K")
            sys.stdout.flush()
            self._is_drawn = False

    def _shares(self, num_done: int, spent_s: float) -> list[str]:
        if not self._num_steps:
            return [f"{num_done} steps"]
        share = min(1.0, num_done / self._num_steps)
        full = round(share * _WIDTH)
        parts = [f"[{'=' * full}{'.' * (_WIDTH - full)}] {num_done}/{self._num_steps}"]
        if self._num_samples:
            parts.append(speed(share * self._num_samples / spent_s, self._num_replicas))
        parts.append(f"{clock(spent_s / share - spent_s)} left")
        return parts


def speed(samples_per_s: float, num_replicas: int) -> str:
    each = f" ({samples_per_s / num_replicas:,.0f} per replica)" if num_replicas > 1 else ""
    return f"{samples_per_s:,.0f} samples/s{each}"


def clock(seconds: float) -> str:
    """Hours, minutes and seconds as a clock shows them.

    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
