"""Where torch's process groups look each other up: the run's own meeting point.

torch's TCPStore listens on every address and asks nobody who they are. The meeting point is bound
to one address, and knows its callers by the run's secret.
"""

import datetime
from collections.abc import Sequence

import torch.distributed as dist

from unisono.launch.client import World

_NOW_S = 0.0


class MeetingStore(dist.Store):
    """The values that process groups leave for each other, kept by the meeting point."""

    def __init__(self, world: World, prefix: str) -> None:
        super().__init__()
        self._world = world
        self._prefix = prefix

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._world.put(self._name(key), data)

    def get(self, key: str) -> bytes:
        return self._world.get(self._name(key))

    def add(self, key: str, amount: int) -> int:
        return self._world.add(self._name(key), amount)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:  # type: ignore[override, unused-ignore]
        for key in keys:
            if timeout is None:
                self._world.get(self._name(key))
            else:
                self._world.get(self._name(key), timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        try:
            for key in keys:
                self._world.get(self._name(key), _NOW_S)
        except TimeoutError:
            return False
        return True

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"
