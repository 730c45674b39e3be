"""The GPUs as the driver, NVML and each backend see them, and whether each of them computes."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from unisono.backends import FRAMEWORKS, Build
from unisono.backends.missing_gpus import explain_missing_gpus
from unisono.devices import format_bytes, simulated_gpus
from unisono.devices.driver import num_in_files, read_driver, traces
from unisono.doctor.results import Result, broken, failed, not_checked, slow, works

if TYPE_CHECKING:
    from unisono.doctor.examination import Examination

_ROOT = Path("/")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_MIN_FREE = 0.5
_MIN_SHARE = 0.5
"""A GPU that is slower than this part of the others' median is held back by something."""


def check_driver(examination: "Examination") -> Iterator[Result]:
    """The driver is loaded and answers."""
    if simulated_gpus():
        yield not_checked("driver", "UNISONO_SIMULATED_GPUS puts CPU replicas in its place")
        return
    reading = read_driver()
    if reading.driver is not None:
        cuda = f", for CUDA up to {_dotted(reading.cuda)}" if reading.cuda else ""
        container = _granted(len({gpu.index for gpu in reading.gpus}))
        yield works("driver", f"NVIDIA {reading.driver}{cuda}{container}", cuda=reading.cuda)
        return
    signs = traces()
    if signs:
        yield broken(
            "driver", f"there is {' and '.join(signs)}, but {reading.reason}", _remedy(signs)
        )
    elif cards := _num_cards():
        yield broken(
            "driver",
            f"{cards} NVIDIA GPU(s) are on the PCI bus, and no driver is loaded",
            "Install NVIDIA's driver, or in a container start it with --gpus all.",
        )
    else:
        yield not_checked(
            "driver",
            "this machine shows no GPU, so nothing about GPUs can be checked",
            "In a container, start it with --gpus all; in a Slurm job, ask for --gres=gpu:N.",
        )


def check_gpus(examination: "Examination") -> Iterator[Result]:
    """Each GPU answers, and is not taken by others."""
    gpus = [device for device in examination.listing.devices if device.kind == "gpu"]
    for note in examination.listing.notes if gpus else ():
        yield works("visible GPUs", note.rstrip("."))
    for gpu in gpus:
        name = f"gpu {gpu.index}"
        if gpu.is_simulated:
            continue
        if gpu.error is not None:
            yield broken(
                name,
                f"{gpu.name} does not answer: {gpu.error}",
                "Reset it (nvidia-smi --gpu-reset) or restart the machine; until then hide it by "
                "CUDA_VISIBLE_DEVICES.",
            )
            continue
        total, free = gpu.total_bytes, gpu.free_bytes
        memory = (
            ""
            if total is None or free is None
            else f", {format_bytes(free)} free of {format_bytes(total)}"
        )
        sentence = f"{gpu.name}{memory}"
        if total and free is not None and free < _MIN_FREE * total:
            yield slow(
                name,
                f"{sentence}: more than half is in use by other processes",
                "`unisono devices` shows whose; unisono.configure(gpus='idle') takes idle ones.",
            )
        else:
            yield works(name, sentence)


def check_backend_gpus(examination: "Examination") -> Iterator[Result]:
    """Each backend sees the GPUs that the driver shows."""
    if simulated_gpus():
        yield not_checked("visible", f"{simulated_gpus()} simulated GPUs stand in for real ones")
        return
    expected = examination.listing.num_visible_gpus
    has_mig = any((each.uuid or "").startswith("MIG-") for each in examination.listing.devices)
    expected = min(expected, 1) if has_mig else expected
    for backend in examination.backends:
        name, seen = f"GPUs in {backend}", examination.num_gpus(backend)
        if seen is None:
            yield not_checked(name, f"{backend} does not start")
        elif not expected and not seen:
            continue
        elif FRAMEWORKS[backend].is_kept_from_gpus():
            yield not_checked(name, "the environment tells it to use no GPU")
        elif not seen:
            build = Build(
                **{
                    key: value
                    for key, value in examination.facts(backend).of("build")[0].items()
                    if key != "stage"
                }
            )
            told = explain_missing_gpus(FRAMEWORKS[backend], build, expected)
            sentence, _, advice = told.partition(". ")
            yield broken(name, sentence, advice)
        elif seen < expected:
            yield broken(
                name,
                f"it sees {seen} of {expected} GPUs",
                "Some may be too old for this build, or fail: see the lines on each GPU.",
            )
        else:
            yield works(name, f"it sees {seen}", num_gpus=seen)


