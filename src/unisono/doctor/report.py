"""The report as text, in colour on a terminal, and as JSON for bug reports.

A report may be published: it has no user name, no host name and no path of a home folder in it.
"""

import contextlib
import getpass
import json
import math
import os
import platform
import re
import socket
import sys
from pathlib import Path
from typing import Any, TextIO

import unisono
from unisono.doctor.examination import Report, device_records, named_variables
from unisono.doctor.results import Result, Verdict
from unisono.doctor.software import package_versions
from unisono.imports import keras_backend

_STYLES = {
    Verdict.WORKS: "green",
    Verdict.SLOW: "yellow",
    Verdict.BROKEN: "bold red",
    Verdict.NOT_CHECKED: "dim",
}
_WIDTH = max(len(verdict.value) for verdict in Verdict)
_MIN_NAME_CHARS = 3
_COMMON_NAMES = ("root", "user", "localhost")


class Printer:
    """Prints each result as it comes, under the title of its group."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._is_plain = not stream.isatty()
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._stream = stream
        self._group = ""

    def show(self, group: str, result: Result) -> None:
        if group != self._group:
            self._line(f"{group}" if not self._group else f"\n{group}", "bold")
            self._group = group
        word = result.verdict.value.ljust(_WIDTH)
        text = f"{result.name}: {result.sentence}"
        if self._is_plain:
            self._line(f"  {word}  {text}{_advice(result)}")
            return
        from rich.text import Text

        self._console.print(
            Text.assemble(
                "  ", (word, _STYLES[result.verdict]), "  ", text, (_advice(result), "dim")
            )
        )

    def close(self, report: Report) -> None:
        counts = ", ".join(
            f"{count} {verdict.value}" for verdict in Verdict if (count := report.count(verdict))
        )
        self._line(
            f"\n{verdict_in_words(report)} ({counts or 'nothing checked'}; {report.seconds:.0f} s)"
        )
        broken = [result for _, result in report.results if result.verdict is Verdict.BROKEN]
        for result in broken:
            self._line(f"  {result.name}: {result.advice or result.sentence}")

    def _line(self, text: str, style: str = "") -> None:
        if self._is_plain:
            print(text, file=self._stream, flush=True)
        else:
            from rich.text import Text

            self._console.print(Text(text, style=style))


def verdict_in_words(report: Report) -> str:
    """The whole report in one sentence."""
    is_on_gpus = any(device.kind == "gpu" for device in report.listing.devices)
    where = "" if is_on_gpus else ". Nothing could be checked on GPUs"
    if report.exit_code:
        return "Something is broken"
    if report.count(Verdict.SLOW):
        return f"All that was checked works, some of it slowly{where}"
    return f"All that was checked works{where}"


def as_json(report: Report) -> str:
    """The report for programs and bug reports."""
    found = {
        "unisono": unisono.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libc": " ".join(platform.libc_ver()),
        "keras_backend": keras_backend(),
        "packages": package_versions(),
        "driver": report.listing.driver,
        "driver_cuda": report.listing.cuda,
        "devices": device_records(report.listing),
        "notes": report.listing.notes,
        "environment": named_variables(),
        "checks": [
            {
                "group": group,
                "name": result.name,
                "verdict": result.verdict.value,
                "sentence": result.sentence,
                "advice": result.advice,
                "data": dict(result.data),
            }
            for group, result in report.results
        ],
        "seconds": round(report.seconds, 1),
        "verdict": verdict_in_words(report),
        "exit_code": report.exit_code,
    }
    return json.dumps(_anonymous(found, _names()), indent=2)


def _advice(result: Result) -> str:
    return f" -> {result.advice}" if result.advice else ""


def _names() -> dict[str, str]:
    """What identifies a person or a machine, and what stands for it."""
    found = {str(Path.home()): "~", os.environ.get("HOME", ""): "~"}
    host = socket.gethostname()
    names = {host: "<host>", host.split(".")[0]: "<host>"}
    with contextlib.suppress(KeyError, OSError):
        names[getpass.getuser()] = "<user>"
    is_telling = {k: v for k, v in names.items() if len(k) >= _MIN_NAME_CHARS}
    found |= {k: v for k, v in is_telling.items() if k not in _COMMON_NAMES}
    return {name: sign for name, sign in found.items() if name not in ("", "/")}


def _anonymous(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, str):
        for name, sign in names.items():
            value = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", sign, value)
        # Other people's folders, in search paths.
        return re.sub(r"(/home|/Users)/[^/:\s]+", "~", value)
    if isinstance(value, dict):
        return {str(key): _anonymous(each, names) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_anonymous(each, names) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no such numbers.
    return value


def print_json(report: Report) -> None:
    sys.stdout.write(as_json(report) + "\n")
