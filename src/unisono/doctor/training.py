"""Replicas at work: links between them, the exactness contract in short, and the speed-up.

All of it runs the programs that users' training goes through: `unisono.parallel` in one process,
and `unisono run` with a process per replica.
"""

import contextlib
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono.devices import format_replicas
from unisono.devices.cpu import num_cores
from unisono.doctor.machine import busy_fraction
from unisono.doctor.results import Result, broken, failed, not_checked, slow, works
from unisono.scratch import temporary_folder

if TYPE_CHECKING:
    from unisono.doctor.examination import Examination, Target

TOLERANCE = 1e-5
"""That of the exactness contract, for float32; see docs/exactness.md."""
_GPU_MEGABYTES, _CPU_MEGABYTES = 128, 8
_LINKS_S, _CONTRACT_S, _SPEED_S = 60.0, 60.0, 60.0
_MEASURE_S = 2.0
_MIN_GPU_LINK, _MIN_CPU_LINK = 2.0, 0.05
"""In GB/s. PCIe 3.0 gives 6 and more between two GPUs; a shared host path less than 2."""
_MIN_SHARE = 0.4
_MIN_EFFICIENCY = 0.7
_MIN_SHORT_S = 20.0
_MAX_BUSY = 0.4


def check_links(examination: "Examination") -> Iterator[Result]:
    """An all-reduce between each pair of devices is right, and fast enough."""
    backend = _main(examination)
    if backend is None:
        yield not_checked("links", "no backend starts")
    else:
        yield from _links(examination, backend)


def check_contract(examination: "Examination") -> Iterator[Result]:
    """Replicas of the chosen backend compute what one device computes, both ways."""
    backend = _main(examination)
    if backend is None:
        yield not_checked("contract", "no backend starts")
    else:
        yield from _contract(examination, backend)


