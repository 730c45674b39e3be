"""`unisono submit`: writes a Slurm batch script for a program, checks it, and submits it."""

import argparse
import itertools
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.errors import LaunchError
from unisono.launch.start import check_program
from unisono.slurm import cluster
from unisono.slurm.batch import Job, batch_script, check
from unisono.slurm.cluster import Partition, choose_partition
from unisono.slurm.follow import find_out, follow, tails_of
from unisono.slurm.records import Record, Records, expand
from unisono.slurm.settings import defaults, read_settings
from unisono.slurm.words import for_variable

_SWEPT = re.compile(r"(?P<name>[A-Za-z][\w-]*)=(?P<values>.+)", re.DOTALL)
_MOST_TASKS = 1000
_FLAGS = ("-m", "-h", "--help", "--requeue", "--wait", "--dry-run")


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "submit",
        help="submit a script to Slurm",
        usage="unisono submit [options] script.py [arguments] | -m module [arguments]",
        description=__doc__,
        allow_abbrev=False,
    )
    _add_resources(parser.add_argument_group("what it gets"))
    _add_surroundings(parser.add_argument_group("where it runs"))
    _add_conduct(parser.add_argument_group("how it is submitted"))
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    parser.add_argument(
        "program",
        nargs=argparse.PARSER,
        metavar="script",
        help="the script, or the module with -m, and its own arguments",
    )
    parser.set_defaults(run=run)
    parser.prepare = _joined


def _joined(words: list[str]) -> list[str]:
    """`--sbatch --mem=32G` as one word: argparse would take the second for an option of ours."""
    found: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "--sbatch":
            word = f"{word}={next(rest, '')}"
        found.append(word)
        if not word.startswith("-") or word == "--":
            break  # The script; what follows is its own.
        if "=" not in word and word not in _FLAGS:
            found += [value for value in [next(rest, None)] if value is not None]
    return [*found, *rest]


def run(options: argparse.Namespace) -> int:
    words = options.program[options.program[0] == "--" :]
    program = ("-m", *words) if options.is_module else tuple(words)
    check_program(program)
    given = {key.replace("_", "-"): value for key, value in vars(options).items()}
    if options.dry_run:
        sys.stdout.write(_dry(program, given))
        return 0
    name = cluster.cluster_name()
    job = _on_partition(job_of(program, given, cluster_name=name), cluster.partitions())
    records = Records(os.environ)
    record = _submit(job, name, records)
    print(_introduce(job, record), flush=True)
    return _wait(record, records) if options.wait else 0


def job_of(program: tuple[str, ...], given: Mapping[str, Any], *, cluster_name: str) -> Job:
    """The job that the options and the user's settings describe."""
    table, source = read_settings(Path.cwd())
    found = defaults(table, source, cluster=cluster_name, partition=given.get("partition"))

    def choice(key: str, default: Any = None) -> Any:
        value = given.get(key)
        return found.get(key, default) if value is None else value

    env = [*found.get("env", ()), *(given.get("env") or ())]
    venv, conda, python = _environment(choice("venv"), choice("conda"))
    return check(
        Job(
            program=program,
            name=choice("job-name", _name_of(program)),
            num_nodes=choice("nodes", 1),
            gpus_per_node=choice("gpus-per-node", 0),
            replicas_per_node=choice("replicas-per-node"),
            cpus_per_node=choice("cpus-per-node"),
            partition=choice("partition"),
            time=choice("time"),
            comment=choice("comment"),
            account=choice("account"),
            qos=choice("qos"),
            modules=tuple(choice("module", ())),
            env=tuple(dict(map(for_variable, env)).items()),
            venv=venv,
            conda=conda,
            python=python,
            options=(*found.get("sbatch", ()), *(given.get("sbatch") or ())),
            is_requeued=choice("requeue", False),
            warning_s=choice("warn-before", 120),
            sweep=sweep_of(given.get("sweep") or ()),
        )
    )


