"""Worker processes of this machine: started as fresh interpreters, watched, and ended.

Fresh interpreters, not multiprocessing, which would run the user's script again in each of them. A
worker ends when its channel to the parent closes, however the parent ended; it has a session of its
own, so that Ctrl-C reaches the parent alone, which then decides. When one worker fails, others fail
as a consequence within milliseconds: those failures are told apart from the cause, which is what
the caller sees.
"""

import contextlib
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

from unisono.errors import PeerLostError, WorkerError
from unisono.launch.channel import Channel
from unisono.launch.failure import signal_name
from unisono.pickling import dumps

_END_TIMEOUT_S = 5.0
_WATCH_S = 0.5


class WorkerProcess:
    """One process and the channel to it."""

    def __init__(
        self,
        rank: int,
        module: str,
        arguments: Sequence[str],
        env: dict[str, str],
        *,
        is_shown: bool = False,
    ) -> None:
        """`is_shown`: what the process prints is also printed here, line by line."""
        self.rank = rank
        self.channel, theirs = Channel.pair()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._relays: list[threading.Thread] = []
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # -P: the search path is this process' own, without the current folder.
                    [sys.executable, "-P", "-m", module, str(theirs.fileno()), *arguments],
                    env=_environment(env),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if is_shown else self._output,
                    stderr=subprocess.PIPE if is_shown else self._output,
                    start_new_session=True,
                )
            except BaseException:
                self.channel.close()
                self._output.close()
                raise
        # Through Python's own streams, so that a notebook shows them.
        for pipe, name in [(self._process.stdout, "stdout"), (self._process.stderr, "stderr")]:
            if pipe is not None:
                relay = threading.Thread(target=self._show, args=(pipe, name), daemon=True)
                self._relays.append(relay)
                relay.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def how_it_ended(self) -> str:
        """A sentence about the exit, with the last lines that the process printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        if code is None:
            how = "does not answer"
        elif code < 0:
            how = f"was ended by {signal_name(-code)}"
        else:
            how = f"exited with code {code}"
        text = f"Replica {self.rank} (process {self.pid}) {how}."
        last = self._last_lines()
        return f"{text} Its last output:\n{last}" if last else text

    def wait(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def kill(self) -> None:
        if self.is_alive:
            self._process.kill()
        self._process.wait()
        for relay in self._relays:
            relay.join(_END_TIMEOUT_S)
        self._output.close()

    def _show(self, pipe: IO[bytes], name: str) -> None:
        with pipe:
            for line in pipe:
                self._output.write(line)
                stream = getattr(sys, name)
                stream.write(line.decode(errors="replace"))
                stream.flush()

    def _last_lines(self, num_lines: int = 20) -> str:
        self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, self._output.tell() - 16_000))
        return "\n".join(self._output.read().decode(errors="replace").splitlines()[-num_lines:])


class Workers:
    """A group of workers: the last ranks of `size`, one for each environment.

    The process that starts them may be rank 0 itself; if not, it prints what their rank 0 prints.
    """

    def __init__(
        self, module: str, size: int, arguments: Sequence[str], envs: list[dict[str, str]]
    ):
        self.size = size
        self._workers: list[WorkerProcess] = []
        try:
            for rank, env in zip(range(size - len(envs), size), envs, strict=True):
                words = [str(rank), str(size), *arguments]
                self._workers.append(WorkerProcess(rank, module, words, env, is_shown=rank == 0))
        except BaseException:
            self.end()
            raise

    def __iter__(self) -> Any:
        return iter(self._workers)

    @property
    def are_alive(self) -> bool:
        return bool(self._workers) and all(worker.is_alive for worker in self._workers)

    def send(self, message: Any) -> None:
        for worker in self._workers:
            try:
                worker.channel.send(message)
            except OSError as error:
                raise WorkerError(worker.how_it_ended()) from error

    def receive(self, timeout_s: float) -> list[Any]:
        """One message of each worker, in rank order; WorkerError when one ends or is too slow."""
        deadline = time.monotonic() + timeout_s
        return [self._receive_from(worker, deadline) for worker in self._workers]

    def pending(self, timeout_s: float) -> tuple[WorkerProcess, Any] | None:
        """The first message that any worker sends within the time, or None."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
            deadline = time.monotonic() + timeout_s
            while (left := deadline - time.monotonic()) > 0 and selector.get_map():
                for key, _ in selector.select(left):
                    try:
                        return key.data, key.data.channel.receive()
                    except (EOFError, OSError):
                        selector.unregister(key.fileobj)
        return None

    def end(self) -> None:
        """End all workers: closing the channel asks them to, then they are killed."""
        for worker in self._workers:
            worker.channel.close()
        deadline = time.monotonic() + _END_TIMEOUT_S
        for worker in self._workers:
            worker.wait(max(0.0, deadline - time.monotonic()))
            worker.kill()
        self._workers = []

    def kill(self) -> None:
        """End all workers at once."""
        for worker in self._workers:
            worker.kill()
            worker.channel.close()
        self._workers = []

    def _receive_from(self, worker: WorkerProcess, deadline: float) -> Any:
        with selectors.DefaultSelector() as selector:
            selector.register(worker.channel, selectors.EVENT_READ)
            try:
                if selector.select(max(0.0, deadline - time.monotonic())):
                    return worker.channel.receive()
            except (EOFError, OSError) as error:
                raise WorkerError(worker.how_it_ended()) from error
        raise WorkerError(worker.how_it_ended())


