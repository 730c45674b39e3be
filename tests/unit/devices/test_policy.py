"""What `configure` understands, what it refuses, and what that comes to on a machine with GPUs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.devices import POLICY, Policy, describe, format_bytes
from unisono.errors import DeviceError

GIB = 2**30


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (None, None),
        ("grow", "grow"),
        ("all", "all"),
        ("8GiB", 8 * GIB),
        ("8 gib", 8 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        ("500MB", 500_000_000),
        ("2TB", 2 * 10**12),
        ("64KiB", 65536),
        ("100B", 100),
        (0.5, 0.5),
        (1, 1.0),
        (1.0, 1.0),
    ],
)
def test_memory(memory, expected):
    found = describe(memory=memory).memory
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(
    "memory",
    [
        *("", "8", "8G", "GiB", "-1GiB", "eight GiB", "8GiB0", "0GiB", "0.1B", "Grow", "50%"),
        *(0, 0.0, -0.5, 1.01, 8, True, float("nan"), float("inf"), [1], b"grow"),
    ],
)
def test_memory_that_makes_no_sense(memory):
    with pytest.raises(DeviceError) as caught:
        describe(memory=memory)
    assert str(caught.value) == (
        f'Asked for memory={memory!r}. Write "grow" (what is needed), "all", an amount with its '
        'unit ("8GiB", "500MB"), or a share of the whole above 0 and up to 1 (0.5).'
    )


@given(st.text(max_size=12) | st.floats() | st.integers())
def test_any_memory_is_understood_or_refused(memory):
    try:
        found = describe(memory=memory).memory
    except DeviceError:
        return
    if isinstance(found, float):
        assert 0 < found <= 1
    else:
        assert found in ("grow", "all") or found >= 1


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True])
def test_threads_that_make_no_sense(threads):
    with pytest.raises(DeviceError) as caught:
        describe(cpu_threads=threads)
    assert str(caught.value) == (
        f"Asked for cpu_threads={threads!r}. Give a whole number of at least 1."
    )


@pytest.mark.parametrize("gpus", ["idle:0", "idle:00", "idle:", "idle:-1", "idle:two", "0,1", ""])
def test_words_for_gpus_that_make_no_sense(gpus):
    with pytest.raises(DeviceError) as caught:
        describe(gpus=gpus)
    assert str(caught.value) == (
        f'Asked for gpus={gpus!r}. Write gpus="idle" for all that are idle, gpus="idle:2" for '
        "the two emptiest, a number, or a list of ids."
    )


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (16 * GIB, "16 GiB")]
)
def test_amounts_read_well(count, text):
    assert format_bytes(count) == text


class TestLaterCalls:
    def test_they_add(self):
        first = describe(gpus=[0, 1]).joined_with(describe(memory="grow"))
        assert first == Policy((0, 1), "grow", None)
        assert first.joined_with(describe(cpu_threads=4)) == Policy((0, 1), "grow", 4)

    def test_they_may_repeat(self):
        policy = describe(gpus=range(2), memory="1GiB", cpu_threads=4)
        assert policy.joined_with(describe(gpus=(0, 1), memory="1024MiB")) == policy
        assert policy.joined_with(Policy()) == policy

    @pytest.mark.parametrize(
        ("first", "later", "shown"),
        [
            ({"gpus": [0, 1]}, {"gpus": [1]}, ("gpus=[1]", "gpus=[0, 1]")),
            ({"memory": "grow"}, {"memory": 0.5}, ("memory=0.5", "memory='grow'")),
            ({"cpu_threads": 2}, {"cpu_threads": 4}, ("cpu_threads=4", "cpu_threads=2")),
            (
                {"deterministic": True},
                {"deterministic": False},
                ("deterministic=False", "deterministic=True"),
            ),
        ],
    )
    def test_they_may_not_contradict(self, first, later, shown):
        with pytest.raises(DeviceError) as caught:
            describe(**first).joined_with(describe(**later))
        assert str(caught.value) == (
            f"Asked for {shown[0]}; an earlier call of unisono.configure has set {shown[1]}. "
            "Make one call."
        )


@pytest.mark.parametrize(
    "policy",
    [Policy(), Policy((0, 2), "grow", 3), Policy("idle:2", 0.5), Policy(2, 8 * GIB, None, True)],
)
def test_a_policy_travels_through_the_environment(monkeypatch, policy):
    monkeypatch.setenv(POLICY, policy.to_text())
    assert Policy.from_environment() == policy
    monkeypatch.delenv(POLICY)
    assert Policy.from_environment() == Policy()


class TestOnAMachineWithGpus:
    """`configure` with no framework loaded: what is left in the environment for one to find."""

    VARIABLES = "{n: os.environ[n] for n in sorted(os.environ) if n.startswith(('CUDA_', 'XLA_'))}"

    def configured(self, answer, call, **env):
        told = f"told(lambda: unisono.configure({call}))"
        return answer(f"[{told}, {self.VARIABLES}]", **{"STAND_IN_GPUS": "4", **env})

    @pytest.mark.parametrize(
        ("gpus", "env", "visible"),
        [
            ("[2, 0]", {}, "GPU-00bb0002-...2,GPU-0000aa00-...0"),
            ("2", {}, "GPU-0000aa00-...0,GPU-0000aa01-...1"),
            # Counted as CUDA counts, from those that are visible.
            ("[1]", {"CUDA_VISIBLE_DEVICES": "3,2"}, "2"),
            ("[0, 1]", {"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b,9"}, "MIG-a,MIG-b"),
            ("'idle:2'", {"STAND_IN_FREE": "15,9,16,14"}, "GPU-0000aa00-...0,GPU-00bb0002-...2"),
            ("'idle:1'", {"STAND_IN_FREE": "15,9,16,14"}, "GPU-00bb0002-...2"),
            # One is held, one too full, one lost.
            (
                "'idle'",
                {"STAND_IN_FREE": "16,16,7,16", "STAND_IN_HELD": "1:1", "STAND_IN_LOST": "3"},
                "0",
            ),
            ("'idle'", {"CUDA_VISIBLE_DEVICES": "2,1", "STAND_IN_HELD": "1:1"}, "2"),
            ("[0]", {"STAND_IN_LOST": "3"}, "0"),
        ],
    )
    def test_others_are_hidden(self, answer, gpus, env, visible):
        visible = visible.replace("...", "0000-0000-0000-00000000000")
        told, variables = self.configured(answer, f"gpus={gpus}", **env)
        assert told is None
        assert variables == {"CUDA_VISIBLE_DEVICES": visible}

    @pytest.mark.parametrize(
        ("call", "env", "message"),
        [
            (
                "gpus=[0, 5]",
                {},
                "Asked for GPUs [0, 5]; this machine has [0, 1, 2, 3]. Choose among those, or "
                "leave gpus= out to take all.",
            ),
            (
                "gpus=[]",
                {},
                "Asked for gpus=[]: no GPU at all. Name at least one id, or leave gpus= out to "
                "take all.",
            ),
            ("gpus=0", {}, "Asked for gpus=0. Give a whole number of at least 1."),
            (
                "gpus=[2]",
                {"CUDA_VISIBLE_DEVICES": "0,1"},
                "Asked for GPUs [2]; this machine has [0, 1]. Choose among those, or leave gpus= "
                "out to take all.",
            ),
            (
                "gpus=[0]",
                {"CUDA_VISIBLE_DEVICES": "-1"},
                "Asked for gpus=[0]; found no visible GPU. CUDA_VISIBLE_DEVICES='-1' hides GPU 0, "
                "1, 2, 3. CUDA stops at its entry '-1', which is no GPU of this machine. Leave "
                "gpus= out to work on the CPU, or set UNISONO_SIMULATED_GPUS to rehearse.",
            ),
            (
                "gpus=[0]",
                {"STAND_IN_NO_DRIVER": "1"},
                "Asked for gpus=[0]; found no visible GPU. No GPU listed: the NVIDIA driver does "
                "not answer: Driver Not Loaded. Leave gpus= out to work on the CPU, or set "
                "UNISONO_SIMULATED_GPUS to rehearse.",
            ),
            (
                "gpus=[1, 3]",
                {"STAND_IN_LOST": "3"},
                "Asked for gpus=[1, 3]; GPU 3 fails: GPU is lost. Choose others.",
            ),
            (
                "gpus='idle:4'",
                {"STAND_IN_HELD": "1:1"},
                "Asked for gpus='idle:4'; found 3 idle of 4 visible GPU(s). `unisono devices` "
                "shows who uses them. Ask for fewer, or name their ids.",
            ),
            (
                "memory='20GiB'",
                {"STAND_IN_MIXED": "1"},
                "Asked for memory=20 GiB a GPU; found one with 16 GiB. Ask for at most that, or "
                "for a share of the whole.",
            ),
            (
                "memory=0.5",
                {"STAND_IN_FAILING": "1"},
                "Asked for memory=0.5; found no way to tell how much the GPUs have. See "
                "`unisono devices`, install nvidia-ml-py (pip install nvidia-ml-py) if it is "
                'missing, or ask for "grow".',
            ),
        ],
    )
    def test_what_cannot_be_done_says_what_to_do(self, answer, call, env, message):
        told, variables = self.configured(answer, call, **env)
        assert told == f"DeviceError: {message}"
        assert variables == {k: v for k, v in env.items() if k.startswith("CUDA_")}

    @pytest.mark.parametrize(
        ("call", "env", "expected"),
        [
            ("memory='grow'", {}, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
            (
                "memory='all'",
                {},
                {"XLA_CLIENT_MEM_FRACTION": "0.950000", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"},
            ),
            (
                "memory='4GiB'",
                {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"},
                {"XLA_CLIENT_MEM_FRACTION": "0.250000", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            ),
            # The limit holds on the larger one, of which it is a smaller share.
            (
                "memory='12GiB'",
                {"STAND_IN_MIXED": "1"},
                {"XLA_CLIENT_MEM_FRACTION": "0.500000", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            ),
            (
                "gpus=[0], memory='12GiB'",
                {"STAND_IN_MIXED": "1", "CUDA_VISIBLE_DEVICES": "0,1"},
                {
                    "CUDA_VISIBLE_DEVICES": "0",
                    "XLA_CLIENT_MEM_FRACTION": "0.750000",
                    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                },
            ),
            ("memory='4GiB'", {"STAND_IN_GPUS": "0"}, {}),
        ],
    )
    def test_memory_as_jax_reads_it(self, answer, call, env, expected):
        assert self.configured(answer, call, **env) == [None, expected]

    def test_a_later_call_adds(self, answer):
        calls = "[unisono.configure(gpus=[1]), unisono.configure(memory=0.25), "
        calls += "unisono.configure(gpus=[1]), current_policy(), os.environ['PJRT_NPROC']]"
        first = "[unisono.configure(cpu_threads=3)]"
        *nothing, policy, threads = answer(f"{first} + {calls}", STAND_IN_GPUS="4")
        assert nothing == [None] * 4
        assert policy == {"gpus": [1], "memory": 0.25, "cpu_threads": 3, "deterministic": None}
        assert threads == "3"

    @pytest.fixture
    def without_the_binding(self, tmp_path):
        """As where /proc shows three GPUs, and nvidia-ml-py and a backend are not installed."""
        for name in "abc":
            (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
        (tmp_path / "dev").mkdir()
        root = f"_ROOT=__import__('pathlib').Path({str(tmp_path)!r})"
        return (
            "sys.modules.update(pynvml=None) or os.environ.update(KERAS_BACKEND='none') or "
            f"vars(sys.modules['unisono.devices.driver']).update({root})"
        )

    def test_without_the_binding_gpus_are_known_by_number(self, answer, without_the_binding):
        pretend = without_the_binding
        call = "told(lambda: unisono.configure(gpus=[0, 2]))"
        asked = f"[{pretend}, {call}, os.environ.get('CUDA_VISIBLE_DEVICES')]"
        assert answer(asked) == [None, None, "0,2"]

    def test_without_the_binding_nobody_knows_which_are_idle(self, answer, without_the_binding):
        pretend = without_the_binding
        call = "told(lambda: unisono.configure(gpus='idle'))"
        assert answer(f"[{pretend}, {call}]")[1] == (
            "DeviceError: Asked for gpus='idle'; found no GPU that tells whether it is idle. "
            "No GPU listed: nvidia-ml-py, a dependency of unisono, is not installed: "
            "pip install nvidia-ml-py. "
            "Yet there is NVIDIA's kernel module (/proc/driver/nvidia): 3 visible GPU(s). "
            "Name ids instead."
        )

    def test_simulated_gpus_are_restricted_too(self, answer):
        asked = "[{}, os.environ['UNISONO_SIMULATED_GPUS'], num_gpus(), len(unisono.devices())]"
        env = {"UNISONO_SIMULATED_GPUS": "4"}
        for gpus in ("[0, 1]", "[3, 1]", "2", "'idle:2'"):
            call = f"told(lambda: unisono.configure(gpus={gpus}))"
            assert answer(asked.format(call), **env) == [None, "2", 2, 2]
        call = "told(lambda: unisono.configure(gpus=[4]))"
        told, *rest = answer(asked.format(call), **env)
        assert told.startswith("DeviceError: Asked for GPUs [4]; this machine has [0, 1, 2, 3].")
        assert rest == ["4", 4, 4]