def sweep_of(swept: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The words of each job of a sweep: every combination of the values.

    >>> sweep_of(["rate=0.1,0.01", "depth=2"])
    (('--rate=0.1', '--depth=2'), ('--rate=0.01', '--depth=2'))
    """
    if not swept:
        return ()
    choices = []
    for text in swept:
        found = _SWEPT.fullmatch(text)
        if found is None:
            raise LaunchError(
                f"Asked for --sweep {text!r}. Write the name of an option of the script and its "
                "values: --sweep learning_rate=0.1,0.01."
            )
        choices.append([f"--{found['name']}={value}" for value in found["values"].split(",")])
    every = tuple(itertools.product(*choices))
    if len(every) > _MOST_TASKS:
        raise LaunchError(
            f"Asked for a sweep of {len(every)} jobs. Sweep fewer values at a time: at most "
            f"{_MOST_TASKS} jobs."
        )
    return every


def _dry(program: tuple[str, ...], given: Mapping[str, Any]) -> str:
    """The script alone, on a machine without Slurm too."""
    try:
        name, found = cluster.cluster_name(), cluster.partitions()
    except LaunchError:
        return batch_script(job_of(program, given, cluster_name=""))
    return batch_script(_on_partition(job_of(program, given, cluster_name=name), found))


def _on_partition(job: Job, found: Sequence[Partition]) -> Job:
    """The job with its share of the nodes' cores, after a look at what the cluster has."""
    partition = choose_partition(job, found)
    if job.cpus_per_node is not None or partition is None:
        return job
    if job.gpus_per_node and partition.gpus:
        # Slurm gives a task one core, unless it is asked for more.
        cores = partition.cpus * job.gpus_per_node // partition.gpus
    else:
        cores = min(job.replicas_per_node or 1, partition.cpus)
    return replace(job, cpus_per_node=cores if cores > 1 else None)


def _submit(job: Job, name: str, records: Records) -> Record:
    draft = records.draft(batch_script(job))
    try:
        cluster.test(str(draft))
        number = cluster.submit(str(draft))
    except BaseException:
        records.drop(draft)
        raise
    record = Record(
        job=number,
        cluster=name,
        name=job.name,
        submitted=time.time(),
        folder=str(Path.cwd()),
        program=job.program,
        num_nodes=job.num_nodes,
        gpus_per_node=job.gpus_per_node,
        outputs=_outputs(job, number),
        is_array=bool(job.sweep),
        sweep=job.sweep,
    )
    records.keep(draft, record)
    return record


def _outputs(job: Job, number: int) -> tuple[tuple[str, str], ...]:
    ends = (".out", ".err")
    if not job.sweep:
        said = cluster.output_files(number)
        return (said or tuple(expand(job.output + e, x=job.name, j=str(number)) for e in ends),)  # type: ignore[return-value]
    return tuple(
        tuple(expand(job.output + e, x=job.name, A=str(number), a=str(i)) for e in ends)  # type: ignore[misc]
        for i in range(len(job.sweep))
    )


def _introduce(job: Job, record: Record) -> str:
    nodes = f"{job.num_nodes} node{'s' * (job.num_nodes > 1)}"
    gpus = f" with {job.gpus_per_node} GPU{'s' * (job.gpus_per_node > 1)}" * bool(job.gpus_per_node)
    tasks = f", {len(job.sweep)} jobs of a sweep" if job.sweep else ""
    where = f", partition {job.partition}" if job.partition else ""
    files = " and ".join(record.outputs[0])
    hints = {
        f"unisono logs {record.tasks[0]} -f": f"follow its output ({files})",
        "unisono jobs": "see how it is",
        f"unisono cancel {record.job}": "end it",
    }
    width = max(map(len, hints))
    lines = [f"  {command:{width}}  {what}" for command, what in hints.items()]
    head = f"Submitted job {record.job} ({job.name}): {nodes}{gpus}{where}{tasks}."
    return "\n".join([head, *lines])


def _wait(record: Record, records: Records) -> int:
    tails = [tail for task in record.tasks for tail in tails_of(record, task, None)]
    try:
        found = follow(tails, lambda: find_out(record, records))
    except KeyboardInterrupt:
        print(
            f"\nunisono: job {record.job} goes on. `unisono cancel {record.job}` ends it.",
            file=sys.stderr,
        )
        return 130
    for status in found:
        print(f"unisono: job {status.job} is {status.state}.", file=sys.stderr)
    return max(status.exit_code for status in found)


def _environment(venv: str | None, conda: str | None) -> tuple[str | None, str | None, str | None]:
    """What the script activates: what was named, or where this very command runs."""
    if venv is not None:
        path = Path(venv).expanduser().absolute()
        if not (path / "bin" / "activate").is_file():
            raise LaunchError(f"Asked for --venv {venv}; there is no {path}/bin/activate.")
        return str(path), conda, _python(path)
    if conda is not None:
        return None, conda, None
    name = os.environ.get("CONDA_DEFAULT_ENV")
    if name and os.environ.get("CONDA_PREFIX") == sys.prefix:
        return None, name, None
    if sys.prefix != sys.base_prefix and Path(sys.prefix, "bin", "activate").is_file():
        return sys.prefix, None, _python(Path(sys.prefix))
    return None, None, sys.executable


def _python(venv: Path) -> str | None:
    """How to call unisono where its command was not installed: on a path of sources."""
    return None if (venv / "bin" / "unisono").is_file() else "python"


def _name_of(program: Sequence[str]) -> str:
    name = program[1] if program[0] == "-m" else Path(program[0]).stem
    return re.sub(r"[^\w.-]", "_", name).lstrip("-") or "unisono"


def _add_resources(group: Any) -> None:
    group.add_argument("--nodes", type=_count, metavar="N", help="how many nodes (default: 1)")
    group.add_argument("--gpus-per-node", type=_number, metavar="N", help="GPUs of each of them")
    group.add_argument(
        "--replicas-per-node", type=_count, metavar="N", help="processes (default: one a GPU)"
    )
    group.add_argument(
        "--cpus-per-node", type=_count, metavar="N", help="cores (default: the GPUs' share)"
    )
    group.add_argument("--partition", metavar="NAME", help="where it queues")
    group.add_argument("--time", metavar="24:00:00", help="its time limit")
    group.add_argument("--job-name", metavar="NAME", help="default: the script's name")
    group.add_argument("--comment", metavar="TEXT", help="kept by Slurm")
    group.add_argument("--account", metavar="NAME", help="who pays")
    group.add_argument("--qos", metavar="NAME", help="quality of service")
    group.add_argument(
        "--sbatch", action="append", metavar='"--mem=32G"', help="another option of sbatch"
    )


def _add_surroundings(group: Any) -> None:
    group.add_argument("--module", action="append", metavar="gcc/8.3.0", help="a module to load")
    group.add_argument("--env", action="append", metavar="NAME=VALUE", help="a variable to set")
    group.add_argument("--venv", metavar="PATH", help="a virtual environment to activate")
    group.add_argument("--conda", metavar="NAME", help="a conda environment to activate")


def _add_conduct(group: Any) -> None:
    group.add_argument(
        "--sweep", action="append", metavar="NAME=A,B", help="a job for each value of an option"
    )
    group.add_argument(
        "--requeue", action="store_true", default=None, help="queue again once it has made room"
    )
    group.add_argument(
        "--warn-before", type=_count, metavar="S", help="warn before the limit (default: 120)"
    )
    group.add_argument("--wait", action="store_true", help="follow it, and exit with its code")
    group.add_argument("--dry-run", action="store_true", help="print the batch script alone")


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def _count(text: str) -> int:
    if not _number(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)
