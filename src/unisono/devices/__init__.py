"""Finds devices, chooses among them, and describes how much of them a process may use.

Runs before any framework is imported and imports none.
"""

from unisono.devices.choice import (
    CLAIMED_REPLICAS,
    FORCED_REPLICAS,
    OVERSUBSCRIBE,
    REPLICAS,
    SIMULATED_GPUS,
    Placement,
    check_cores,
    choose,
    choose_own,
    claimed_replicas,
    default_replicas,
    forced_replicas,
    format_replicas,
    num_gpus,
    num_listed_gpus,
    remark_on_cores,
    simulated_gpus,
    warn_of_cores,
)
from unisono.devices.driver import Device, Process
from unisono.devices.listing import Listing, devices, list_devices
from unisono.devices.policy import (
    POLICY,
    Grant,
    Policy,
    Selection,
    current_policy,
    describe,
    format_bytes,
    grant_of,
    select,
    set_policy,
)
from unisono.devices.visibility import has_cuda_started

__all__ = [
    "CLAIMED_REPLICAS",
    "FORCED_REPLICAS",
    "OVERSUBSCRIBE",
    "POLICY",
    "REPLICAS",
    "SIMULATED_GPUS",
    "Device",
    "Grant",
    "Listing",
    "Placement",
    "Policy",
    "Process",
    "Selection",
    "check_cores",
    "choose",
    "choose_own",
    "claimed_replicas",
    "current_policy",
    "default_replicas",
    "describe",
    "devices",
    "forced_replicas",
    "format_bytes",
    "format_replicas",
    "grant_of",
    "has_cuda_started",
    "list_devices",
    "num_gpus",
    "num_listed_gpus",
    "remark_on_cores",
    "select",
    "set_policy",
    "simulated_gpus",
    "warn_of_cores",
]
