"""A user's own script on several numbers of replicas, by what its runs publish of themselves.

Its net and data are its own, so the limit is not measured but worked out: as many times as fast as
with the first number.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from unisono.bench.race import Lap, Race
from unisono.errors import BenchError
from unisono.events import Progress, read_runs

_LOOK_S = 0.2


def race_script(script: Path, backend: str, counts: Sequence[int]) -> Race:
    """One run for each number of replicas, one after the other."""
    if not script.is_file():
        raise BenchError(f"Asked to measure {script}; there is no such file.")
    race = Race(script.name, backend, load=os.getloadavg()[0])
    for count in counts:
        lap = _lap(script, backend, count)
        first = race.laps.get(f"together-{counts[0]}", [lap])[0]
        ideal = first.images_per_s / counts[0] * count
        race.laps[f"ideal-{count}"] = [Lap(ideal, lap.images_per_s / ideal, 0.0, 0)]
        race.laps[f"together-{count}"] = [lap]
    return race


def _lap(script: Path, backend: str, count: int) -> Lap:
    """A second of the run, without its first quarter."""
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        env = {**os.environ, "KERAS_BACKEND": backend, "UNISONO_RUNS": folder}
        command = [sys.executable, "-m", "unisono", "run", "--replicas", str(count), str(script)]
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        seen: dict[int, dict[float, Progress]] = {}
        while process.poll() is None:
            time.sleep(_LOOK_S)
            for ranks in read_runs(Path(folder)).values():
                for each in ranks:
                    if each.last is not None and each.last.steps_per_s and not each.last.is_over:
                        seen.setdefault(each.writer.rank, {})[each.last.at] = each.last
    if process.returncode or not seen:
        raise BenchError(
            f"{script} on {count} replica(s) ended with code {process.returncode} and published "
            f"{sum(map(len, seen.values()))} figures. Let it call unisono.parallel(model) and "
            "train for some seconds."
        )
    kept = [list(records.values())[len(records) // 4 :] for records in seen.values()]
    waits = [statistics.median(each.peer_wait or 0.0 for each in records) for records in kept]
    inputs = [statistics.median(each.input_wait or 0.0 for each in records) for records in kept]
    # Samples, or steps where samples cannot be counted.
    rate = statistics.median(each.samples_per_s or each.steps_per_s or 0.0 for each in kept[0])
    return Lap(rate, 1.0, 0.0, 0, statistics.mean(waits), min(waits), max(inputs))
