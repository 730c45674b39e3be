"""`-np` and `-H`, as horovodrun spells them: how many processes on which hosts."""

import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.errors import LaunchError
from unisono.launch.network import addresses

_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class HostSlots:
    """One entry of `-H`: a host, and how many processes it takes."""

    host: str
    slots: int


def parse_hosts(text: str) -> list[HostSlots]:
    """The entries of `-H a:2,b:2`; LaunchError for what is none."""
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
    """What to type on each host: nobody logs in to another host here."""
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
