"""Starts a run on this node, supervises it to its end, and reports how it ended.

On one node everything listens on loopback alone. Across nodes the launchers connect to the
coordinator's address, and the processes to another, free port of the same address.
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
from collections.abc import Callable, Iterator
from typing import Any

from unisono.devices.cpu import num_cores
from unisono.errors import LaunchError
from unisono.launch import network
from unisono.launch.failure import Outcome
from unisono.launch.nodes import Hello, NodeServer, OtherNodes, connect_to_node_0
from unisono.launch.orphan_reaper import OrphanReaper
from unisono.launch.plan import Facts, assign_resources
from unisono.launch.preemption_signal import PREEMPTION_SIGNAL
from unisono.launch.processes import LocalProcesses
from unisono.launch.rendezvous import RendezvousServer
from unisono.launch.request import Request, check_program
from unisono.launch.streams import OUTCOME, Output
from unisono.launch.supervisor import ChiefSupervisor, NodeSupervisor, Supervisor
from unisono.launch.wire import new_secret, secret_of_run, shared_secret
from unisono.topology import is_slurm_task

_Joined = tuple[Facts, OtherNodes, RendezvousServer | None]


def start(request: Request) -> int:
    """Run a program as requested, and print why if it failed; the exit code."""
    outcome = perform(request, is_last=True)
    sys.stdout.flush()
    sys.stderr.write(outcome.text)
    sys.stderr.flush()
    return outcome.code


def perform(request: Request, *, is_last: bool = False) -> Outcome:
    """Run a program as requested; LaunchError where it cannot be started.

    `is_last`: this process ends with the run, so a second Ctrl-C that comes when all is over is
    ignored, and changes no exit code.
    """
    check_program(request.program)
    began = time.monotonic()
    with _signals(is_last) as signals, contextlib.ExitStack() as stack:
        facts, peers, server = _join(request, stack)
        output = _open_output(request)
        stack.callback(output.close)
        reaper = OrphanReaper()
        stack.callback(reaper.close)
        resources = assign_resources(
            request.num_processes,
            gpus=request.gpus,
            cores=sorted(os.sched_getaffinity(0)),
            num_cores=num_cores(),
            policy=request.policy,
            given=os.environ,
            is_legacy=request.is_legacy,
        )
        processes = LocalProcesses(
            request.program,
            resources,
            facts,
            output=output,
            reaper=reaper,
            host=_host_name(facts.host if request.num_nodes > 1 else None),
            interrupt_s=request.interrupt_s,
        )
        stack.callback(processes.close)
        stack.callback(processes.kill)
        supervisor: Supervisor
        if server is not None:
            supervisor = ChiefSupervisor(processes, peers, server)
        else:
            supervisor = NodeSupervisor(processes, next(iter(peers)))
        signals.preempt = supervisor.preempt
        signals.interrupt = supervisor.interrupt
        outcome = supervisor.supervise()
    _write_outcome(request, outcome, time.monotonic() - began)
    return outcome


def _join(request: Request, stack: contextlib.ExitStack) -> _Joined:
    """What this node must know of the run, once all nodes have joined."""
    if request.num_nodes == 1:
        return _start_single_node(request, stack)
    assert request.coordinator is not None
    host, port = network.split_address(request.coordinator)
    shared = request.secret or shared_secret(os.environ)
    if request.node:
        return _join_nodes(request, host, port, shared, stack)
    return _host_nodes(request, host, port, shared, stack)


def _start_single_node(request: Request, stack: contextlib.ExitStack) -> _Joined:
    if request.world_size not in (None, request.num_processes):
        raise LaunchError(
            f"Asked for a world of {request.world_size} processes; this one node has "
            f"{request.num_processes}. Make the numbers agree, or add --nodes."
        )
    secret = new_secret()
    server = RendezvousServer(request.num_processes, secret)
    stack.callback(server.close)
    interface = network.interface_of(network.LOOPBACK)
    facts = _facts(
        request,
        first_rank=0,
        world_size=request.num_processes,
        coordinator=server.address,
        secret=secret,
        host=network.LOOPBACK,
        interface=interface,
    )
    return facts, OtherNodes(), server


def _host_nodes(
    request: Request, name: str, port: int, shared: str, stack: contextlib.ExitStack
) -> _Joined:
    host = network.own_address(name, request.interface)
    own = _hello(request, host)
    nodes = NodeServer(own, (port, *request.other_ports), shared)
    stack.callback(nodes.close)
    peers = nodes.gather(request.start_timeout_s)
    stack.callback(OtherNodes(peers).close)
    counts = [own.num_processes, *(peer.hello.num_processes for peer in peers)]
    run = secrets.token_hex(16)
    secret = secret_of_run(shared, run)
    server = RendezvousServer(sum(counts), secret, host=host)
    stack.callback(server.close)
    facts = _facts(
        request,
        first_rank=0,
        world_size=sum(counts),
        coordinator=server.address,
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
                "coordinator": server.address,
                "run": run,
                "timeout_s": request.timeout_s,
            }
        )
    return facts, OtherNodes(peers), server


def _join_nodes(
    request: Request, name: str, port: int, shared: str, stack: contextlib.ExitStack
) -> _Joined:
    if request.interface is not None:
        host = network.address_of(request.interface)
    else:
        host = network.address_towards(name, port)
    chief, welcome = connect_to_node_0(
        str(request.coordinator), shared, _hello(request, host), request.start_timeout_s
    )
    peers = OtherNodes([chief])
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
    return Hello(
        request.node,
        request.num_nodes,
        request.num_processes,
        request.world_size,
        host,
        _host_name(host),
    )


def _host_name(address: str | None) -> str:
    name = f"host {socket.gethostname()}"
    return name if address is None else f"{name} at {address}"


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


def _write_outcome(request: Request, outcome: Outcome, seconds: float) -> None:
    """Beside the logs, for Slurm jobs that the cluster no longer remembers."""
    if request.log_folder is None or request.node:
        return
    record = {"code": outcome.code, "seconds": round(seconds, 1), "text": outcome.text}
    with contextlib.suppress(OSError):
        (request.log_folder / OUTCOME).write_text(json.dumps(record))


class _Signals:
    """What signals do: end the run or preempt it; before it is running, they end this process.

    Slurm sends SIGTERM when it takes a job away, some time before it kills it: the first one is
    a preemption.
    """

    interrupt: Callable[[int], None] | None = None
    preempt: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._preempting: set[int] = {PREEMPTION_SIGNAL}
        if is_slurm_task(os.environ):
            self._preempting.add(signal.SIGTERM)
        self.received: set[int] = set()

    def receive(self, number: int, frame: object) -> None:
        self.received.add(number)
        if number in self._preempting and self.preempt is not None:
            self._preempting.discard(signal.SIGTERM)
            self.preempt()
        elif number == PREEMPTION_SIGNAL:
            pass
        elif self.interrupt is None:
            raise SystemExit(128 + number)
        else:
            self.interrupt(number)


@contextlib.contextmanager
def _signals(is_last: bool) -> Iterator[_Signals]:
    signals = _Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals  # Python handles signals in its main thread alone.
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, PREEMPTION_SIGNAL)
    # What is ignored, as under nohup, stays ignored.
    before = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, signals.receive)
    # Where it is ignored, as some parents leave it, the kernel keeps no exit codes.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            is_over = is_last and number in signals.received
            signal.signal(number, signal.SIG_IGN if is_over else handler)
