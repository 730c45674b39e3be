"""Slurm's commands: what the cluster has, the state of jobs, and submitting them.

Nothing here passes through a shell. A command that is missing or fails is a LaunchError with its
own message.
"""

import difflib
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unisono.errors import LaunchError
from unisono.slurm.batch import Job, seconds_of

_PATIENCE_S = 60
_ACTIVE = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED"}
_ACTIVE |= {"RESIZING", "SIGNALING", "STAGE_OUT", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
_FIELDS = "JobArrayID:60,State:40,exit_code:20,TimeUsed:30,NumNodes:10,ReasonList:"


@dataclass(frozen=True)
class Partition:
    """A partition, and the most that one of its nodes has."""

    name: str
    is_default: bool
    num_nodes: int
    gpus: int
    cpus: int
    time_limit_s: int | None


@dataclass(frozen=True)
class Status:
    """The state of a job, or of a task of a job array."""

    job: str
    """Its number, `12_3` for a task of an array."""
    state: str
    """As Slurm names it: PENDING, RUNNING, COMPLETED, FAILED, TIMEOUT, …"""
    code: int = 0
    """The exit code of its batch script; 128 and more for a signal."""
    elapsed: str = ""
    where: str = ""
    """Its nodes, or the reason why it waits in parentheses."""

    @property
    def is_over(self) -> bool:
        return self.state not in _ACTIVE

    @property
    def exit_code(self) -> int:
        """The exit code of a command that waits for the job."""
        return self.code or (0 if self.state == "COMPLETED" else 1)


def partitions(patience_s: float = _PATIENCE_S) -> list[Partition]:
    """The partitions of this cluster that a user can name."""
    found: dict[str, Partition] = {}
    words = ("sinfo", "-h", "-o", "%P|%D|%c|%l|%G")
    for line in _call(*words, patience_s=patience_s).splitlines():
        name, nodes, cpus, limit, gres = line.split("|", 4)
        is_default, name = name.endswith("*"), name.rstrip("*")
        before = found.get(name, Partition(name, is_default, 0, 0, 0, None))
        found[name] = Partition(
            name,
            is_default,
            before.num_nodes + int(nodes),
            max(before.gpus, _gpus(gres)),
            max(before.cpus, int(re.sub(r"\D.*", "", cpus) or 0)),
            None if limit in ("infinite", "n/a") else seconds_of(limit),
        )
    return list(found.values())


def choose_partition(job: Job, found: Sequence[Partition]) -> Partition | None:
    """The partition of a job; LaunchError where it does not exist or is too small."""
    partition = _named(job, found)
    if partition is None:
        return None
    if job.gpus_per_node > partition.gpus:
        has = f"have {partition.gpus} GPU(s) at most" if partition.gpus else "have no GPUs"
        raise LaunchError(
            f"Asked for {job.gpus_per_node} GPU(s) on each node; nodes of partition "
            f"{partition.name} {has}. Lower --gpus-per-node, or choose another --partition: "
            f"{_overview(found)}."
        )
    if job.num_nodes > partition.num_nodes:
        raise LaunchError(
            f"Asked for {job.num_nodes} nodes; partition {partition.name} has "
            f"{partition.num_nodes}. Lower --nodes, or choose another --partition: "
            f"{_overview(found)}."
        )
    limit_s = partition.time_limit_s
    if job.time is not None and limit_s is not None and seconds_of(job.time) > limit_s:
        raise LaunchError(
            f"Asked for --time {job.time}; partition {partition.name} allows {limit_s // 60} "
            "minutes. Lower --time, or choose another --partition."
        )
    return partition


def test(path: str) -> None:
    """Let Slurm check a batch script, without submitting it."""
    _call("sbatch", "--test-only", path)


def submit(path: str) -> int:
    """Submit a batch script; returns the job's id."""
    answer = _call("sbatch", "--parsable", path)
    return int(answer.strip().partition(";")[0])


def cancel(job: str) -> None:
    _call("scancel", job)


def cluster_name() -> str:
    found = re.search(r"^ClusterName\s*=\s*(\S+)", _call("scontrol", "show", "config"), re.M)
    return found[1] if found else "cluster"


def statuses(job: int) -> list[Status]:
    """The state of a job, or of each task of an array; empty where Slurm has forgotten it."""
    found = _remembered(job)
    return found if found else _accounted(job)


def _remembered(job: int) -> list[Status]:
    try:
        # squeue pads its fields, and what it waits for is the last: the longest of them.
        text = _call("squeue", "-h", "-r", "-t", "all", "-j", str(job), "-O", f"{_FIELDS}400")
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    found = []
    for line in text.splitlines():
        name, state, status, elapsed, _, *where = line.split(maxsplit=5)
        code = os.waitstatus_to_exitcode(int(status))
        code = code if code >= 0 else 128 - code
        found.append(Status(name, state, code, elapsed, " ".join(where).strip()))
    return sorted(found, key=lambda status: _array_place(status.job))


def _accounted(job: int) -> list[Status]:
    """The same from Slurm's accounting, where the cluster has it."""
    try:
        text = _call(
            "sacct", "-n", "-P", "-X", "-j", str(job), "-o", "JobID,State,ExitCode,Elapsed"
        )
    except LaunchError:
        return []
    found = []
    for line in text.splitlines():
        name, state, status, elapsed = line.split("|")
        code, _, number = status.partition(":")
        whole = int(code) or (128 + int(number) if number != "0" else 0)
        # "CANCELLED by 1000"
        found.append(Status(name, state.split()[0], whole, elapsed))
    return sorted(found, key=lambda status: _array_place(status.job))


def output_files(job: int) -> tuple[str, str] | None:
    """The files of a job's stdout and stderr, as Slurm reports them."""
    text = _call("scontrol", "-o", "show", "job", str(job))
    # Last in its line, after everything that a user may have named.
    found = re.search(r" StdErr=(.*) StdIn=.* StdOut=(.*) Power=[^=]*$", text.splitlines()[0])
    return (found[2], found[1]) if found else None


def _call(*words: str, patience_s: float = _PATIENCE_S) -> str:
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=patience_s,
            stdin=subprocess.DEVNULL,
            env=_environment(os.environ),
        )
    except FileNotFoundError as error:
        raise LaunchError(
            f"Looked for Slurm's command {words[0]}; it is not on this machine, or not in PATH. "
            "Log in to a node of the cluster (or load its Slurm module), and try again there."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(
            f"Slurm's {words[0]} did not answer within {patience_s:g} s. Try again later, or ask "
            "the cluster's administrators."
        ) from error
    if done.returncode:
        said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
        raise LaunchError(f"Slurm's {words[0]} refused (exit code {done.returncode}): {said}")
    return done.stdout


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Without a user's settings of the format and defaults of Slurm's commands."""
    prefixes = ("SBATCH_", "SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_")
    kept = {name: value for name, value in env.items() if not name.startswith(prefixes)}
    return kept | {"SLURM_TIME_FORMAT": "standard"}


def _named(job: Job, found: Sequence[Partition]) -> Partition | None:
    if job.partition is None:
        return next((each for each in found if each.is_default), None)
    for each in found:
        if each.name == job.partition:
            return each
    if "," in job.partition:
        return None  # A list, of which Slurm takes the first that is free.
    near = difflib.get_close_matches(job.partition, [each.name for each in found], 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise LaunchError(
        f"Asked for partition {job.partition!r}; this cluster has {_overview(found)}.{hint}"
    )


def _overview(found: Sequence[Partition]) -> str:
    return ", ".join(f"{each.name} ({each.gpus} GPUs a node)" for each in found) or "none"


def _gpus(gres: str) -> int:
    """The GPUs of `gpu:v100:4(S:0-1),nvme:1`."""
    total = 0
    for part in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *rest = part.strip().split(":")
        if kind == "gpu":
            total += int(rest[-1]) if rest and rest[-1].isdigit() else 1
    return total


def _array_place(job: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", job)))
