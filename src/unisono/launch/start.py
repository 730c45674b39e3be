"""Begins a run on this node, has it conducted to its end, and tells how it ended.

On one node everything listens on loopback alone. Across nodes the launchers meet at the
coordinator's address, and the processes at another, free port of the same address.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.devices import Policy, Selection
from unisono.devices.cpu import num_cores
from unisono.errors import LaunchError
from unisono.launch import network
from unisono.launch.failure import Outcome
from unisono.launch.modules import check_module
from unisono.launch.node_follower import Follower
from unisono.launch.nodes import Hello, Host, Peers, call_host
from unisono.launch.orphan_guard import Guard
from unisono.launch.output import OUTCOME, Output, Show
from unisono.launch.plan import Facts, Seat, seats
from unisono.launch.preemption_signal import WARNING
from unisono.launch.process_watch import Watch
from unisono.launch.processes import Ranks
from unisono.launch.rendezvous import Meeting
from unisono.launch.secret import new_secret, secret_of_run, shared_secret
from unisono.launch.supervisor import Conductor
from unisono.topology import is_slurm_task


@dataclass(frozen=True)
class Request:
    """What a user asks a node's launcher for."""

    program: tuple[str, ...]
    """The script and its arguments, or `-m`, the module and its arguments."""
    num_processes: int
    gpus: Selection | None = None
    policy: Policy = dataclasses.field(default_factory=Policy)
    num_nodes: int = 1
    node: int = 0
    coordinator: str | None = None
    other_ports: tuple[int, ...] = ()
    """Where node 0 listens if the coordinator's port is taken, and the other nodes look for it."""
    secret: str | None = None
    """What the nodes' launchers share; the user's own where none is given."""
    interface: str | None = None
    world_size: int | None = None
    log_folder: Path | None = None
    is_all_shown: bool = False
    is_legacy: bool = False
    """Whether names that Keras has removed are to work in the program."""
    timeout_s: float = 600.0
    start_timeout_s: float = 300.0
    interrupt_s: float = 5.0
    """How long the processes have to end after a first Ctrl-C, to save their work."""
    show: Show | None = None
    """Takes what is shown, and whether it is stdout (1) or stderr (2), in place of our streams."""


def start(request: Request) -> int:
    """Run a program as the request says, and tell why if it failed; the exit code."""
    outcome = perform(request, is_last=True)
    sys.stdout.flush()
    sys.stderr.write(outcome.text)
    sys.stderr.flush()
    return outcome.code


def perform(request: Request, *, is_last: bool = False) -> Outcome:
    """Run a program as the request says; LaunchError where it cannot begin.

    `is_last`: this process ends with the run, so a second Ctrl-C that comes when all is over is
    ignored, and changes no exit code.
    """
    check_program(request.program)
    began = time.monotonic()
    with _signals(is_last) as signals, contextlib.ExitStack() as stack:
        facts, peers, meeting = _agree(request, stack)
        output = _open_output(request)
        stack.callback(output.close)
        guard = Guard()
        stack.callback(guard.close)
        ranks = Ranks(request.program, _seats(request), facts, output, guard)
        stack.callback(ranks.close)
        stack.callback(ranks.end, signal.SIGKILL, 0.0)
        watch = Watch(ranks, facts, _host_name(request, facts), request.interrupt_s)
        conductor: Conductor | Follower
        if meeting is not None:
            conductor = Conductor(watch, peers, meeting)
        else:
            conductor = Follower(watch, next(iter(peers)))
        signals.warn = conductor.warn
        signals.receiver = conductor.interrupt
        outcome = conductor.conduct()
    _leave_outcome(request, outcome, time.monotonic() - began)
    return outcome


def _seats(request: Request) -> list[Seat]:
    return seats(
        request.num_processes,
        gpus=request.gpus,
        cores=sorted(os.sched_getaffinity(0)),
        num_cores=num_cores(),
        policy=request.policy,
        given=os.environ,
        is_legacy=request.is_legacy,
    )


def check_program(program: Sequence[str]) -> None:
    """Refuse what cannot be run, before anything is started."""
    if program[0] == "-m":
        check_module(program[1])
        return
    path = Path(program[0])
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise LaunchError(f"Asked to run the folder {path}; it has no __main__.py.")
    try:
        if not path.is_dir():
            path.open("rb").close()
    except OSError as error:
        raise LaunchError(
            f"Asked to run {str(path)!r}; it cannot be read: {error.strerror}. Options of unisono "
            "come before the script, the script's own after it."
        ) from error


def _agree(request: Request, stack: contextlib.ExitStack) -> tuple[Facts, Peers, Meeting | None]:
    """What this node must know of the run, once it can begin."""
    if request.num_nodes == 1:
        return _agree_alone(request, stack)
    assert request.coordinator is not None
    host, port = network.split_address(request.coordinator)
    shared = request.secret or shared_secret(os.environ)
    if request.node:
        return _join_nodes(request, host, port, shared, stack)
    return _host_nodes(request, host, port, shared, stack)


