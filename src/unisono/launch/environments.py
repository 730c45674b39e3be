"""Where processes meet that somebody else's launcher has started: torchrun, MPI, srun, TF_CONFIG.

No launcher of ours is there to host the meeting, so the first process does, in a thread. On one
node it leaves its address in a file that only this user can read. Across nodes the address must be
known to all before anybody has spoken: the first host, and a port worked out from the run's name.
If that port is taken, the next one of a fixed row is; a run's secret tells it from all others. Who
sits on such a port can only delay: a proof holds for one port, and each has seconds to give it.
"""

import atexit
import hashlib
import json
import os
import re
import stat
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from unisono.errors import LaunchError
from unisono.launch.client import greet_at
from unisono.launch.network import LOOPBACK, join_address, own_address, split_address
from unisono.launch.plan import TIMEOUT
from unisono.launch.rendezvous import Meeting
from unisono.launch.secret import new_secret, secret_of_run, shared_secret
from unisono.scratch import hold, sweep_files
from unisono.topology import COORDINATOR, Topology

_FIRST_PORT, _NUM_PORTS = 61000, 4000
"""Above the ports that the kernel hands out by itself."""
_NUM_TRIES = 8
_STRIDE = 251
_TIMEOUT_S = 600.0
_TRY_S = 2.0
_NOTE_NAME = re.compile("[0-9a-f]{32}")
_RETRY_S = 0.2
_PARTING_S = 5.0


@dataclass(frozen=True)
class Place:
    """Where the processes of a run find each other."""

    run: str
    """The run's name, the same in all of its processes."""
    host: str = LOOPBACK
    ports: tuple[int, ...] = ()
    """Where to listen, the first that is free; none where a file tells."""


def meeting_place(facts: Topology, env: Mapping[str, str]) -> Place:
    """The place that every process of a run works out for itself; LaunchError where none can."""
    run = _run_name(facts, env)
    if facts.coordinator is not None:
        host, port = split_address(facts.coordinator)
        return Place(run, host, (port,))
    if facts.num_nodes == 1:
        return Place(run)
    if facts.launcher == "torchrun":
        host = env["MASTER_ADDR"]
    elif facts.launcher == "slurm":
        host = first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_NODELIST", ""))
    elif facts.launcher == "tf_config":
        cluster = json.loads(env["TF_CONFIG"])["cluster"]
        host = split_address((cluster.get("chief") or cluster["worker"])[0])[0]
    else:
        raise LaunchError(
            f"This process is rank {facts.rank} of {facts.world_size} on {facts.num_nodes} nodes, "
            f"and MPI does not say where they can meet. Set {COORDINATOR}=host:port for all of "
            "them, with the first node's address and a free port of it, such as mpirun -x "
            f"{COORDINATOR}=10.0.0.1:4000."
        )
    return Place(run, host, ports_of(run))


def arrange(
    facts: Topology, env: Mapping[str, str], *, start_timeout_s: float
) -> tuple[Topology, str]:
    """Host the meeting or find it: the topology with its address, and the run's secret."""
    place = meeting_place(facts, env)
    if not place.ports:
        path = _folder() / hashlib.sha256(place.run.encode()).hexdigest()[:32]  # _NOTE_NAME
        if facts.is_chief:
            secret = new_secret()
            meeting = _host(facts, place, secret, env)
            _leave_note(path, meeting.address, secret)
            address = meeting.address
        else:
            address, secret = _read_note(path, start_timeout_s)
    else:
        secret = secret_of_run(shared_secret(env), place.run)
        if facts.is_chief:
            address = _host(facts, place, secret, env).address
        else:
            address = find(place, secret, start_timeout_s)
    return replace(facts, coordinator=address), secret


