"""A job, and its batch script: what a person would have written, as a pure function of the job.

One task on each node, and in it `unisono run`, which starts a process for each of the node's GPUs
and supervises them. Whatever text a user gives arrives as one word, quoted by the rules of the
shell or by those of sbatch's `#SBATCH` lines.
"""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from unisono.errors import PREEMPTED_CODE, LaunchError

_TIME = re.compile(
    r"(?:(?P<days>\d+)-(?P<day_hours>\d+)(?::(?P<day_minutes>\d+)(?::(?P<day_seconds>\d+))?)?"
    r"|(?:(?P<hours>\d+):(?P<hour_minutes>\d+):(?P<hour_seconds>\d+))"
    r"|(?P<minutes>\d+)(?::(?P<seconds>\d+))?)",
    re.ASCII,
)
_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
_OPTION = re.compile(r"--(?P<name>[a-z][a-z0-9-]*)(?:(?:=|\s+)(?P<value>.+))?", re.DOTALL)
_OURS = {
    "array": "--sweep",
    "nodes": "--nodes",
    "ntasks": "--nodes: there is one task on each",
    "ntasks-per-node": "--nodes: there is one task on each",
    "wrap": "a script",
}


@dataclass(frozen=True)
class Job:
    """What is to run where."""

    program: tuple[str, ...]
    """The script and its arguments, or `-m`, the module and its arguments."""
    name: str
    num_nodes: int = 1
    gpus_per_node: int = 0
    replicas_per_node: int | None = None
    cpus_per_node: int | None = None
    partition: str | None = None
    time: str | None = None
    comment: str | None = None
    account: str | None = None
    qos: str | None = None
    modules: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    venv: str | None = None
    conda: str | None = None
    python: str | None = None
    """The interpreter that has unisono, where no environment is activated."""
    options: tuple[str, ...] = ()
    """Other options of sbatch, such as `--mem=32G`."""
    is_requeued: bool = False
    warning_s: int = 120
    """How long before its time limit the run is preempted."""
    sweep: tuple[tuple[str, ...], ...] = ()
    """The words that each task of an array adds to the program's."""

    @property
    def output(self) -> str:
        return "%x_%A_%a" if self.sweep else "%x_%j"


