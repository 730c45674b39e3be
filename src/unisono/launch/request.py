"""The request for a run on this node, and checks of it before anything is started.

The launcher must not import a user's packages, which may load a framework: whether a module can be
run by `-m` is found out without importing it. `-np` and `-H` are those of horovodrun.
"""

import argparse
import dataclasses
import importlib.machinery
import importlib.util
import os
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.devices import Policy, Selection
from unisono.errors import LaunchError
from unisono.launch.network import addresses
from unisono.launch.plan import START_TIMEOUT_S, TIMEOUT_S
from unisono.launch.streams import Show

_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Request:
    """What a node's launcher is asked to run."""

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
    """The secret of the nodes' launchers; the user's own where none is given."""
    interface: str | None = None
    world_size: int | None = None
    log_folder: Path | None = None
    is_all_shown: bool = False
    is_legacy: bool = False
    """Whether names that Keras has removed are to work in the program."""
    timeout_s: float = TIMEOUT_S
    start_timeout_s: float = START_TIMEOUT_S
    interrupt_s: float = 5.0
    """How long the processes have to end after a first Ctrl-C, to save their work."""
    show: Show | None = None
    """Called with 1 (stdout) or 2 (stderr) and what is shown, instead of writing to our streams."""


def check_program(program: Sequence[str]) -> None:
    """Refuse what cannot be run, before anything is started."""
    if program[0] == "-m":
        _check_module(program[1])
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


def _check_module(name: str) -> None:
    """LaunchError where Python would not find a module of that name."""
    top, *rest = name.split(".")
    sys.path.insert(0, os.getcwd())  # Where `python -m` looks first.
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop(0)
    for i, _ in enumerate(rest, 1):
        if spec is None or spec.submodule_search_locations is None:
            break
        full = ".".join([top, *rest[:i]])
        spec = importlib.machinery.PathFinder.find_spec(full, spec.submodule_search_locations)
    else:
        if spec is not None and spec.submodule_search_locations is not None:
            full, places = f"{name}.__main__", spec.submodule_search_locations
            spec = importlib.machinery.PathFinder.find_spec(full, places)
        if spec is not None:
            return
    raise LaunchError(
        f"Asked to run the module {name!r}; Python finds none of that name that can be run. Look "
        "at its spelling, and at the folder and the environment that this is run in."
    )


@dataclass(frozen=True)
class HostSlots:
    """One entry of `-H`: a host, and how many processes it takes."""

    host: str
    slots: int


def parse_hosts(text: str) -> list[HostSlots]:
    """The entries of `-H a:2,b:2`; LaunchError where one is malformed."""
    found = []
    for part in text.split(","):
        host, _, slots = part.strip().rpartition(":") if ":" in part else (part.strip(), "", "1")
        if not host or not slots.isdigit() or not int(slots):
            raise LaunchError(
                f"Found {part!r} in -H {text!r}. Write host:slots with at least one slot each, "
                "such as -H a:2,b:2."
            )
        found.append(HostSlots(host, int(slots)))
    return found


def local_names() -> set[str]:
    """What this machine is called."""
    name = socket.gethostname()
    own = {address for _, address in addresses()}
    return {*_LOCAL, name, name.split(".")[0], socket.getfqdn(), *own}


def spread(hosts: Sequence[HostSlots], num_processes: int | None) -> list[HostSlots]:
    """The processes of each host, the first filled first, as horovodrun does it."""
    total = sum(entry.slots for entry in hosts)
    left = total if num_processes is None else num_processes
    if left > total:
        raise LaunchError(
            f"Asked for -np {num_processes}; the hosts of -H have {total} slot(s). Give them more, "
            "or ask for fewer processes."
        )
    found = []
    for entry in hosts:
        taken = min(entry.slots, left)
        left -= taken
        if taken:
            found.append(HostSlots(entry.host, taken))
    return found


def merge_local(hosts: Sequence[HostSlots], local: set[str]) -> list[HostSlots]:
    """One entry for each host: names of this machine are one, and so are repeated names."""
    slots: dict[str, int] = {}
    own = next((entry.host for entry in hosts if entry.host in local), "")
    for entry in hosts:
        host = own if entry.host in local else entry.host
        slots[host] = slots.get(host, 0) + entry.slots
    return [HostSlots(host, count) for host, count in slots.items()]


def how_to_start(hosts: Sequence[HostSlots], program: Sequence[str], port: int) -> str:
    """The command for each host: unisono does not log in to other hosts."""
    lines = [
        "unisono does not log in to other hosts. Start the run on each of them, with one address "
        "of the first that all can reach:"
    ]
    for node, entry in enumerate(hosts):
        words = ["unisono", "run", "--replicas", str(entry.slots), "--nodes", str(len(hosts))]
        words += ["--node-rank", str(node), "--coordinator", f"{hosts[0].host}:{port}", *program]
        lines.append(f"  on {entry.host}:  {shlex.join(words)}")
    lines.append("Under Slurm, `srun unisono run script.py` starts them all.")
    return "\n".join(lines)


def checked_option(
    convert: Callable[[str], Any], is_good: Callable[[Any], bool], what: str
) -> Callable[[str], Any]:
    """A `type=` for argparse: converts a word, and refuses what is not `what`."""

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not is_good(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return parse
