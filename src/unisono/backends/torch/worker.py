"""The program of a torch replica's process other than the first; see worker_pool.Worker.

Run as `python -m unisono.backends.torch.worker SOCKET RANK SIZE STORE`, where SOCKET is the number
of an inherited socket; it ends when that closes. A file of its own, since torch and Keras may be
imported only after the policy of the first process applies: it sets variables that they read.
"""

import os
import signal
import socket
import sys

from unisono.backends.settings import apply_policy
from unisono.devices import Policy
from unisono.launch.channel import Channel, end_with_parent
from unisono.launch.workers import send_error


def main() -> None:
    file, rank, size, store = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = socket.socket(fileno=file)
    end_with_parent(line)
    channel = Channel(line)
    try:
        if (policy := Policy.from_environment()) != Policy():
            apply_policy(policy, Policy())
        from unisono.backends.torch.worker_pool import Worker

        Worker(channel, rank, size, store).serve()
    except EOFError:
        pass
    except BaseException as error:
        # Exiting frees the replicas that wait for this one; the report tells the first process
        # whether this error is the cause or follows from another replica's.
        send_error(channel, error)
        os._exit(1)
    # Not sys.exit: what the frameworks do at exit may wait for replicas that are gone.
    os._exit(0)


if __name__ == "__main__":
    main()