def check_cuda(examination: "Examination") -> Iterator[Result]:
    """No backend was built for a newer CUDA than the driver supports."""
    cuda = examination.listing.cuda
    if cuda is None:
        return
    for backend in examination.backends:
        for build in examination.facts(backend).of("build"):
            if not build["cuda"]:
                continue
            major = int(str(build["cuda"]).split(".")[0])
            name, needs = f"CUDA of {backend}", f"it was built for CUDA {build['cuda']}"
            if major > cuda[0]:
                yield broken(
                    name,
                    f"{needs}; the driver supports CUDA up to {_dotted(cuda)}",
                    f"Update the driver, or: {FRAMEWORKS[backend].gpu_install(cuda)}",
                )
            else:
                nccl = f", NCCL {build['nccl']}" if build["nccl"] else ""
                yield works(name, f"{needs}{nccl}; the driver supports up to {_dotted(cuda)}")


def check_compute(examination: "Examination") -> Iterator[Result]:
    """Each device of each backend multiplies matrices, and the product is right."""
    for backend in examination.backends:
        answer = examination.facts(backend)
        done = answer.of("compute")
        name = f"compute in {backend}"
        wrong = [each for each in done if each.get("error") or each["difference"]]
        begun = [each["device"] for each in answer.of("begin")]
        hung = begun[len(done) :]
        for each in wrong:
            what = each.get("error") or f"a product is wrong by {each['difference']:g}"
            yield broken(
                f"{name} on {each['device']}",
                what,
                "Hide this device (CUDA_VISIBLE_DEVICES), update the driver, or have it replaced.",
            )
        for device in hung:
            yield failed(
                f"{name} on {device}",
                answer,
                "a product of two matrices",
                "Run nvidia-smi and dmesg | grep -i xid for its errors.",
            )
        if wrong or hung or not done:
            if not done and not hung:
                yield not_checked(name, f"{backend} does not start")
            continue
        speeds = {str(each["device"]): float(each["gflops"]) for each in done}
        median = statistics.median(speeds.values())
        late = [device for device, speed in speeds.items() if speed < _MIN_SHARE * median]
        shown = ", ".join(f"{device} {speed:,.0f}" for device, speed in speeds.items())
        if late:
            yield slow(
                name,
                f"{', '.join(late)} computes at less than half of the others' speed ({shown} "
                "GFLOP/s)",
                "Look for other users, heat or a power limit: unisono top, nvidia-smi -q -d CLOCK",
                gflops=speeds,
            )
        else:
            yield works(name, f"right on {shown} GFLOP/s", gflops=speeds)


def _granted(num_listed: int) -> str:
    """A remark where the host has more GPUs than this container was granted."""
    present = num_in_files()
    return (
        f"; {num_listed} of the host's {present} GPUs are granted here"
        if present > num_listed
        else ""
    )


def _remedy(signs: list[str]) -> str:
    text = " ".join(signs)
    if "AMD" in text:
        return "ROCm is not read by NVML: the backend's own count below is what unisono uses."
    if "WSL2" in text:
        return (
            "Update the NVIDIA driver of Windows and run `wsl --update`; /usr/lib/wsl/lib has to "
            "hold libnvidia-ml.so.1. Install no NVIDIA driver inside WSL2."
        )
    return (
        "After an update of the driver, restart the machine. In a container, start it with "
        "--gpus all (NVIDIA Container Toolkit)."
    )


def _num_cards() -> int:
    """NVIDIA's display controllers on the PCI bus."""
    count = 0
    for folder in (_ROOT / "sys/bus/pci/devices").glob("*"):
        try:
            vendor = (folder / "vendor").read_text().strip()
            kind = (folder / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == _NVIDIA and kind.startswith(_DISPLAY)
    return count


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