def check_speed(examination: "Examination") -> Iterator[Result]:
    """More replicas of the chosen backend train faster."""
    backend = _main(examination)
    if backend is None:
        yield not_checked("speed-up", "no backend starts")
        return
    target, cores = examination.target(backend), sorted(os.sched_getaffinity(0))
    name, busy = f"speed-up ({backend})", busy_fraction() or 0.0
    if not target.is_gpu and num_cores() < 2:
        yield not_checked(name, "this machine has one core: CPU replicas take turns on it")
        return
    each = max(1, min(num_cores(), len(cores)) // target.count)
    rates: dict[int, float] = {}
    for count in _counts(target.count if target.is_gpu else min(target.count, num_cores())):
        if not examination.has_time(_MIN_SHORT_S / 2):
            yield not_checked(f"{name}, {format_replicas(count)}", "no time was left")
            break
        answer = examination.run(
            "speed",
            _MEASURE_S,
            backend=backend,
            limit_s=_SPEED_S,
            replicas=count,
            env=target.env,
            # A replica has the same cores whether it is alone or not.
            cores=None if target.is_gpu else cores[: count * each],
            is_exact=False,
        )
        found = answer.of("speed")
        if not found:
            yield failed(
                f"{name}, {format_replicas(count)}",
                answer,
                "training",
                f"Try: KERAS_BACKEND={backend} unisono run --replicas {count} your_script.py",
            )
            return
        rates[count] = float(found[0]["samples_per_s"])
    if rates:
        yield _speed_result(name, target, rates, busy)


def check_others(examination: "Examination") -> Iterator[Result]:
    """The contract and the links of the other backends, while there is time."""
    chosen = _main(examination)
    for backend in examination.backends:
        if backend == chosen or examination.num_gpus(backend) is None:
            continue
        if not examination.has_time(_MIN_SHORT_S):
            advice = f"KERAS_BACKEND={backend} unisono doctor --only contract --only speed"
            yield not_checked(f"contract ({backend})", "no time was left", advice)
            continue
        yield from _contract(examination, backend)
        advice = f"KERAS_BACKEND={backend} unisono doctor --only links --only speed"
        if examination.has_time(_MIN_SHORT_S):
            yield from _links(examination, backend)
            sentence = "measured for the chosen backend only"
            yield not_checked(f"speed-up ({backend})", sentence, advice)
        else:
            yield not_checked(f"links and speed-up ({backend})", "no time was left", advice)


def _links(examination: "Examination", backend: str) -> Iterator[Result]:
    target = examination.target(backend)
    if target.env:
        sentence = "there is one GPU: links, contract and speed-up are checked on CPU replicas"
        yield not_checked(f"NCCL ({backend})", sentence)
    megabytes = _GPU_MEGABYTES if target.is_gpu else _CPU_MEGABYTES
    answer = examination.run(
        "links",
        megabytes,
        backend=backend,
        limit_s=_LINKS_S,
        replicas=target.count,
        env=target.env,
    )
    done = answer.of("pair")
    begun = [tuple(each["pair"]) for each in answer.of("begin")]
    library, noun = ("NCCL", "GPU") if target.is_gpu else ("gloo", "process")
    name = f"{library} ({backend})"
    wrong = {tuple(each["pair"]): str(each["error"]) for each in done if "error" in each}
    wrong |= {
        tuple(each["pair"]): f"a sum of 1 and 2 is {each['sum']:g}"
        for each in done
        if "error" not in each and each["sum"] != 3
    }
    if answer.is_cut or (answer.problem and not begun):
        yield failed(name, answer, "processes of a run", _links_advice(target))
        return
    if len(begun) > len(done):
        wrong[begun[-1]] = f"the all-reduce {answer.problem or 'gave no answer'}"
    for (first, second), what in wrong.items():
        yield broken(f"{name} {noun} {first} and {second}", what, _links_advice(target))
    speeds = {tuple(each["pair"]): float(each["gigabytes_per_s"]) for each in done if "sum" in each}
    if wrong or not speeds:
        return
    data: dict[str, Any] = {
        "gigabytes_per_s": {f"{a}-{b}": speed for (a, b), speed in speeds.items()}
    }
    median = statistics.median(speeds.values())
    least = _MIN_GPU_LINK if target.is_gpu else _MIN_CPU_LINK
    late = [pair for pair, speed in speeds.items() if speed < max(least, _MIN_SHARE * median)]
    shown = f"{min(speeds.values()):.2g} to {max(speeds.values()):.2g} GB/s"
    shown = shown if len(speeds) > 1 else f"{median:.2g} GB/s"
    pairs = f"{len(speeds)} pairs" if len(speeds) > 1 else "1 pair"
    if late:
        which = ", ".join(f"{a} and {b}" for a, b in late[:4])
        reason = _busy_reason() or (
            "See nvidia-smi topo -m: such pairs have no NVLink, or another socket between them."
            if target.is_gpu
            else "Look for a slow virtual network or a container's limit on cores."
        )
        yield slow(name, f"all-reduce at {shown}; slow between {noun} {which}", reason, **data)
    else:
        yield works(name, f"all-reduce right for {pairs} on {target}, {shown}", **data)


def _contract(examination: "Examination", backend: str) -> Iterator[Result]:
    target = examination.target(backend)
    ways = {"one process": None, "processes": target.count}
    with temporary_folder() as folder:
        reference = folder / "reference.npz"
        noise = 0.0
        for way, replicas in ways.items():
            name = f"contract ({backend}, {way})"
            if not examination.has_time():
                yield not_checked(name, "no time was left")
                continue
            if replicas is not None and not reference.exists():
                yield not_checked(name, "one device gave nothing to compare with")
                continue
            answer = examination.run(
                "contract",
                reference,
                target.count,
                backend=backend,
                limit_s=_CONTRACT_S,
                replicas=replicas,
                env=target.env,
            )
            noise = max([noise, *(float(each["difference"]) for each in answer.of("one device"))])
            found = answer.of(way)
            if not found:
                yield failed(
                    name,
                    answer,
                    f"training on {target}",
                    "Please report it, with the output of `unisono doctor --json`.",
                )
                continue
            yield _contract_result(name, target, dict(found[0]), noise)


def _contract_result(name: str, target: "Target", found: dict[str, object], noise: float) -> Result:
    difference = float(str(found["difference"]))
    data: dict[str, Any] = {"difference": difference, "noise": noise, "replicas": target.count}
    floor = "two runs of one are equal" if not noise else f"two runs of one differ by {noise:.0e}"
    if difference <= TOLERANCE:
        sentence = f"{target} compute what one device computes ({difference:.0e}; {floor})"
        return works(name, sentence, **data)
    if difference <= 4 * noise:
        return works(
            name,
            f"{target} differ from one device by {difference:.0e}, and so do {floor}",
            "The devices themselves are not deterministic here.",
            **data,
        )
    return broken(
        name,
        f"{target} differ from one device by {difference:.0e} in {found['where']}; {floor}",
        "Please report it, with the output of `unisono doctor --json`.",
        **data,
    )


def _speed_result(name: str, target: "Target", rates: dict[int, float], busy: float) -> Result:
    first = rates[min(rates)]
    factors = {count: rate / first for count, rate in rates.items()}
    shown = ", ".join(f"{factor:.2f} on {count}" for count, factor in factors.items() if count > 1)
    data: dict[str, Any] = {"samples_per_s": rates, "busy": busy, "kind": target.kind}
    most = max(factors)
    sentence = f"{first:,.0f} samples/s on 1 {target.kind}; times {shown}" if shown else ""
    if not shown:
        return not_checked(name, f"{first:,.0f} samples/s on 1 {target.kind}, and no more measured")
    if factors[most] < _MIN_EFFICIENCY * most:
        reasons = [
            f"{busy:.0%} of the cores were busy with other processes" if busy > _MAX_BUSY else "",
            "replicas share GPUs' links: see the lines on links" if target.is_gpu else "",
            "" if target.is_gpu else _cores_reason(),
        ]
        return slow(name, sentence, f"Likely: {'; '.join(filter(None, reasons))}.", **data)
    return works(name, sentence, **data)


def _main(examination: "Examination") -> str | None:
    """The chosen backend, or the first one that starts."""
    for backend in examination.backends:
        if examination.num_gpus(backend) is not None:
            return backend
    return None


def _counts(most: int) -> list[int]:
    """1, 2, 4, … and the number of all devices."""
    doubled = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return sorted({*doubled, most})


def _busy_reason() -> str:
    busy = busy_fraction() or 0.0
    return f"{busy:.0%} of the cores are busy with other processes." if busy > _MAX_BUSY else ""


def _cores_reason() -> str:
    """Why CPU replicas may be slower together than alone."""
    cores = sorted(os.sched_getaffinity(0))
    siblings = set()
    for core in cores:
        path = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        with contextlib.suppress(OSError):
            siblings.add(path.read_text().strip())
    if siblings and len(siblings) < len(cores):
        return f"the {len(cores)} cores are hyper-threads of {len(siblings)} physical cores"
    return "CPU replicas share memory bandwidth, and on a virtual machine perhaps cores"


def _links_advice(target: "Target") -> str:
    if target.is_gpu:
        return (
            "NCCL_DEBUG=INFO shows more. In virtual machines and with an IOMMU, peer access may "
            "hang: try NCCL_P2P_DISABLE=1; in containers look at /dev/shm."
        )
    return "Processes connect by TCP on loopback: see the lines on ports and limits."
