"""`unisono run`: starts a program as one process per replica, here or on many nodes.

Imports no framework: a launcher that had initialized a GPU would hold memory of it. In a task of
Slurm's srun, the nodes and the coordinator are read from Slurm's variables.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.devices import Selection, choose, describe, num_gpus, remark_on_cores, select
from unisono.devices.cpu import num_cores
from unisono.errors import DeviceError
from unisono.launch.launcher import start
from unisono.launch.network import address_of, free_port
from unisono.launch.plan import START_TIMEOUT, START_TIMEOUT_S, TIMEOUT, TIMEOUT_S, is_timeout
from unisono.launch.request import (
    Request,
    check_program,
    checked_option,
    how_to_start,
    local_names,
    merge_local,
    parse_hosts,
    spread,
)
from unisono.scratch import sweep
from unisono.slurm.step import (
    SlurmStep,
    coordinator,
    launcher_role,
    read_step,
    remark_on_allocation,
)


class _UsageError(Exception):
    """The options contradict each other."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="start a script as one process per replica",
        usage="unisono run [options] script.py [arguments] | -m module [arguments]",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,
    )
    _add_devices(parser.add_argument_group("processes of this node"))
    _add_nodes(parser.add_argument_group("several nodes"))
    _add_output(parser.add_argument_group("output and time"))
    parser.add_argument(
        "--legacy", action="store_true", help="make names work that Keras and TensorFlow removed"
    )
    add_program(parser)
    parser.set_defaults(run=run, parser=parser)


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the words that name a program and its arguments."""
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    # One argument for both: of a script by itself, argparse would take a `--` that follows.
    parser.add_argument(
        "program",
        nargs=argparse.PARSER,
        metavar="script",
        help="the script, or the module with -m, and its own arguments",
    )


def run(options: argparse.Namespace) -> int:
    step = None
    if options.nodes is None and options.hosts is None:
        step = read_step(os.environ)
        if remark := remark_on_allocation(os.environ):
            print(f"unisono: {remark}", file=sys.stderr, flush=True)
    try:
        if step is not None:
            role, remark = launcher_role(step)
            if remark and step.is_first:
                print(f"unisono: {remark}", file=sys.stderr, flush=True)
            if role == "leave":
                return 0
            if role == "rank":
                _become_rank(options)
        request = request_of(options, step)
    except _UsageError as error:
        options.parser.error(str(error))
    sweep()
    return start(request)


def request_of(options: argparse.Namespace, step: SlurmStep | None = None) -> Request:
    """The request, checked for consistency, and against this machine and Slurm's resources."""
    program = _program(options)
    secret: str | None = None
    other_ports: tuple[int, ...] = ()
    options = _with_hosts(options, program)
    if step is not None and step.num_nodes > 1:
        check_program(program)
        options.nodes, options.node_rank = step.num_nodes, step.node
        found = coordinator(step, os.environ, options.start_timeout)
        options.coordinator, other_ports, secret = found
    _check_nodes(options)
    if options.interface is not None:
        address_of(options.interface)  # A wrong name fails now, also where no interface is needed.
    if options.legacy:
        _check_source(program[0])
    num_processes, gpus = _devices(options, step)
    if gpus is None or gpus.is_simulated:
        _remark_on_cores(step, num_processes)
    return Request(
        program=program,
        num_processes=num_processes,
        gpus=gpus,
        policy=describe(
            memory=_memory(options.memory),
            cpu_threads=options.cpu_threads,
            deterministic=options.deterministic or None,
        ),
        num_nodes=options.nodes,
        node=options.node_rank,
        coordinator=options.coordinator,
        other_ports=other_ports,
        secret=secret,
        interface=options.interface,
        world_size=options.np,
        log_folder=options.log_dir,
        is_all_shown=options.show == "all",
        is_legacy=options.legacy,
        timeout_s=options.timeout,
        start_timeout_s=options.start_timeout,
    )


def _check_source(name: str) -> None:
    """Report that an old program is Python 2, before processes are started that fail with less."""
    from unisono.compat.syntax import check_syntax

    path = Path(name)
    if path.suffix == ".py" and path.is_file():
        with contextlib.suppress(OSError):  # Reported when it is run.
            check_syntax(path.read_bytes(), name)


def _program(options: argparse.Namespace) -> tuple[str, ...]:
    words = options.program[options.program[0] == "--" :]
    return ("-m", *words) if options.is_module else tuple(words)


def _become_rank(options: argparse.Namespace) -> None:
    """Replace this process by the program, which reads its rank from Slurm; does not return."""
    given = [
        f"--{name.replace('_', '-')}"
        for name in ("replicas", "gpus", "np", "memory", "cpu_threads", "log_dir", "interface")
        if getattr(options, name) is not None
    ]
    given += ["--legacy"] * options.legacy + ["--deterministic"] * options.deterministic
    if given:
        raise _UsageError(
            f"{', '.join(given)} needs one task on each node, and Slurm started more: #SBATCH "
            "--ntasks-per-node=1"
        )
    program = _program(options)
    check_program(program)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *program])


def _add_devices(group: Any) -> None:
    group.add_argument("--replicas", type=_count, metavar="N", help="how many (default: one a GPU)")
    group.add_argument("--gpus", metavar="0,1", help="ids of GPUs, or idle, or idle:2")
    group.add_argument("-np", type=_count, metavar="N", help="how many on all nodes, as horovodrun")
    group.add_argument("-H", dest="hosts", metavar="a:2,b:2", help="hosts and slots, as horovodrun")
    group.add_argument("--memory", metavar="grow", help="of each GPU: grow, all, 8GiB or 0.5")
    group.add_argument("--cpu-threads", type=_count, metavar="N", help="threads of each process")
    group.add_argument(
        "--deterministic", action="store_true", help="the same bits in every run on GPUs; slower"
    )


