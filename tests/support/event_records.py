"""Records of runs as tests write them."""

import dataclasses
import os
import socket

from unisono.monitor.events import Progress, Writer, ticks_of


def writer(**changes) -> Writer:
    usual = Writer(
        run="run",
        host=socket.gethostname(),
        pid=os.getpid(),
        started=ticks_of(os.getpid()),
        rank=0,
        world_size=2,
        num_replicas=1,
        devices="cpu 0",
        backend="jax",
        program="train.py",
        began=1.0,
    )
    return dataclasses.replace(usual, **changes)


def progress(**changes) -> Progress:
    usual = Progress(
        at=5.0,
        epoch=1,
        num_epochs=3,
        step=7,
        num_steps=10,
        samples_per_s=640.0,
        steps_per_s=10.0,
        input_wait=0.1,
        loss=0.5,
    )
    return dataclasses.replace(usual, **changes)
