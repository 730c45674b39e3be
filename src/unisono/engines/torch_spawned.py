"""The process of one replica of `unisono.spawn`: runs the function it is sent, and answers.

Run as `python -m unisono.engines.torch_spawned FILE RANK SIZE STORE`, where FILE is the number of
the inherited socket.
"""

import os
import signal
import socket
import sys

import cloudpickle

from unisono.engines.torch_worker import report
from unisono.launch.channel import Channel
from unisono.launch.lifeline import end_with_parent


def main() -> None:
    file, rank, size, store = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = socket.socket(fileno=file)
    end_with_parent(line)
    channel = Channel(line)
    code = 1
    try:
        _serve(channel, rank, size, store)
        code = 0
    except EOFError:
        pass
    except BaseException as error:
        _answer(channel, error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(channel: Channel, rank: int, size: int, store: str) -> None:
    task, seed = channel.receive()
    import keras

    from unisono.engines.torch_group import Group
    from unisono.engines.torch_loop import join_world
    from unisono.engines.torch_team import default_device

    join_world(Group(store, rank, size, default_device()))
    keras.utils.set_random_seed(seed)
    function, args, kwargs = cloudpickle.loads(task)
    result = function(*args, **kwargs)
    channel.send(("result", cloudpickle.dumps(result), ""))


def _answer(channel: Channel, error: BaseException) -> None:
    from unisono.engines.torch_group import PeerLost

    if isinstance(error, PeerLost):
        # Another replica has failed first, and tells the cause itself.
        channel.send(("lost", None, ""))
    else:
        report(channel, error)


if __name__ == "__main__":
    main()
