"""What is said to a framework on machines that are not here: stand-ins that see GPUs."""

import os
from types import SimpleNamespace

import pytest

from unisono.backends import settings
from unisono.backends.tensorflow.framework import TensorFlowFramework
from unisono.backends.torch.framework import TorchFramework
from unisono.devices import Grant, Policy, current_policy
from unisono.errors import DeviceError

MIB = 2**20
ALLOCATOR = "PYTORCH_ALLOC_CONF"


class TestTensorFlow:
    @pytest.fixture
    def said(self):
        return []

    @pytest.fixture
    def tf(self, said):
        """TensorFlow as it is after its import, with three GPUs."""
        visible = ["GPU:0", "GPU:1", "GPU:2"]

        def set_visible_devices(devices, kind):
            visible[:] = devices
            said.append(("visible", kind, *devices))

        def note(name):
            return lambda *values: said.append((name, *values))

        threading = SimpleNamespace(
            set_intra_op_parallelism_threads=note("intra"),
            set_inter_op_parallelism_threads=note("inter"),
        )
        config = SimpleNamespace(
            list_physical_devices=lambda kind: ["GPU:0", "GPU:1", "GPU:2"],
            get_visible_devices=lambda kind: list(visible),
            set_visible_devices=set_visible_devices,
            LogicalDeviceConfiguration=lambda memory_limit: f"{memory_limit} MiB",
            set_logical_device_configuration=note("limit"),
            experimental=SimpleNamespace(set_memory_growth=note("growth")),
            threading=threading,
        )
        return SimpleNamespace(config=config)

    @pytest.mark.parametrize(
        ("grant", "expected"),
        [
            (Grant(), []),
            (Grant(gpus=(2, 0)), [("visible", "GPU", "GPU:2", "GPU:0")]),
            # CUDA had not started when they were chosen, so TensorFlow sees no others.
            (Grant(gpus=(5, 6, 7)), []),
            (Grant(is_growing=True), [("growth", f"GPU:{i}", True) for i in range(3)]),
            (Grant(is_growing=False), [("growth", f"GPU:{i}", False) for i in range(3)]),
            (
                Grant(gpus=(1,), limit_bytes=512 * MIB, limit_share=0.5),
                [("visible", "GPU", "GPU:1"), ("limit", "GPU:1", ["512 MiB"])],
            ),
            (Grant(cpu_threads=56), [("intra", 56), ("inter", 56)]),
        ],
    )
    def test_calls(self, tf, said, grant, expected):
        TensorFlowFramework().apply(tf, grant)
        assert said == expected

    def test_a_program_that_has_set_gpus_itself(self, tf):
        def refuse(gpu, is_growing):
            raise ValueError("Cannot set memory growth on device when virtual devices configured")

        tf.config.experimental.set_memory_growth = refuse
        with pytest.raises(DeviceError, match="it says: Cannot set memory growth") as caught:
            TensorFlowFramework().apply(tf, Grant(is_growing=True))
        assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_of_a_framework_leaves_everything_as_it_was(monkeypatch):
    def refuse(*ignored):
        raise DeviceError("no")

    monkeypatch.delenv("PJRT_NPROC", raising=False)
    monkeypatch.setattr(settings, "after_import", refuse)
    with pytest.raises(DeviceError, match="no"):
        settings.apply_policy(Policy(cpu_threads=7), Policy())
    assert "PJRT_NPROC" not in os.environ
    assert current_policy() == Policy()


class TestTorch:
    @pytest.mark.parametrize(
        ("before", "grant", "after"),
        [
            ({}, Grant(is_growing=True), {ALLOCATOR: "expandable_segments:True"}),
            ({}, Grant(is_growing=False), {}),
            ({}, Grant(limit_bytes=MIB), {}),
            (
                {ALLOCATOR: "max_split_size_mb:64"},
                Grant(is_growing=True),
                {ALLOCATOR: "max_split_size_mb:64,expandable_segments:True"},
            ),
            (
                {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
                Grant(is_growing=True),
                {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
            ),
            (
                {ALLOCATOR: "expandable_segments:False"},
                Grant(is_growing=True),
                {ALLOCATOR: "expandable_segments:False"},
            ),
        ],
    )
    def test_variables(self, monkeypatch, before, grant, after):
        monkeypatch.setattr(os, "environ", dict(before))
        TorchFramework().set_variables(grant)
        assert os.environ == after

    def test_a_limit_waits_until_cuda_starts(self):
        waiting, said = [], []
        totals = [1024 * MIB, 256 * MIB]
        cuda = SimpleNamespace(
            _lazy_call=waiting.append,
            device_count=lambda: 2,
            get_device_properties=lambda i: SimpleNamespace(total_memory=totals[i]),
            set_per_process_memory_fraction=lambda share, i: said.append((i, share)),
        )
        TorchFramework().apply(SimpleNamespace(cuda=cuda), Grant(limit_bytes=256 * MIB))
        assert said == []
        waiting[0]()
        assert said == [(0, 0.25), (1, 1.0)]
