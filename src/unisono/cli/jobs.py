"""`unisono jobs`, `unisono logs` and `unisono cancel`: the jobs that unisono submitted to Slurm."""

import argparse
import os
import re
import shlex
from typing import Any

from unisono.errors import LaunchError
from unisono.slurm import cluster
from unisono.slurm.cluster import Status
from unisono.slurm.jobs import Record, Records, find_out, follow, tails_of

_SHOWN = 20
_COLUMNS = ("JOB", "NAME", "STATE", "CODE", "TIME", "NODES", "WHERE", "PROGRAM")


def add_to(commands: Any) -> None:
    jobs = commands.add_parser(
        "jobs", help="the jobs that unisono submitted to Slurm", allow_abbrev=False
    )
    jobs.add_argument("--all", action="store_true", help=f"not only the latest {_SHOWN}")
    jobs.set_defaults(run=show_jobs)
    logs = commands.add_parser("logs", help="a job's output", allow_abbrev=False)
    logs.add_argument("job", metavar="JOB", help="its number, or 12_3 for a job of a sweep")
    logs.add_argument("-f", "--follow", action="store_true", help="until the job is over")
    logs.add_argument("--rank", type=int, metavar="N", help="what one rank printed")
    logs.set_defaults(run=show_logs)
    cancel = commands.add_parser("cancel", help="end jobs", allow_abbrev=False)
    cancel.add_argument("job", metavar="JOB", nargs="+", help="its number, or 12_3")
    cancel.set_defaults(run=cancel_jobs)


def show_jobs(options: argparse.Namespace) -> int:
    records, name = Records(os.environ), cluster.cluster_name()
    found = records.all(name)
    shown = found if options.all else found[-_SHOWN:]
    if not shown:
        print(f"No jobs of unisono on {name}. `unisono submit script.py` submits one.")
        return 0
    rows = [_COLUMNS, *(row for each in shown for row in _rows(each, find_out(each, records)))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS) - 1)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        print("  ".join([*cells, row[-1]]).rstrip())
    return 0


def show_logs(options: argparse.Namespace) -> int:
    records, record, task = _find(options.job)
    tails = tails_of(record, task, options.rank)
    if options.follow:
        try:
            follow(tails, lambda: _of_task(find_out(record, records), task))
        except KeyboardInterrupt:
            return 130
        return 0
    for tail in tails:
        tail.carry()
    if not any(tail.path.exists() for tail in tails):
        (status,) = _of_task(find_out(record, records), task)[:1]
        raise LaunchError(
            f"Job {task} is {status.state}, and there is no "
            f"{' or '.join(str(tail.path) for tail in tails)}. "
            + _what_to_do(status, record, options.rank)
        )
    return 0


def cancel_jobs(options: argparse.Namespace) -> int:
    found = [_find(text, is_whole_allowed=True) for text in options.job]
    for records, record, task in found:
        over = [
            s for s in find_out(record, records) if s.is_over and s.job in (task, *record.tasks)
        ]
        if len(over) == len(record.tasks):
            print(f"Job {task} was over before: it is {over[0].state}.")
            continue
        cluster.cancel(task)
        print(f"Asked Slurm to end job {task} ({record.name}).")
    return 0


def _find(text: str, *, is_whole_allowed: bool = False) -> tuple[Records, Record, str]:
    """The record of a job and its task, by what a user typed."""
    named = re.fullmatch(r"(\d{1,18})(?:_(\d{1,9}))?", text, re.ASCII)
    if named is None:
        raise LaunchError(f"Asked for job {text!r}. Give its number, such as 12, or 12_3.")
    records = Records(os.environ)
    record = records.find(cluster.cluster_name(), int(named[1]))
    if text in record.tasks or (is_whole_allowed and named[2] is None):
        return records, record, text
    raise LaunchError(
        f"Asked for job {text}; it is a sweep, whose jobs are {record.tasks[0]} to "
        f"{record.tasks[-1]}. Choose one of them."
        if record.is_array
        else f"Asked for job {text}; job {record.job} is no sweep. Ask for {record.job}."
    )


def _of_task(found: list[Status], task: str) -> list[Status]:
    return [status for status in found if status.job == task] or found


def _rows(record: Record, found: list[Status]) -> list[tuple[str, ...]]:
    values = dict(zip(record.tasks, record.sweep, strict=False))
    gpus = f" x {record.gpus_per_node} GPUs" if record.gpus_per_node else ""
    return [
        (
            status.job,
            record.name,
            status.state,
            str(status.code) if status.is_over and status.state != "UNKNOWN" else "",
            status.elapsed,
            f"{record.num_nodes}{gpus}",
            status.where,
            shlex.join([*record.program, *values.get(status.job, ())]),
        )
        for status in found
    ]


def _what_to_do(status: Status, record: Record, rank: int | None) -> str:
    if not status.is_over:
        return "Add -f to wait for it."
    if rank is not None:
        return f"Leave --rank out, or look into {record.log_folder(status.job)}."
    return "Did it run in another folder, or with other files for its output?"