def first_host(nodes: str) -> str:
    """The first of Slurm's short list of hosts.

    >>> first_host("gpu[003-007,9],login")
    'gpu003'
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    name = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0] if first else "").strip()
    if not name:
        raise LaunchError(f"Slurm's list of nodes is {nodes!r}, which names none.")
    return name


def _run_name(facts: Topology, env: Mapping[str, str]) -> str:
    names = {
        "torchrun": (
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
            "MASTER_ADDR",
            "MASTER_PORT",
        ),
        "slurm": ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        "openmpi": ("PMIX_NAMESPACE",),
        "mpich": (),
    }.get(facts.launcher, ())
    parts = [facts.launcher, str(facts.world_size), *(env.get(name, "") for name in names)]
    if facts.launcher == "tf_config":
        parts.append(json.dumps(json.loads(env["TF_CONFIG"])["cluster"], sort_keys=True))
    elif not any(parts[2:]) and facts.num_nodes == 1:
        parts.append(str(os.getppid()))  # On one node the launcher is everybody's parent.
    return " ".join(parts)


def ports_of(run: str) -> tuple[int, ...]:
    """The ports at which a run may be met, worked out from its name."""
    start = int.from_bytes(hashlib.sha256(run.encode()).digest()[:4], "big")
    return tuple(_FIRST_PORT + (start + _STRIDE * i) % _NUM_PORTS for i in range(_NUM_TRIES))


def _host(facts: Topology, place: Place, secret: str, env: Mapping[str, str]) -> Meeting:
    """Serve the meeting from a thread of this process, the first of the run."""
    host = own_address(place.host) if place.ports else LOOPBACK
    timeout_s = float(env.get(TIMEOUT) or _TIMEOUT_S)
    errors = []
    for port in place.ports or (0,):
        try:
            meeting = Meeting(facts.world_size, secret, host=host, port=port, timeout_s=timeout_s)
        except OSError as error:
            errors.append(f"{port}: {error.strerror}")
            continue
        atexit.register(_part, meeting, os.getpid())
        return meeting
    raise LaunchError(
        f"Rank 0 cannot listen at {host} on any of the ports of this run ({'; '.join(errors)}). "
        f"Set {COORDINATOR}=host:port for all processes, with a free port."
    )


def find(place: Place, secret: str, timeout_s: float) -> str:
    """The address at which rank 0, or node 0, of a run answers; LaunchError where none does."""
    deadline = time.monotonic() + timeout_s
    while True:
        for port in place.ports:
            if (address := _answering(place.host, port, secret)) is not None:
                return address
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Rank 0 was not found at {place.host} (ports {', '.join(map(str, place.ports))}) "
                f"within {timeout_s:g} s. Check that it was started, that it imports unisono, that "
                "no firewall stands between, and that all nodes have the same UNISONO_SECRET or "
                f"~/.config/unisono/secret; or set {COORDINATOR}=host:port for all processes."
            )
        time.sleep(_RETRY_S)


def _answering(host: str, port: int, secret: str) -> str | None:
    """The address, as a number, at which the run's meeting answers; None where it does not."""
    try:
        frames = greet_at(host, port, secret, _TRY_S)
    except (OSError, EOFError, LaunchError):
        return None  # Not yet, or somebody else.
    address = join_address(frames.socket.getpeername()[0], port)
    frames.close()
    return address


def _folder() -> Path:
    """A folder of this user alone, for the notes of runs on this node."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "unisono" if base else None
    if folder is None or not folder.parent.is_dir():
        folder = Path(tempfile.gettempdir()) / f"unisono-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise LaunchError(
            f"The folder {folder} is not this user's alone. Remove it, or set {COORDINATOR}."
        )
    return folder


def _leave_note(path: Path, address: str, secret: str) -> None:
    sweep_files(path.parent, _NOTE_NAME)
    file, draft = tempfile.mkstemp(dir=path.parent)  # Readable for this user alone.
    hold(file)  # Open until this process ends: a kill leaves the note to the next run's sweep.
    os.write(file, json.dumps({"address": address, "secret": secret}).encode())
    os.replace(draft, path)
    atexit.register(_remove_note, path, os.getpid())


def _read_note(path: Path, timeout_s: float) -> tuple[str, str]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            note = json.loads(path.read_text())
            host, port = split_address(note["address"])
            # One that was left behind by an earlier run leads nowhere.
            if _answering(host, port, note["secret"]) is not None:
                return note["address"], note["secret"]
        except (OSError, ValueError):
            pass
        time.sleep(_RETRY_S)
    raise LaunchError(
        f"Rank 0 of this run left no note in {path.parent} within {timeout_s:g} s. Check that it "
        "was started on this node by the same launcher, and that it imports unisono; or set "
        f"{COORDINATOR}=host:port for all processes."
    )


def _remove_note(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def _part(meeting: Meeting, pid: int) -> None:
    """Answer the others' last words before this process goes, but do not wait for long."""
    deadline = time.monotonic() + _PARTING_S
    while os.getpid() == pid and time.monotonic() < deadline:
        if not any(member.is_present for member in meeting.members().values()):
            break
        time.sleep(0.02)
