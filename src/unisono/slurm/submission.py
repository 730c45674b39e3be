"""From the options of `unisono submit` and a user's defaults to a job in Slurm's queue."""

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
from unisono.slurm import cluster
from unisono.slurm.batch import Job, batch_script, check, for_variable
from unisono.slurm.cluster import Partition, choose_partition
from unisono.slurm.defaults import defaults, read_settings
from unisono.slurm.jobs import Record, Records, expand

_SWEPT = re.compile(r"(?P<name>[A-Za-z][\w-]*)=(?P<values>.+)", re.DOTALL)
_MAX_TASKS = 1000


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
    if len(every) > _MAX_TASKS:
        raise LaunchError(
            f"Asked for a sweep of {len(every)} jobs. Sweep fewer values at a time: at most "
            f"{_MAX_TASKS} jobs."
        )
    return every


def on_partition(job: Job, found: Sequence[Partition]) -> Job:
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


def submit(job: Job, cluster_name: str, records: Records) -> Record:
    """Let Slurm check the job's batch script, submit it, and keep a record of the job."""
    draft = records.draft(batch_script(job))
    try:
        cluster.test(str(draft))
        number = cluster.submit(str(draft))
    except BaseException:
        records.drop(draft)
        raise
    record = Record(
        job=number,
        cluster=cluster_name,
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
