"""The machine around the devices: cores, ports, limits, shared memory, temporary files, Slurm."""

import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.devices import format_bytes
from unisono.devices.cpu import cpu_name, memory_bytes, num_cores
from unisono.doctor.results import Result, broken, not_checked, slow, works
from unisono.errors import LaunchError
from unisono.launch.network import LOOPBACK, addresses
from unisono.slurm.cluster import partitions

if TYPE_CHECKING:
    from unisono.doctor.examination import Examination

_MIB, _GIB = 2**20, 2**30
_SHM = Path("/dev/shm")
_PIDS = Path("/sys/fs/cgroup/pids.max")
_RDMA = Path("/dev/infiniband")
MAX_BUSY = 0.5
"""Above this part of all cores, other programs decide what is measured."""
_SAMPLE_S = 0.5
_MIN_MEMORY = 2 * _GIB
_MIN_FILES = 1024
_MIN_PROCESSES = 1024
_MIN_LOCKED = 64 * _MIB
_MIN_SHM = 128 * _MIB
"""Docker's default is 64 MiB, with which NCCL and torch's worker processes die with SIGBUS."""
_GOOD_SHM = _GIB
_MIN_TEMPORARY = 100 * _MIB
_CONNECT_S = 5.0
_SLURM_S = 10.0


def check_cores(examination: "Examination") -> Iterator[Result]:
    """The cores are not busy with something else, and there is memory."""
    count, busy = num_cores(), busy_fraction()
    name, cores = cpu_name(), "1 core" if count == 1 else f"{count} cores"
    sentence = f"{name}, {cores} for this process"
    if busy is not None and busy > MAX_BUSY:
        yield slow(
            "cores",
            f"{sentence}; {busy:.0%} of the machine is busy with other processes",
            "What is measured below is less than the machine can do; `unisono top` shows the load.",
            num_cores=count,
            busy=busy,
        )
    else:
        yield works("cores", sentence, num_cores=count, busy=busy)
    total, free = memory_bytes()
    if free is not None and total is not None:
        amount = f"{format_bytes(free)} of {format_bytes(total)} is free"
        if free < _MIN_MEMORY:
            yield slow(
                "memory", amount, "Each process of a run needs about 1 GiB.", free_bytes=free
            )
        else:
            yield works("memory", amount, free_bytes=free, total_bytes=total)


def busy_fraction() -> float | None:
    """Which part of all cores works at present; doctor itself sleeps meanwhile."""

    def read() -> tuple[int, int]:
        fields = [
            int(each) for each in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        ]
        return sum(fields), fields[3] + fields[4]

    try:
        total, idle = read()
        time.sleep(_SAMPLE_S)
        total, idle = (after - before for after, before in zip(read(), (total, idle), strict=True))
    except (OSError, ValueError, IndexError):
        return None
    return round(1 - idle / total, 3) if total else None


def check_ports(examination: "Examination") -> Iterator[Result]:
    """Processes can connect to each other, on this machine and at its address."""
    found = {LOOPBACK: "loopback"}
    for interface, address in addresses():
        if not address.startswith("127.") and address != "::1" and interface not in found.values():
            found[address] = interface
    for address, interface in found.items():
        error = connect(address)
        if error is None:
            yield works(f"ports on {interface}", "a process can listen and connect")
        elif interface == "loopback":
            yield broken(
                f"ports on {interface}",
                f"a process cannot connect to another one here: {error}",
                "Bring loopback up (ip link set lo up), and allow it in the firewall.",
            )
        else:
            yield broken(
                f"ports on {interface}",
                f"a process cannot connect to its own address: {error}",
                "Runs on several hosts need open ports between them: look at the firewall, or "
                "choose another --interface.",
            )
    if len(found) == 1:
        yield not_checked(
            "ports between hosts", "this machine has no address but loopback: one host only"
        )