def check(job: Job) -> Job:
    """The job, where it makes sense by itself; LaunchError where it does not."""
    if "/" in job.name or job.name in (".", "..") or job.name.startswith("-"):
        raise LaunchError(
            f"Asked for the job name {job.name!r}. The job's files are named after it: leave out "
            "slashes, and a dash at its beginning."
        )
    if job.venv is not None and job.conda is not None:
        raise LaunchError("Asked for --venv and --conda. Choose one of the two.")
    if job.time is not None:
        limit_s = seconds_of(job.time)
        # Of a short job's time, most is for work.
        job = dataclasses.replace(job, warning_s=max(1, min(job.warning_s, limit_s // 4)))
    return job


def batch_script(job: Job) -> str:
    """The whole text that sbatch is given."""
    setup = list(_setup(job))
    parts = [["#!/bin/bash -l" if job.modules or job.conda else "#!/bin/bash", *_options(job)]]
    if setup:
        parts.append(["set -e", *setup])
    if job.sweep:
        parts.append(list(_sweep(job)))
    parts.append(list(_run(job)))
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def seconds_of(time: str) -> int:
    """The seconds of a time as Slurm writes it.

    >>> seconds_of("1-12:30")
    131400
    """
    found = _TIME.fullmatch(time.strip())
    if found is None:
        raise LaunchError(
            f"Asked for --time {time!r}. Write minutes (90), hours (24:00:00) or days "
            "(2-12:00:00), as Slurm does."
        )
    total = 0
    for name, text in found.groupdict().items():
        if text is not None:
            total += int(text) * _SECONDS[re.sub("^day_|^hour_", "", name)]
    if not total:
        raise LaunchError(f"Asked for --time {time!r}, which is no time at all.")
    return total


def option_of(text: str) -> tuple[str, str | None]:
    """Name and value of another option of sbatch; LaunchError where it is none, or ours."""
    found = _OPTION.fullmatch(text.strip())
    if found is None:
        raise LaunchError(
            f"Asked for --sbatch {text!r}. Give one option by its long name each time: "
            '--sbatch "--mem=32G" --sbatch "--exclusive".'
        )
    name, value = found["name"], found["value"]
    if name in _OURS:
        raise LaunchError(f"Asked for --sbatch {text!r}. Use {_OURS[name]} of `unisono submit`.")
    return name, value


def _options(job: Job) -> Iterator[str]:
    own: dict[str, str | None] = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1",
        "gres": f"gpu:{job.gpus_per_node}" if job.gpus_per_node else None,
        "cpus-per-task": str(job.cpus_per_node) if job.cpus_per_node else None,
        "time": job.time,
        "comment": job.comment,
        "array": f"0-{len(job.sweep) - 1}" if job.sweep else None,
        "output": f"{job.output}.out",
        "error": f"{job.output}.err",
        "signal": f"USR1@{job.warning_s}",
    }
    others = dict(map(option_of, job.options))
    for name, value in own.items():
        if value is not None and name not in others:
            yield for_option(name, value)
    yield "#SBATCH --requeue" if job.is_requeued else "#SBATCH --no-requeue"
    for name, value in others.items():
        yield f"#SBATCH --{name}" if value is None else for_option(name, value)


def _setup(job: Job) -> Iterator[str]:
    if job.modules:
        yield "module purge"
        yield f"module load {' '.join(map(for_shell, job.modules))}"
    if job.conda is not None:
        yield 'source "$(conda info --base)/etc/profile.d/conda.sh"'
        yield f"conda activate {for_shell(job.conda)}"
    if job.venv is not None:
        yield f"source {for_shell(job.venv + '/bin/activate')}"
    if job.is_requeued:
        yield "export UNISONO_REQUEUE=1"
    for name, value in job.env:
        yield f"export {name}={for_shell(value)}"


def _sweep(job: Job) -> Iterator[str]:
    yield "case $SLURM_ARRAY_TASK_ID in"
    for i, words in enumerate(job.sweep):
        yield f"    {i}) values=({' '.join(map(for_shell, words))}) ;;"
    yield "esac"


def _run(job: Job) -> Iterator[str]:
    words = ["srun"]
    if job.cpus_per_node:  # srun does not take it over from sbatch.
        words.append(f"--cpus-per-task={job.cpus_per_node}")
    words += [f"{for_shell(job.python)} -m unisono" if job.python else "unisono", "run"]
    if job.replicas_per_node is not None:
        words += ["--replicas", str(job.replicas_per_node)]
    number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.sweep else "$SLURM_JOB_ID"
    words += ["--log-dir", f"{for_shell(job.name)}_{number}"]
    words += map(for_shell, job.program)
    if job.sweep:
        words.append('"${values[@]}"')
    line = " ".join(words)
    if not job.is_requeued:
        yield line
        return
    yield f"{line} || code=$?"
    yield f'if [ "${{code:-0}}" -eq {PREEMPTED_CODE} ]; then  # Preempted: continue later.'
    yield '    scontrol requeue "$SLURM_JOB_ID"'
    yield "fi"
    yield 'exit "${code:-0}"'


_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./\[\]-]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_CHARACTERS = 1000
"""sbatch keeps an option in a buffer of a few thousand bytes."""


def for_shell(word: str) -> str:
    """A word of a command.

    >>> for_shell("it's $HOME")
    '\\'it\\'"\\'"\\'s $HOME\\''
    """
    if "\0" in word:
        raise LaunchError(
            f"Found a zero byte in {word!r}. No program can be given one: take it out."
        )
    return shlex.quote(word)


def for_option(name: str, value: str) -> str:
    """A line `#SBATCH --name=value`; LaunchError for a value that no line can hold.

    >>> for_option("comment", 'my "best" run')
    '#SBATCH --comment="my \\\\"best\\\\" run"'
    """
    if any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise LaunchError(
            f"Asked for --{name} {value!r}; a line of a batch script cannot hold line breaks and "
            "control characters. Take them out."
        )
    if not value or len(value.encode(errors="surrogateescape")) > _MOST_CHARACTERS:
        found = "nothing" if not value else f"more than {_MOST_CHARACTERS} bytes"
        raise LaunchError(f"Asked for --{name} with {found} for a value. Give it a short one.")
    if not _PLAIN.fullmatch(value):
        # In quotes a backslash still takes away a character's meaning.
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        value = f'"{escaped}"'
    return f"#SBATCH --{name}={value}"


def for_variable(assignment: str) -> tuple[str, str]:
    """Name and value of `NAME=VALUE`; LaunchError where it is none."""
    name, equals, value = assignment.partition("=")
    if not equals or not _NAME.fullmatch(name):
        raise LaunchError(
            f"Asked for --env {assignment!r}. Write NAME=VALUE, with a name of letters, digits and "
            "underscores."
        )
    return name, value