def _agree_alone(
    request: Request, stack: contextlib.ExitStack
) -> tuple[Facts, Peers, Meeting | None]:
    if request.world_size not in (None, request.num_processes):
        raise LaunchError(
            f"Asked for a world of {request.world_size} processes; this one node has "
            f"{request.num_processes}. Make the numbers agree, or add --nodes."
        )
    secret = new_secret()
    meeting = Meeting(request.num_processes, secret)
    stack.callback(meeting.close)
    interface = network.interface_of(network.LOOPBACK)
    facts = _facts(
        request,
        first_rank=0,
        world_size=request.num_processes,
        coordinator=meeting.address,
        secret=secret,
        host=network.LOOPBACK,
        interface=interface,
    )
    return facts, Peers(), meeting


def _host_nodes(
    request: Request, name: str, port: int, shared: str, stack: contextlib.ExitStack
) -> tuple[Facts, Peers, Meeting | None]:
    host = network.own_address(name, request.interface)
    own = _hello(request, host)
    hosting = Host(own, (port, *request.other_ports), shared)
    stack.callback(hosting.close)
    peers = hosting.gather(request.start_timeout_s)
    stack.callback(Peers(peers).close)
    counts = [own.num_processes, *(peer.hello.num_processes for peer in peers)]
    run = secrets.token_hex(16)
    secret = secret_of_run(shared, run)
    meeting = Meeting(sum(counts), secret, host=host)
    stack.callback(meeting.close)
    facts = _facts(
        request,
        first_rank=0,
        world_size=sum(counts),
        coordinator=meeting.address,
        secret=secret,
        host=host,
        interface=network.interface_of(host),
    )
    for place, peer in enumerate(peers, 1):
        peer.send(
            {
                "do": "welcome",
                "host": dataclasses.asdict(own),
                "first_rank": sum(counts[:place]),
                "world_size": sum(counts),
                "coordinator": meeting.address,
                "run": run,
                "timeout_s": request.timeout_s,
            }
        )
    return facts, Peers(peers), meeting


def _join_nodes(
    request: Request, name: str, port: int, shared: str, stack: contextlib.ExitStack
) -> tuple[Facts, Peers, Meeting | None]:
    if request.interface is not None:
        host = network.address_of(request.interface)
    else:
        host = network.address_towards(name, port)
    chief, welcome = call_host(
        str(request.coordinator), shared, _hello(request, host), request.start_timeout_s
    )
    peers = Peers([chief])
    stack.callback(peers.close)
    request = dataclasses.replace(request, timeout_s=float(welcome["timeout_s"]))
    facts = _facts(
        request,
        first_rank=int(welcome["first_rank"]),
        world_size=int(welcome["world_size"]),
        coordinator=str(welcome["coordinator"]),
        secret=secret_of_run(shared, str(welcome["run"])),
        host=host,
        interface=network.interface_of(host),
    )
    return facts, peers, None


def _facts(request: Request, **found: Any) -> Facts:
    return Facts(
        local_size=request.num_processes,
        node=request.node,
        num_nodes=request.num_nodes,
        timeout_s=request.timeout_s,
        start_timeout_s=request.start_timeout_s,
        **found,
    )


def _hello(request: Request, host: str) -> Hello:
    name = f"host {socket.gethostname()} at {host}"
    return Hello(
        request.node, request.num_nodes, request.num_processes, request.world_size, host, name
    )


def _host_name(request: Request, facts: Facts) -> str:
    name = f"host {socket.gethostname()}"
    return f"{name} at {facts.host}" if request.num_nodes > 1 else name


def _open_output(request: Request) -> Output:
    folder = request.log_folder
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(13, "no permission to write")
        except OSError as error:
            raise LaunchError(
                f"Asked for logs in {folder}: {error.strerror}. Choose a folder that can be "
                "written to."
            ) from error
    return Output(folder=folder, is_all_shown=request.is_all_shown, show=request.show)


def _leave_outcome(request: Request, outcome: Outcome, seconds: float) -> None:
    """Beside the logs, for those who look when nobody else remembers the run."""
    if request.log_folder is None or request.node:
        return
    told = {"code": outcome.code, "seconds": round(seconds, 1), "text": outcome.text}
    with contextlib.suppress(OSError):
        (request.log_folder / OUTCOME).write_text(json.dumps(told))


class _Signals:
    """Who is told of a signal that asks us to end; before the run is under way, we just end.

    Slurm asks by SIGTERM when it takes a job away, and gives it a while: a warning at first.
    """

    receiver: Callable[[int], None] | None = None
    warn: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._warnings = {WARNING, signal.SIGTERM} if is_slurm_task(os.environ) else {WARNING}
        self.received: set[int] = set()

    def receive(self, number: int, frame: object) -> None:
        self.received.add(number)
        if number in self._warnings and self.warn is not None:
            self._warnings.discard(signal.SIGTERM)
            self.warn()
        elif number == WARNING:
            pass
        elif self.receiver is None:
            raise SystemExit(128 + number)
        else:
            self.receiver(number)


@contextlib.contextmanager
def _signals(is_last: bool) -> Iterator[_Signals]:
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals  # Python's signals are its main thread's affair.
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, WARNING)
    # What is ignored, as under nohup, stays so.
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, signals.receive)
    # Where it is ignored, as some parents leave it, the kernel keeps nobody's exit code.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            is_over = is_last and number in signals.received
            signal.signal(number, signal.SIG_IGN if is_over else handler)
