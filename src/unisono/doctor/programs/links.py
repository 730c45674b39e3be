"""All-reduce between each pair of processes, with bandwidth: by NCCL on GPUs, gloo on CPUs.

    unisono run --replicas N -m unisono.doctor.programs.links RECORDS MEGABYTES

The sum is checked: a wrong one is a broken link, whatever its speed.
"""

import itertools
import sys
import time
from typing import Any

import unisono
from unisono.backends import load_backend
from unisono.doctor.programs.records import record, short
from unisono.launch.client import current_world

_ROUNDS = 4


def main() -> None:
    backend, world, facts = load_backend(), current_world(), unisono.topology()
    assert world is not None
    is_on_gpus = backend.num_gpus() > 0  # All start their devices together, which JAX needs.
    if facts.is_chief:
        record("devices", is_on_gpus=is_on_gpus)
    for pair in itertools.combinations(range(facts.world_size), 2):
        if facts.is_chief:
            record("begin", pair=pair)
        found: dict[str, Any] = {}
        if facts.rank in pair:
            try:
                found = _measure(backend.collectives(pair), int(sys.argv[2]) * 2**20 // 4)
            except Exception as error:
                found = {"error": short(error)}
        every = world.all_gather(f"link {pair}", found)
        if facts.is_chief:
            record("pair", pair=pair, **_joined([every[rank] for rank in pair]))


def _measure(collectives: Any, num_items: int) -> dict[str, Any]:
    import keras

    tensor = keras.ops.full((num_items,), float(collectives.rank + 1), dtype="float32")
    (total,) = collectives.all_reduce([tensor], "sum")
    value = keras.ops.convert_to_numpy(keras.ops.mean(total))
    collectives.barrier()
    began = time.perf_counter()
    for _ in range(_ROUNDS):
        (total,) = collectives.all_reduce([tensor], "sum")
    keras.ops.convert_to_numpy(total[:1])
    seconds = (time.perf_counter() - began) / _ROUNDS
    return {"sum": float(value), "gigabytes_per_s": round(4 * num_items / seconds / 1e9, 3)}


def _joined(both: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [found["error"] for found in both if "error" in found]
    if errors:
        return {"error": errors[0]}
    speed = min(found["gigabytes_per_s"] for found in both)
    return {"sum": both[0]["sum"], "gigabytes_per_s": speed}


if __name__ == "__main__":
    main()
