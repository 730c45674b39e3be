"""What worker processes tell the process that started them: a result, or why there is none.

When one of them fails, others fail of it within milliseconds. Their echoes are told apart from the
cause, which is what the caller sees. cloudpickle is imported where it is used: `import unisono`
is to load nothing that a program may not need.
"""

import sys
import traceback
from collections.abc import Iterable
from typing import Any

from unisono.errors import PeerLostError, WorkerError
from unisono.launch.channel import Channel
from unisono.launch.workers import Worker, Workers
from unisono.pickling import dumps

_AFTERMATH_S = 3.0


def answer(channel: Channel, result: Any) -> None:
    """Tell what a function returned."""
    channel.send(("result", dumps(result), ""))


def report(channel: Channel, error: BaseException) -> None:
    """Tell what was raised, with its traceback."""
    text = "".join(traceback.format_exception(error))
    kind = "lost" if is_echo(error) else "error"
    try:
        data = dumps(error.with_traceback(None))
    except Exception:
        data = None
    try:
        channel.send((kind, data, text))
    except OSError:
        print(text, file=sys.stderr, flush=True)


def is_echo(error: BaseException | None) -> bool:
    """Whether an exception is what another process' end looks like from here."""
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
        told = workers.pending(timeout_s=1.0)
        gone = [w for w in workers if w.rank not in results and not w.is_alive]
        if told is None:
            if gone:
                raise WorkerError(f"{gone[0].how_it_ended()} {advice}")
            continue
        worker, (kind, data, _) = told
        if kind != "result":
            raise _cause(workers, told, gone, advice)
        results[worker.rank] = cloudpickle.loads(data)
    return [results[rank] for rank in range(workers.size)]


def first_cause(workers: Workers, advice: str, echoes: Iterable[int] = ()) -> BaseException:
    """Why a collective failed: what a worker raised, or how it ended.

    `echoes` are the ranks that have told of another one's end already.
    """
    bystanders = set(echoes)
    while (told := workers.pending(timeout_s=_AFTERMATH_S)) is not None:
        worker, (kind, data, text) = told
        if kind == "error":
            return worker_error(worker.rank, data, text)
        bystanders.add(worker.rank)
    suspects = [worker for worker in workers if worker.rank not in bystanders] or list(workers)
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


def _cause(workers: Workers, first: Any, gone: list[Worker], advice: str) -> BaseException:
    """The cause, once a worker has told of a failure; `gone` had ended by then."""
    heard = [first]
    while (told := workers.pending(timeout_s=0.05)) is not None:
        heard.append(told)
    spoke = {worker.rank for worker, _ in heard}
    # One that had ended without a word did so before the others could fail of it.
    silent = [worker for worker in gone if worker.rank not in spoke]
    if silent:
        return WorkerError(f"{silent[0].how_it_ended()} {advice}")
    errors = [told for told in heard if told[1][0] == "error"]
    if errors:
        worker, (_, data, text) = errors[0]
        return worker_error(worker.rank, data, text)
    return first_cause(workers, advice, spoke)
