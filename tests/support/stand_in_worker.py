"""A worker for the tests of launch: does the first word of each message, answers with the rest.

Run as `python -m stand_in_worker FILE RANK SIZE WORD…`, as Workers starts it.
"""

import os
import signal
import socket
import sys
import time

from unisono.launch.channel import Channel, end_with_parent


def main() -> None:
    line = socket.socket(fileno=int(sys.argv[1]))
    if "without a lifeline" not in sys.argv:
        end_with_parent(line)
    channel = Channel(line)
    print(f"worker {sys.argv[2]} listens", flush=True)
    while True:
        try:
            word, *arguments = channel.receive()
        except EOFError:
            os._exit(0)
        answer(channel, word, arguments)


def answer(channel: Channel, word: str, arguments: list) -> None:
    match word:
        case "echo":
            channel.send(arguments)
        case "who":
            channel.send((sys.argv[2:], os.environ.get("STAND_IN"), os.getpid(), os.getsid(0)))
        case "path":
            channel.send(sys.path)
        case "memory":
            memory = channel.receive_memory()
            channel.send((memory.num_bytes, memory.buffer[:4], memory.buffer[-4:]))
            memory.buffer[-4:] = b"back"
            channel.send("written")
        case "echo_if_rank":
            if sys.argv[2] == str(arguments[0]):
                channel.send(arguments)
        case "wait":
            channel.send("waiting")
            time.sleep(arguments[0])
        case "print":
            print(*arguments, sep="\n", flush=True)
        case "exit":
            os._exit(arguments[0])
        case "raise":
            raise RuntimeError(arguments[0])
        case "signal":
            os.kill(os.getpid(), signal.Signals(arguments[0]))


if __name__ == "__main__":
    main()
