"""What is known of a device: plain, frozen facts that programs and the command print."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Process:
    """A process that computes on a GPU; what cannot be told is None."""

    pid: int
    used_bytes: int | None = None
    user: str | None = None


@dataclass(frozen=True)
class Device:
    """One device of this machine; what it does not tell is None.

    `index` counts the devices of a kind on this machine. `visible_index` is the number by which
    backends, `parallel` and `configure` know it, and None where `CUDA_VISIBLE_DEVICES` hides it.
    """

    index: int
    kind: str
    name: str
    uuid: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    utilisation: float | None = None
    """The share of the last moments in which it computed, 0 to 1."""
    temperature_c: int | None = None
    power_w: float | None = None
    processes: tuple[Process, ...] = ()
    visible_index: int | None = None
    num_cores: int | None = None
    """Of a CPU: the cores that this process may use."""
    is_simulated: bool = False
    """A CPU replica that answers as a GPU."""
    error: str | None = None
    """Why a GPU does not answer."""

    @property
    def is_visible(self) -> bool:
        """Whether backends in this process can see it."""
        return self.visible_index is not None
