"""`unisono submit`: writes a Slurm batch script for a program, checks it, and submits it."""

import argparse
import os
import sys
from collections.abc import Mapping
from typing import Any

from unisono.cli.run import add_program
from unisono.errors import LaunchError
from unisono.launch.request import check_program
from unisono.slurm import cluster
from unisono.slurm.batch import Job, batch_script
from unisono.slurm.jobs import Record, Records, follow, status_of, tails_of
from unisono.slurm.submission import job_of, on_partition, submit

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
    _add_environment(parser.add_argument_group("where it runs"))
    _add_submission(parser.add_argument_group("how it is submitted"))
    add_program(parser)
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
    job = on_partition(job_of(program, given, cluster_name=name), cluster.partitions())
    records = Records(os.environ)
    record = submit(job, name, records)
    print(_introduce(job, record), flush=True)
    return _wait(record, records) if options.wait else 0


def _dry(program: tuple[str, ...], given: Mapping[str, Any]) -> str:
    """The script alone, on a machine without Slurm too."""
    try:
        name, found = cluster.cluster_name(), cluster.partitions()
    except LaunchError:
        return batch_script(job_of(program, given, cluster_name=""))
    return batch_script(on_partition(job_of(program, given, cluster_name=name), found))


def _introduce(job: Job, record: Record) -> str:
    nodes = f"{job.num_nodes} node{'s' * (job.num_nodes > 1)}"
    gpus = f" with {job.gpus_per_node} GPU{'s' * (job.gpus_per_node > 1)}" * bool(job.gpus_per_node)
    tasks = f", {len(job.sweep)} jobs of a sweep" if job.sweep else ""
    where = f", partition {job.partition}" if job.partition else ""
    files = " and ".join(record.outputs[0])
    hints = {
        f"unisono logs {record.tasks[0]} -f": f"follow its output ({files})",
        "unisono jobs": "show its state",
        f"unisono cancel {record.job}": "end it",
    }
    width = max(map(len, hints))
    lines = [f"  {command:{width}}  {what}" for command, what in hints.items()]
    head = f"Submitted job {record.job} ({job.name}): {nodes}{gpus}{where}{tasks}."
    return "\n".join([head, *lines])


def _wait(record: Record, records: Records) -> int:
    tails = [tail for task in record.tasks for tail in tails_of(record, task, None)]
    try:
        found = follow(tails, lambda: status_of(record, records))
    except KeyboardInterrupt:
        print(
            f"\nunisono: job {record.job} goes on. `unisono cancel {record.job}` ends it.",
            file=sys.stderr,
        )
        return 130
    for status in found:
        print(f"unisono: job {status.job} is {status.state}.", file=sys.stderr)
    return max(status.exit_code for status in found)


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
    group.add_argument("--comment", metavar="TEXT", help="stored by Slurm")
    group.add_argument("--account", metavar="NAME", help="the account to charge")
    group.add_argument("--qos", metavar="NAME", help="quality of service")
    group.add_argument(
        "--sbatch", action="append", metavar='"--mem=32G"', help="another option of sbatch"
    )


def _add_environment(group: Any) -> None:
    group.add_argument("--module", action="append", metavar="gcc/8.3.0", help="a module to load")
    group.add_argument("--env", action="append", metavar="NAME=VALUE", help="a variable to set")
    group.add_argument("--venv", metavar="PATH", help="a virtual environment to activate")
    group.add_argument("--conda", metavar="NAME", help="a conda environment to activate")


def _add_submission(group: Any) -> None:
    group.add_argument(
        "--sweep", action="append", metavar="NAME=A,B", help="a job for each value of an option"
    )
    group.add_argument(
        "--requeue", action="store_true", default=None, help="queue again after a preemption"
    )
    group.add_argument(
        "--warn-before",
        type=_count,
        metavar="S",
        help="preempt it so long before its limit (default: 120)",
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
