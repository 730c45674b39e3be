"""The public call that says which GPUs, how much of their memory and how many threads to use."""

from collections.abc import Sequence

from unisono.backends.settings import apply_policy
from unisono.devices import current_policy, describe


def configure(
    gpus: int | Sequence[int] | str | None = None,
    memory: str | float | None = None,
    cpu_threads: int | None = None,
) -> None:
    """Limit what this process takes of the machine; call it at the top, before devices start.

    `gpus` is a number, a list of ids, `"idle"` or `"idle:2"`, the two emptiest; the others are
    hidden from every backend, and those left are counted from 0. `memory`, for each process on
    each GPU, is `"grow"`, `"all"`, an amount such as `"8GiB"` or a share such as 0.5. Later calls
    may add to what was set, and raise `DeviceError` where they contradict it.

    >>> import unisono
    >>> unisono.configure(memory="grow", cpu_threads=2)
    """
    before = current_policy()
    policy = before.joined_with(describe(gpus, memory, cpu_threads))
    if policy != before:
        apply_policy(policy, before)