def _add_nodes(group: Any) -> None:
    group.add_argument("--nodes", type=_count, metavar="K", help="how many (default: 1)")
    group.add_argument("--node-rank", type=_index, metavar="R", help="this one's number, from 0")
    group.add_argument("--coordinator", metavar="host:port", help="a free port of node 0")
    group.add_argument("--interface", metavar="NAME", help="the network interface to use")


def _add_output(group: Any) -> None:
    group.add_argument("--log-dir", type=Path, metavar="D", help="write each rank's output there")
    group.add_argument(
        "--show", choices=("all", "chief"), default="chief", help="whose output is shown"
    )
    group.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        default=os.environ.get(TIMEOUT) or TIMEOUT_S,
        help=f"end the run when a process keeps others waiting so long (default: {TIMEOUT_S:g})",
    )
    group.add_argument(
        "--start-timeout",
        type=_seconds,
        metavar="S",
        default=os.environ.get(START_TIMEOUT) or START_TIMEOUT_S,
        help=f"how long nodes wait for each other (default: {START_TIMEOUT_S:g})",
    )


def _with_hosts(options: argparse.Namespace, program: Sequence[str]) -> argparse.Namespace:
    """The options with what `-np` and `-H` mean for this node."""
    options = argparse.Namespace(**vars(options))
    if options.hosts is not None:
        entries = merge_local(parse_hosts(options.hosts), local_names())
        entries = spread(entries, options.np)
        words = ("--legacy", *program) if options.legacy else program
        is_here = len(entries) == 1 and entries[0].host in local_names()
        if options.nodes is None and not is_here:
            raise _UsageError(f"-H names other hosts. {how_to_start(entries, words, free_port())}")
        if (options.nodes or 1) != len(entries):
            raise _UsageError(f"--nodes is {options.nodes}, and -H fills {len(entries)} host(s)")
        here = entries[min(options.node_rank or 0, len(entries) - 1)].slots
        options.np = sum(entry.slots for entry in entries)
    elif options.np is not None:
        here, rest = divmod(options.np, options.nodes or 1)
        if rest:
            raise _UsageError(
                f"-np {options.np} on {options.nodes} nodes is not a whole number each"
            )
    else:
        return options
    if options.replicas not in (None, here):
        raise _UsageError(f"--replicas is {options.replicas}, and -np means {here} on this node")
    options.replicas = here
    return options


def _check_nodes(options: argparse.Namespace) -> None:
    options.nodes = options.nodes or 1
    if options.nodes == 1:
        if options.node_rank or options.coordinator is not None:
            raise _UsageError("--node-rank and --coordinator need --nodes, the number of all nodes")
        options.node_rank = 0
    elif options.node_rank is None or options.coordinator is None:
        raise _UsageError(
            "--nodes needs both --node-rank (0 on one of them) and --coordinator host:port"
        )
    elif options.node_rank >= options.nodes:
        last = options.nodes - 1
        raise _UsageError(f"--node-rank {options.node_rank} is outside: nodes are 0 to {last}")


def _devices(options: argparse.Namespace, step: SlurmStep | None) -> tuple[int, Selection | None]:
    """The number of processes, and their GPUs, if any."""
    try:
        return _chosen(options)
    except DeviceError as error:
        if step is None:
            raise
        raise DeviceError(
            f"{error} Slurm gave this task {step.num_seen} GPU(s): a job gets more by #SBATCH "
            "--gres=gpu:N, on each of its nodes."
        ) from error


def _remark_on_cores(step: SlurmStep | None, num_processes: int) -> None:
    remark = remark_on_cores(num_processes, "processes")
    if remark is None or (step is not None and not step.is_first):
        return
    if step is not None:
        remark = (
            f"{num_processes} processes share the {num_cores()} core(s) that Slurm gave this "
            f"task. A job gets more by #SBATCH --cpus-per-task={num_processes}"
        )
    print(f"unisono: {remark}", file=sys.stderr, flush=True)


def _chosen(options: argparse.Namespace) -> tuple[int, Selection | None]:
    if options.gpus is not None:
        chosen = select(_gpus(options.gpus))
        if options.replicas not in (None, len(chosen.numbers)):
            raise _UsageError(
                f"--gpus {options.gpus} is {len(chosen.numbers)} GPU(s) and one process each, not "
                f"{options.replicas}: leave one of the two out"
            )
        return len(chosen.numbers), chosen
    placement = choose(replicas=options.replicas, gpus=None, num_visible_gpus=num_gpus())
    if placement.kind == "cpu" and not placement.is_simulated:
        return placement.num_replicas, None
    return placement.num_replicas, select(placement.indices)


def _gpus(text: str) -> str | list[int]:
    parts = [part.strip() for part in text.split(",")]
    return [int(part) for part in parts] if all(map(str.isdigit, parts)) else text


def _memory(text: str | None) -> str | float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


_count = checked_option(int, lambda value: value >= 1, "a whole number of at least 1")
_index = checked_option(int, lambda value: value >= 0, "a whole number from 0")
_seconds = checked_option(float, is_timeout, "a number of seconds above 0")
