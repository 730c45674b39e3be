"""The process of one replica of `unisono.spawn`: runs the function it is sent, and answers.

Run as `python -m unisono.spawned FILE RANK SIZE`, where FILE is the number of the inherited
socket. By then `import unisono` has joined the run that the variables of its environment describe.
"""

import os
import signal
import socket
import sys

import cloudpickle

from unisono.backends.settings import apply_policy
from unisono.devices import Policy
from unisono.launch.channel import Channel, end_with_parent
from unisono.launch.client import current_world
from unisono.launch.workers import send_error, send_result
from unisono.verify.child import recorded


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = socket.socket(fileno=int(sys.argv[1]))
    end_with_parent(line)
    channel = Channel(line)
    code = 1
    try:
        _serve(channel)
        code = 0
    except EOFError:
        pass
    except BaseException as error:
        send_error(channel, error)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: what the frameworks do at exit may wait for replicas that are gone.
    os._exit(code)


def _serve(channel: Channel) -> None:
    task, cores = channel.receive()
    if cores:
        os.sched_setaffinity(0, cores)
    if (policy := Policy.from_environment()) != Policy():
        apply_policy(policy, Policy())
    # Before the function, which may use a framework as it comes: that joins the run here.
    import keras  # noqa: F401

    function, args, kwargs = cloudpickle.loads(task)
    result = None
    with recorded():
        result = function(*args, **kwargs)
    world = current_world()
    if world is not None:
        # A regular end: a process that still waits for this one gets an error that says so.
        world.leave()
    send_result(channel, result)


if __name__ == "__main__":
    main()
