"""`unisono top`: devices and runs of this machine, live, twice a second.

Loads no framework, and only reads: event files, the GPU driver, and /proc.
"""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.monitor.events import RankEvents, RunsReader, runs_folder
from unisono.monitor.readings import Readings, read
from unisono.monitor.verdict import last_word, verdict_on_devices, verdict_on_run
from unisono.monitor.view import lines

_EVERY_S = 0.5
_RECENT_S = 60.0
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "top", help="watch devices and runs of this machine", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--once", action="store_true", help="print one view and end")
    parser.add_argument("--json", action="store_true", help="for programs; implies --once")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    reader = RunsReader(runs_folder(os.environ))
    if not options.json and not options.once and sys.stdout.isatty():
        _live(reader)
        return 0
    look(reader)
    time.sleep(_EVERY_S)  # Loads are measured between two readings.
    readings, runs = look(reader)
    if options.json:
        print(json.dumps(as_json(readings, runs)))
    else:
        width = shutil.get_terminal_size((100, 40)).columns
        print("\n".join(lines(readings, runs, width=width, is_cut=sys.stdout.isatty())))
    return 0


def look(reader: RunsReader) -> tuple[Readings, dict[str, list[RankEvents]]]:
    """The machine, and the runs that are alive or have just ended."""
    now = time.time()
    shown = {
        name: ranks
        for name, ranks in reader.read().items()
        if any(events.is_alive for events in ranks) or now - max(map(last_word, ranks)) < _RECENT_S
    }
    pids = [events.writer.pid for ranks in shown.values() for events in ranks if events.is_alive]
    return read(pids), shown


def as_json(readings: Readings, runs: Mapping[str, Sequence[RankEvents]]) -> dict[str, Any]:
    return {
        "devices": readings.to_json() | {"verdict": verdict_on_devices(readings.devices)},
        "runs": [
            {
                "run": name,
                "verdict": verdict_on_run(ranks),
                "ranks": [dataclasses.asdict(events) for events in ranks],
            }
            for name, ranks in runs.items()
        ],
    }


def _live(reader: RunsReader) -> None:
    """Draw until Ctrl-C, on the terminal's alternate screen, so that its content comes back."""
    out = sys.stdout
    out.write(_ENTER)
    try:
        while True:
            columns, rows = shutil.get_terminal_size()
            shown = lines(*look(reader), width=columns, height=rows)
            out.write(_HOME + "".join(f"{line}{_CLEAR_LINE}\r\n" for line in shown[:-1]))
            out.write("".join(shown[-1:]) + _CLEAR_LINE + _CLEAR_BELOW)
            out.flush()
            time.sleep(_EVERY_S)
    except KeyboardInterrupt:
        pass
    finally:
        out.write(_LEAVE)
        out.flush()
