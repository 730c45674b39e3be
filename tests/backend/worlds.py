"""Runs a program in several processes that meet, as a launcher would start them."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.launch.rendezvous import RendezvousServer

_CHOICES = ("UNISONO_", "HOROVOD_")


@dataclass(frozen=True)
class Ended:
    """How a process of a world ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def told(self) -> Any:
        """The JSON of its last line, once it ended well."""
        assert self.returncode == 0, self.stderr
        return json.loads(self.stdout.splitlines()[-1])


def run_world(
    script: Path | str, size: int, *arguments: str, timeout_s: float = 240, **env: str
) -> list[Ended]:
    """Run a program in `size` processes; how each ended."""
    secret = secrets.token_hex(16)
    meeting = RendezvousServer(size, secret)
    processes: list[subprocess.Popen[str]] = []
    outputs = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(size):
                # Files: two pipes that nobody reads could block a process that others wait for.
                outputs.append([Path(folder, f"{rank}.{name}") for name in ("out", "err")])
                with outputs[-1][0].open("w") as out, outputs[-1][1].open("w") as err:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, str(script), *arguments],
                            env=_environment(rank, size, meeting.address, secret) | env,
                            stdout=out,
                            stderr=err,
                            text=True,
                        )
                    )
            codes = [process.wait(timeout_s) for process in processes]
            texts = [[path.read_text() for path in paths] for paths in outputs]
            return [Ended(code, *text) for code, text in zip(codes, texts, strict=True)]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        meeting.close()


def _environment(rank: int, size: int, address: str, secret: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_CHOICES)}
    places = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    places |= {"NODE": 0, "NUM_NODES": 1}
    ours = {f"UNISONO_{name}": str(value) for name, value in places.items()}
    ours |= {"UNISONO_COORDINATOR": address, "UNISONO_SECRET": secret}
    return inherited | ours | {"UNISONO_HOST": "127.0.0.1", "OMP_NUM_THREADS": "1"}
