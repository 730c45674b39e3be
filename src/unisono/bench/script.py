"""A user's script on several numbers of replicas, measured by the telemetry of its runs.

There is no other program with its net and data, so the limit is computed: proportional to the
throughput on the first number of replicas.
"""

import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from unisono.bench.race import Lap, Race
from unisono.devices import format_replicas
from unisono.errors import LaunchError
from unisono.monitor.events import Progress, read_runs
from unisono.scratch import temporary_folder

_LOOK_S = 0.2
_FEWEST = 3
"""Records, one per second, for a median."""


def race_script(
    script: Path,
    backend: str,
    counts: Sequence[int],
    rounds: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Race:
    """One run for each number of replicas, one after the other, `rounds` times."""
    if not script.is_file():
        raise LaunchError(f"Asked to measure {script}; there is no such file.")
    race = Race(script.name, backend, load=os.getloadavg()[0])
    for number, count in itertools.product(range(rounds), counts):
        tell(f"{script.name}, {backend}: round {number + 1} of {rounds}, {format_replicas(count)}")
        lap = _lap(script, backend, count)
        first = race.laps.get(f"together-{counts[0]}", [lap])[number]
        ideal = first.images_per_s / counts[0] * count
        race.laps.setdefault(f"ideal-{count}", []).append(Lap(ideal, lap.images_per_s / ideal))
        race.laps.setdefault(f"together-{count}", []).append(lap)
    return race


def _lap(script: Path, backend: str, count: int) -> Lap:
    """The throughput of a run, without its first steps."""
    seen: dict[int, dict[float, Progress]] = {}
    with temporary_folder("unisono-bench-") as folder:
        env = {**os.environ, "KERAS_BACKEND": backend, "UNISONO_RUNS": str(folder)}
        command = [sys.executable, "-m", "unisono", "run", "--replicas", str(count), str(script)]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                time.sleep(_LOOK_S)
                _read(Path(folder), seen)
        except BaseException:
            process.terminate()  # The launcher ends its workers.
            process.wait()
            raise
    what = f"{script} on {format_replicas(count)}"
    if process.returncode:
        raise LaunchError(
            f"{what} ended with code {process.returncode}, so it cannot be measured. Its output "
            "is above."
        )
    kept = [warm(list(records.values())) for records in seen.values()]
    num_kept = len(kept[0]) if kept else 0
    if num_kept < _FEWEST:
        raise LaunchError(
            f"{what} published {num_kept} records after its first seconds; at least {_FEWEST} are "
            "needed, one per second. Let it call unisono.parallel(model), and give it more epochs: "
            "at least ten seconds of training."
        )
    waits = [statistics.median(each.peer_wait or 0.0 for each in records) for records in kept]
    inputs = [statistics.median(each.input_wait or 0.0 for each in records) for records in kept]
    # Samples, or steps if samples cannot be counted.
    rate = statistics.median(each.samples_per_s or each.steps_per_s or 0.0 for each in kept[0])
    return Lap(
        rate,
        seconds=1.0,
        waited_s=statistics.mean(waits),
        slowest_wait_s=min(waits),
        input_s=max(inputs),
    )


def _read(folder: Path, seen: dict[int, dict[float, Progress]]) -> None:
    for ranks in read_runs(folder).values():
        for each in ranks:
            if each.last is not None and each.last.steps_per_s and not each.last.is_over:
                seen.setdefault(each.writer.rank, {})[each.last.at] = each.last


def warm(records: list[Progress]) -> list[Progress]:
    """Without the first quarter of the records, in which the step is compiled."""
    return records[max(1, len(records) // 4) :]
