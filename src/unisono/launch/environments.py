"""Rendezvous of processes that another launcher has started: torchrun, MPI, srun, TF_CONFIG.

No launcher of ours runs the rendezvous server, so rank 0 does, in a thread. On one node it writes
its address to a file that only this user can read. Across nodes the address must be known before
anything is sent: the first host, and a port derived from the run's name. If it is taken, the next
of a fixed series is used; the run's secret tells its server from all others. A stranger on such a
port can only delay: a proof holds for one port, and each has seconds to give it.
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
from unisono.launch.plan import timeout_s
from unisono.launch.rendezvous import RendezvousServer
from unisono.launch.wire import new_secret, secret_of_run, shared_secret
from unisono.scratch import hold, sweep_files
from unisono.topology import COORDINATOR, Topology

_FIRST_PORT, _NUM_PORTS = 61000, 4000
"""Above the kernel's ephemeral ports."""
_NUM_TRIES = 8
_STRIDE = 251
_TRY_S = 2.0
_FILE_NAME = re.compile("[0-9a-f]{32}")
_RETRY_S = 0.2
_LAST_MESSAGES_S = 5.0


@dataclass(frozen=True)
class ServerAddress:
    """Where rank 0 of a run listens."""

    run: str
    """The run's name, the same in all of its processes."""
    host: str = LOOPBACK
    ports: tuple[int, ...] = ()
    """Candidates, of which the first free one is used; none where a file holds the address."""


def server_address(facts: Topology, env: Mapping[str, str]) -> ServerAddress:
    """The address that every process of a run derives for itself; LaunchError where none can."""
    run = _run_name(facts, env)
    if facts.coordinator is not None:
        host, port = split_address(facts.coordinator)
        return ServerAddress(run, host, (port,))
    if facts.num_nodes == 1:
        return ServerAddress(run)
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
            f"and MPI does not say where rank 0 is reached. Set {COORDINATOR}=host:port for all "
            "of them, with the first node's address and a free port of it, such as mpirun -x "
            f"{COORDINATOR}=10.0.0.1:4000."
        )
    return ServerAddress(run, host, ports_of(run))


def rendezvous(
    facts: Topology, env: Mapping[str, str], *, start_timeout_s: float
) -> tuple[Topology, str]:
    """Run the rendezvous server or find it: the topology with its address, and the run's secret."""
    target = server_address(facts, env)
    if not target.ports:
        path = _folder() / hashlib.sha256(target.run.encode()).hexdigest()[:32]  # _FILE_NAME
        if facts.is_chief:
            secret = new_secret()
            server = _host(facts, target, secret, env)
            _write_address(path, server.address, secret)
            address = server.address
        else:
            address, secret = _read_address(path, start_timeout_s)
    else:
        secret = secret_of_run(shared_secret(env), target.run)
        if facts.is_chief:
            address = _host(facts, target, secret, env).address
        else:
            address = find(target, secret, start_timeout_s)
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
    """The ports of a run's rendezvous server, derived from the run's name."""
    start = int.from_bytes(hashlib.sha256(run.encode()).digest()[:4], "big")
    return tuple(_FIRST_PORT + (start + _STRIDE * i) % _NUM_PORTS for i in range(_NUM_TRIES))


def _host(
    facts: Topology, target: ServerAddress, secret: str, env: Mapping[str, str]
) -> RendezvousServer:
    """Run the rendezvous server in a thread of this process, rank 0."""
    host = own_address(target.host) if target.ports else LOOPBACK
    errors = []
    for port in target.ports or (0,):
        try:
            server = RendezvousServer(
                facts.world_size, secret, host=host, port=port, timeout_s=timeout_s(env)
            )
        except OSError as error:
            errors.append(f"{port}: {error.strerror}")
            continue
        atexit.register(_wait_for_members, server, os.getpid())
        return server
    raise LaunchError(
        f"Rank 0 cannot listen at {host} on any of the ports of this run ({'; '.join(errors)}). "
        f"Set {COORDINATOR}=host:port for all processes, with a free port."
    )


def find(target: ServerAddress, secret: str, timeout_s: float) -> str:
    """The address at which rank 0, or node 0, of a run answers; LaunchError where none does."""
    deadline = time.monotonic() + timeout_s
    while True:
        for port in target.ports:
            if (address := _answering(target.host, port, secret)) is not None:
                return address
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Rank 0 was not found at {target.host} (ports {', '.join(map(str, target.ports))})"
                f" within {timeout_s:g} s. Check that it was started, that it imports unisono, "
                "that no firewall blocks it, and that all nodes have the same UNISONO_SECRET or "
                f"~/.config/unisono/secret; or set {COORDINATOR}=host:port for all processes."
            )
        time.sleep(_RETRY_S)


def _answering(host: str, port: int, secret: str) -> str | None:
    """The numeric address at which the run's server answers; None where it does not."""
    try:
        frames = greet_at(host, port, secret, _TRY_S)
    except (OSError, EOFError, LaunchError):
        return None  # Not yet, or another server.
    address = join_address(frames.socket.getpeername()[0], port)
    frames.close()
    return address


def _folder() -> Path:
    """A folder of this user alone, for the addresses of runs on this node."""
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


def _write_address(path: Path, address: str, secret: str) -> None:
    sweep_files(path.parent, _FILE_NAME)
    file, draft = tempfile.mkstemp(dir=path.parent)  # Readable for this user alone.
    hold(file)  # Open until this process ends: after a kill, the next run sweeps the file.
    os.write(file, json.dumps({"address": address, "secret": secret}).encode())
    os.replace(draft, path)
    atexit.register(_remove_address, path, os.getpid())


def _read_address(path: Path, timeout_s: float) -> tuple[str, str]:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            found = json.loads(path.read_text())
            host, port = split_address(found["address"])
            # The file of an earlier run leads nowhere.
            if _answering(host, port, found["secret"]) is not None:
                return found["address"], found["secret"]
        except (OSError, ValueError):
            pass
        time.sleep(_RETRY_S)
    raise LaunchError(
        f"Rank 0 of this run wrote no address to {path.parent} within {timeout_s:g} s. Check that "
        "it was started on this node by the same launcher, and that it imports unisono; or set "
        f"{COORDINATOR}=host:port for all processes."
    )


def _remove_address(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)


def _wait_for_members(server: RendezvousServer, pid: int) -> None:
    """Answer the others' last messages before this process ends, but do not wait for long."""
    deadline = time.monotonic() + _LAST_MESSAGES_S
    while os.getpid() == pid and time.monotonic() < deadline:
        if not any(member.is_present for member in server.members().values()):
            break
        time.sleep(0.02)