class WorkerWatch:
    """Watches workers from a thread, for a process that may not notice when one fails.

    For workers that send nothing but errors, once they have started.
    """

    def __init__(self, workers: Workers, on_failure: Callable[[], None]) -> None:
        """`on_failure`: called in the thread, when a worker has sent an error or has ended."""
        self.has_failed = False
        self._is_over = False
        self._on_failure = on_failure
        self._selector = selectors.DefaultSelector()
        for worker in workers:
            self._selector.register(worker.channel, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="unisono-workers", daemon=True).start()

    def end(self) -> None:
        self._is_over = True

    def _run(self) -> None:
        with self._selector:
            while not self._is_over:
                if self._selector.select(_WATCH_S) and not self._is_over:
                    self.has_failed = True
                    self._on_failure()
                    return


def _environment(changes: dict[str, str]) -> dict[str, str]:
    """This process' environment, with its module search path as it is now."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return {**os.environ, "PYTHONPATH": path, **changes}


_MORE_ERRORS_S = 3.0


def send_result(channel: Channel, result: Any) -> None:
    """Send what a function returned."""
    channel.send(("result", dumps(result), ""))


def send_error(channel: Channel, error: BaseException) -> None:
    """Send what was raised, with its traceback."""
    text = "".join(traceback.format_exception(error))
    kind = "lost" if is_consequence(error) else "error"
    try:
        data = dumps(error.with_traceback(None))
    except Exception:
        data = None
    try:
        channel.send((kind, data, text))
    except OSError:
        print(text, file=sys.stderr, flush=True)


def is_consequence(error: BaseException | None) -> bool:
    """Whether an exception was raised because another process ended."""
    while error is not None:
        if isinstance(error, PeerLostError):
            return True
        error = error.__cause__
    return False


def collect(workers: Workers, advice: str) -> list[Any]:
    """One result of each worker, in rank order; where one fails, the cause is raised."""
    import cloudpickle

    results: dict[int, Any] = {}
    while len(results) < workers.size:
        message = workers.pending(timeout_s=1.0)
        gone = [w for w in workers if w.rank not in results and not w.is_alive]
        if message is None:
            if gone:
                raise WorkerError(f"{gone[0].how_it_ended()} {advice}")
            continue
        worker, (kind, data, _) = message
        if kind != "result":
            raise _cause(workers, message, gone, advice)
        results[worker.rank] = cloudpickle.loads(data)
    return [results[rank] for rank in range(workers.size)]


def first_cause(workers: Workers, advice: str, victims: Iterable[int] = ()) -> BaseException:
    """Why a collective failed: what a worker raised, or how it ended.

    `victims` are the ranks that are known to have failed because of another one.
    """
    affected = set(victims)
    while (message := workers.pending(timeout_s=_MORE_ERRORS_S)) is not None:
        worker, (kind, data, text) = message
        if kind == "error":
            return worker_error(worker.rank, data, text)
        affected.add(worker.rank)
    suspects = [worker for worker in workers if worker.rank not in affected] or list(workers)
    lost = min(suspects, key=lambda worker: worker.is_alive)
    return WorkerError(f"{lost.how_it_ended()} {advice}")


def worker_error(rank: int, data: bytes | None, text: str) -> BaseException:
    """A worker's exception as it was raised there, with its traceback as a note."""
    import cloudpickle

    try:
        error = cloudpickle.loads(data) if data else None
    except Exception:
        error = None
    if not isinstance(error, BaseException):
        error = WorkerError(f"Replica {rank} failed; its traceback follows.")
    error.add_note(f"\nRaised in replica {rank}:\n{text}")
    return error


def _cause(workers: Workers, first: Any, gone: list[WorkerProcess], advice: str) -> BaseException:
    """The cause, once a worker has reported a failure; `gone` had ended by then."""
    reports = [first]
    while (message := workers.pending(timeout_s=0.05)) is not None:
        reports.append(message)
    reported = {worker.rank for worker, _ in reports}
    # One that had ended without a report did so before the others could fail because of it.
    silent = [worker for worker in gone if worker.rank not in reported]
    if silent:
        return WorkerError(f"{silent[0].how_it_ended()} {advice}")
    errors = [each for each in reports if each[1][0] == "error"]
    if errors:
        worker, (_, data, text) = errors[0]
        return worker_error(worker.rank, data, text)
    return first_cause(workers, advice, reported)
