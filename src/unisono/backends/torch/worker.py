"""The process of one torch replica other than the first: does what the first one says.

Run as `python -m unisono.backends.torch.worker FILE RANK SIZE STORE`, where FILE is the number of
the inherited socket. It joins the group, then loops over commands until the line ends.
"""

import os
import signal
import socket
import sys
from typing import Any

from unisono.backends.settings import apply_policy
from unisono.devices import Policy
from unisono.launch.channel import Channel, SharedMemory, end_with_parent
from unisono.launch.workers import send_error


class Worker:
    """The commands that a replica's process understands, one method each."""

    def __init__(self, channel: Channel, rank: int, size: int, store: str) -> None:
        import torch.distributed as dist

        from unisono.backends.torch.devices import default_device
        from unisono.backends.torch.process_group import Group

        self._channel = channel
        self._memory: SharedMemory | None = None
        self._models: dict[int, Any] = {}
        channel.send("ready")
        self._group = Group(dist.FileStore(store, size), rank, size, default_device())

    def serve(self) -> None:
        while True:
            command, *arguments = self._channel.receive()
            getattr(self, f"do_{command}")(*arguments)

    def do_memory(self) -> None:
        self._memory = self._channel.receive_memory()

    def do_model(self, number: int, data: bytes, sync_batch_norm: bool, seed: int) -> None:
        from unisono.backends.torch.worker_copy import WorkerModel

        self._models[number] = WorkerModel(data, self._group, sync_batch_norm, seed)

    def do_forget(self, number: int) -> None:
        self._models.pop(number, None)

    def do_values(self, number: int, places: list[int], trainable: list[bool]) -> None:
        self._models[number].receive_values(places, trainable)

    def do_checksums(self, number: int) -> None:
        self._models[number].send_checksums()

    def do_step(
        self, number: int, name: str, layout: Any, num_rows: int, training: bool, kinds: Any
    ) -> None:
        assert self._memory is not None
        self._models[number].step(name, layout, self._memory, num_rows, training, kinds)


def main() -> None:
    file, rank, size, store = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = socket.socket(fileno=file)
    end_with_parent(line)
    channel = Channel(line)
    try:
        if (policy := Policy.from_environment()) != Policy():
            apply_policy(policy, Policy())
        Worker(channel, rank, size, store).serve()
    except EOFError:
        pass
    except BaseException as error:
        # If another replica has failed, the first one looks for the cause: leaving frees those who
        # still wait for this one, and the report says that it is not this one.
        send_error(channel, error)
        os._exit(1)
    # Not sys.exit: what the frameworks do at exit may wait for replicas that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