def connect(address: str) -> str | None:
    """Listen at an address and connect to it; the error, if there is one."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.create_server((address, 0), family=family) as server:
            server.settimeout(_CONNECT_S)
            port = server.getsockname()[1]
            with socket.create_connection((address, port), _CONNECT_S) as client:
                peer, _ = server.accept()
                with peer:
                    peer.settimeout(_CONNECT_S)
                    client.sendall(b"unisono")
                    if peer.recv(16) != b"unisono":
                        return "what was sent did not arrive"
    except OSError as error:
        return str(error)
    return None


def check_limits(examination: "Examination") -> Iterator[Result]:
    """Open files, processes and locked memory are enough for a run."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pids = _number(_PIDS)
    shown: dict[str, Any] = {
        "files": files,
        "processes": processes,
        "locked_bytes": locked,
        "pids": pids,
    }
    results = []
    if _is_below(files, _MIN_FILES):
        results.append(
            broken(
                "ulimit -n",
                f"a process may open {files} files; runs use up to {_MIN_FILES}",
                "ulimit -n 65536, or LimitNOFILE= and limits.conf for good",
            )
        )
    # root is exempt from the limit on processes, though not from the container's.
    if _is_below(processes, _MIN_PROCESSES) and os.geteuid() != 0:
        results.append(
            broken(
                "ulimit -u",
                f"this user may have {processes} processes and threads; a framework starts over a "
                "hundred threads in each process",
                "ulimit -u 65536, or limits.conf for good",
            )
        )
    if pids is not None and pids < _MIN_PROCESSES:
        results.append(
            broken(
                "pids of the container",
                f"this container may have {pids} processes and threads; a framework starts over a "
                "hundred threads in each process",
                "docker run --pids-limit=-1, or a higher limit of the pod or the service",
            )
        )
    if _RDMA.exists() and _is_below(locked, _MIN_LOCKED):
        results.append(
            broken(
                "ulimit -l",
                f"{format_bytes(locked)} of memory may be locked, too little for InfiniBand",
                "ulimit -l unlimited; in a container --ulimit memlock=-1; in Slurm "
                "PropagateResourceLimitsExcept=MEMLOCK",
            )
        )
    yield from results
    if not results:
        yield works("limits", f"{_shown(files)} open files, {_shown(processes)} processes", **shown)


def check_shared_memory(examination: "Examination") -> Iterator[Result]:
    """/dev/shm has room for NCCL and for batches of torch's worker processes."""
    try:
        usage = shutil.disk_usage(_SHM)
    except OSError as error:
        yield broken(
            "/dev/shm",
            f"cannot be used: {error.strerror}",
            "Mount it: mount -t tmpfs tmpfs /dev/shm",
        )
        return
    amount = f"{format_bytes(usage.free)} of {format_bytes(usage.total)} is free"
    fix = "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir of medium Memory"
    if usage.free < _MIN_SHM:
        sentence = f"{amount}: NCCL, and batches between torch's processes, do not fit"
        yield broken("/dev/shm", sentence, fix, free_bytes=usage.free)
    elif usage.free < _GOOD_SHM:
        yield works("/dev/shm", amount, f"For large batches: {fix}", free_bytes=usage.free)
    else:
        yield works("/dev/shm", amount, free_bytes=usage.free)


def check_temporary_folder(examination: "Examination") -> Iterator[Result]:
    """Temporary files can be written."""
    chosen = os.environ.get("TMPDIR")
    try:
        folder = tempfile.gettempdir()
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"unisono")
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield broken("temporary files", f"cannot be written: {error}", "Set TMPDIR to a folder.")
        return
    if chosen and os.path.realpath(chosen) != os.path.realpath(folder):
        yield broken(
            "temporary files",
            "TMPDIR names a folder that cannot be written, and Python uses another one",
            "Make the folder of TMPDIR, or unset it.",
        )
    elif free < _MIN_TEMPORARY:
        yield broken(
            "temporary files", f"{format_bytes(free)} is free", "Set TMPDIR to a larger disk."
        )
    else:
        yield works("temporary files", f"{format_bytes(free)} is free", free_bytes=free)


def check_slurm(examination: "Examination") -> Iterator[Result]:
    """Slurm answers, and knows of the GPUs."""
    if shutil.which("sinfo") is None:
        yield not_checked("Slurm", "its commands are not on this machine")
        return
    try:
        found = partitions(_SLURM_S)
    except LaunchError as error:
        if "configuration source" in str(error) or "resolve" in str(error):
            yield not_checked("Slurm", "its commands are here, but no cluster is configured")
        else:
            yield broken(
                "Slurm",
                str(error).split(". ")[0].rstrip("."),
                "Ask the cluster's administrators whether slurmctld runs.",
            )
        return
    shown = ", ".join(f"{each.name} ({each.gpus} GPUs a node)" for each in found)
    gpus = [each for each in examination.listing.devices if each.kind == "gpu"]
    if gpus and not any(each.gpus for each in found):
        yield broken(
            "Slurm",
            f"this machine has {len(gpus)} GPU(s), and no partition has any: {shown}",
            "Add GresTypes=gpu and Gres=gpu:N to slurm.conf, and AutoDetect=nvml to gres.conf.",
        )
    else:
        yield works("Slurm", f"answers: {shown}")


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _is_below(value: int, least: int) -> bool:
    return value != resource.RLIM_INFINITY and value < least


def _shown(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
