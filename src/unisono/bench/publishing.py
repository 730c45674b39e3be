"""What it costs a training to telemetry how it goes, for `unisono top`.

    python -m unisono.bench.telemetrying

Counted in processor time, as the difference of two trainings would drown in their noise: what is
done at each step, and what a thread does once a second. As shares of a fast step of 3 ms.
"""

import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from unisono.scratch import temporary_folder

_STEP_S = 0.003
_NUM_STEPS = 100_000
_NUM_RECORDS = 2_000


def main() -> None:
    from unisono.devices import choose
    from unisono.monitor.events import EventFile
    from unisono.telemetry import Telemetry

    with temporary_folder("unisono-bench-") as folder:
        placement = choose(replicas=1, gpus=None, num_visible_gpus=0)
        telemetry = Telemetry(folder, global_batch=256, placement=placement)
        telemetry.begin(SimpleNamespace(steps_per_execution=1, history=None))
        file = EventFile(folder, telemetry.writer())
        batches, logs = iter(range(_NUM_STEPS)), {"loss": np.float32(1.0)}

        def step() -> None:
            telemetry.before((batches,))
            telemetry.after(logs)

        def record() -> None:
            file.write(telemetry.progress(rate=1.0, wait=0.1, peers=None, is_over=False))

        each_step, each_record = _cost_s(step, _NUM_STEPS), _cost_s(record, _NUM_RECORDS)
        telemetry.end(None)
        file.close()
    print(f"a step:   {each_step * 1e6:6.1f} µs, {each_step / _STEP_S:.3%} of {_STEP_S * 1e3:g} ms")
    print(f"a record: {each_record * 1e6:6.1f} µs, once a second: {each_record:.3%} of a core")


def _cost_s(work: Callable[[], None], count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        work()
    return (time.process_time() - start) / count


if __name__ == "__main__":
    main()
