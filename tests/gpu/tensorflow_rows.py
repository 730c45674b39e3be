"""The rows of TensorFlow: the graph of a train step in a run of two processes with a GPU each.

python -m gpu.tensorflow_rows --out rows.json
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from gpu.results import Row, write_rows
from unisono.scratch import temporary_folder

NETS = ("minigooglenet", "resnet50")


def rows_of(nets: tuple[str, ...]) -> list[Row]:
    with temporary_folder("unisono-gpu-") as folder:
        out = folder / "found.json"
        words = ["-m", "unisono", "run", "--replicas", "2", "-m", "gpu.tensorflow_graph"]
        subprocess.run([sys.executable, *words, str(out), *nets], check=True)
        found = json.loads(out.read_text())
    rows = []
    for net in nets:
        own = found[net]
        rows += [
            Row("tensorflow", net, "collectives", own["collectives"]),
            Row("tensorflow", net, "MiB in collectives", own["mib"]),
            Row("tensorflow", net, "… of gradients", own["gradient_collectives"]),
            Row("tensorflow", net, "% of backward before the first", own["waits_for"]),
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    write_rows(asked.out, rows_of(NETS))


if __name__ == "__main__":
    main()
