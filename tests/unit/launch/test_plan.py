"""What each process of a node is given, and how `-np` and `-H` are read: tables."""

import dataclasses
import json

import pytest

from unisono.devices import Policy, Selection
from unisono.errors import LaunchError
from unisono.launch.cpu_environment import malloc_environment
from unisono.launch.plan import Facts, Resources, assign_resources, environment
from unisono.launch.request import HostSlots, merge_local, parse_hosts, spread

PINNED = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}
PINNED |= {"TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"}
MEMORY = malloc_environment({})
GPUS = Selection((0, 2), ("GPU-a", "GPU-c"), (None, None))
FACTS = Facts(
    first_rank=2,
    world_size=6,
    local_size=2,
    node=1,
    num_nodes=3,
    coordinator="10.0.0.1:4000",
    secret="s",
    host="10.0.0.2",
    interface="eth0",
    timeout_s=600,
    start_timeout_s=2.5,
)


def plan(num_processes, num_cores, quota=None, gpus=None, policy=None, **given):
    return assign_resources(
        num_processes,
        gpus=gpus,
        cores=range(num_cores),
        num_cores=quota or num_cores,
        policy=policy or Policy(),
        given=given,
    )


@pytest.mark.parametrize(
    ("num_processes", "num_cores", "cores"),
    [
        (1, 2, [(0, 1)]),
        (2, 2, [(0,), (1,)]),
        (2, 5, [(0, 1), (2, 3, 4)]),
        (3, 8, [(0, 1), (2, 3, 4), (5, 6, 7)]),
        (3, 2, [(), (), ()]),
    ],
)
def test_cores_are_split_or_shared_by_all(num_processes, num_cores, cores):
    found = plan(num_processes, num_cores)
    assert [each.cores for each in found] == cores
    assert [each.env["OMP_NUM_THREADS"] for each in found] == [str(len(c) or 1) for c in cores]


def test_one_switch_leaves_cpu_processes_as_they_are():
    (first, second) = plan(2, 4, UNISONO_CPU_TUNING="0")
    assert first == second == Resources({})
    (asked,) = plan(1, 4, policy=Policy(cpu_threads=3), UNISONO_CPU_TUNING="0")
    assert asked.env["OMP_NUM_THREADS"] == "3"
    assert MEMORY.keys().isdisjoint(asked.env)
    (on_gpu, _) = plan(2, 4, gpus=GPUS, UNISONO_CPU_TUNING="0")
    assert on_gpu == plan(2, 4, gpus=GPUS)[0]


def test_gpu_processes_run_on_the_cores_nearest_to_their_gpu():
    gpus = dataclasses.replace(GPUS, cores=((0, 1, 2, 3), (4, 5, 6, 7)))
    (first, second) = plan(2, 6, gpus=gpus)
    assert (first.cores, second.cores) == ((0, 1, 2, 3), (4, 5))
    assert (first.env["OMP_NUM_THREADS"], second.env["OMP_NUM_THREADS"]) == ("3", "2")
    # One socket: there is nothing to choose. None of the near cores is granted: all are used.
    assert [each.cores for each in plan(2, 4, gpus=gpus)] == [(), ()]
    assert plan(2, 6, gpus=gpus, UNISONO_CPU_TUNING="0")[0].cores == ()


def test_rocm_reads_its_own_variable_first():
    (first, second) = plan(2, 4, gpus=GPUS, HIP_VISIBLE_DEVICES="3, 5")
    assert (first.env["HIP_VISIBLE_DEVICES"], second.env["HIP_VISIBLE_DEVICES"]) == ("3", "5")


def test_threads_follow_the_cores_and_xla_counts_them_itself():
    (each,) = plan(1, 4)
    assert each.env == dict.fromkeys(PINNED, "4") | MEMORY


def test_a_container_that_pays_for_fewer_cores_is_not_pinned_to_some():
    """Other containers would be pinned to the same; the numbers of threads keep to the limit."""
    found = plan(2, 64, quota=5)
    assert [each.cores for each in found] == [(), ()]
    assert found[0].env == dict.fromkeys(PINNED | {"PJRT_NPROC"}, "2") | MEMORY


def test_what_the_user_has_set_stands():
    (each,) = plan(1, 4, MKL_NUM_THREADS="3")
    assert each.env == dict.fromkeys(PINNED - {"MKL_NUM_THREADS"}, "4") | MEMORY


def test_a_number_of_threads_that_is_asked_for():
    found = plan(2, 8, policy=Policy(cpu_threads=3))
    assert [each.cores for each in found] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert found[0].env["OMP_NUM_THREADS"] == "3"
    assert json.loads(found[0].env["UNISONO_POLICY"])["cpu_threads"] == 3


def test_one_gpu_each_and_all_cores():
    found = plan(2, 8, gpus=GPUS, policy=Policy(gpus=(0, 2), memory="grow"))
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in found] == ["GPU-a", "GPU-c"]
    for each in found:
        assert each.cores == ()
        assert each.env["OMP_NUM_THREADS"] == "4"
        assert "TF_NUM_INTRAOP_THREADS" not in each.env
        assert json.loads(each.env["UNISONO_POLICY"]) == {
            "gpus": None,
            "memory": "grow",
            "cpu_threads": None,
            "deterministic": None,
        }


def test_simulated_gpus_are_cores():
    found = plan(2, 4, gpus=Selection((0, 1), (), (), is_simulated=True))
    assert [each.env["UNISONO_SIMULATED_GPUS"] for each in found] == ["1", "1"]
    assert [each.cores for each in found] == [(0, 1), (2, 3)]


def test_a_process_is_told_its_place():
    given = {"HOME": "/h", "UNISONO_REPLICAS": "4", "UNISONO_JOINED": "1", "UNISONO_RANK": "9"}
    given |= {"NCCL_SOCKET_IFNAME": "ib0", "OMP_NUM_THREADS": "9"}
    found = environment(Resources({"OMP_NUM_THREADS": "1"}), FACTS, 1, given)
    assert found == {
        "HOME": "/h",
        "OMP_NUM_THREADS": "1",
        "NCCL_SOCKET_IFNAME": "ib0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "UNISONO_RANK": "3",
        "UNISONO_WORLD_SIZE": "6",
        "UNISONO_LOCAL_RANK": "1",
        "UNISONO_LOCAL_SIZE": "2",
        "UNISONO_NODE": "1",
        "UNISONO_NUM_NODES": "3",
        "UNISONO_COORDINATOR": "10.0.0.1:4000",
        "UNISONO_SECRET": "s",
        "UNISONO_HOST": "10.0.0.2",
        "UNISONO_TIMEOUT": "600",
        "UNISONO_START_TIMEOUT": "2.5",
        "PYTHONUNBUFFERED": "1",
    }


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a:2,b:1", [("a", 2), ("b", 1)]),
        ("a", [("a", 1)]),
        (" a:2 , b ", [("a", 2), ("b", 1)]),
        ("10.0.0.1:4", [("10.0.0.1", 4)]),
    ],
)
def test_hosts_and_slots(text, entries):
    assert parse_hosts(text) == [HostSlots(*entry) for entry in entries]


@pytest.mark.parametrize("text", ["", "a:0", "a:x", ":2", "a:1,,b:1"])
def test_hosts_that_make_no_sense(text):
    with pytest.raises(LaunchError, match="Write host:slots"):
        parse_hosts(text)


def test_the_first_hosts_are_filled_first():
    hosts = [HostSlots("a", 2), HostSlots("b", 2), HostSlots("c", 1)]
    assert spread(hosts, None) == hosts
    assert spread(hosts, 3) == [HostSlots("a", 2), HostSlots("b", 1)]
    with pytest.raises(LaunchError, match="Asked for -np 6; the hosts of -H have 5 slot"):
        spread(hosts, 6)


def test_names_of_this_machine_are_one_host():
    hosts = parse_hosts("me:1,b:2,localhost:3,b:1")
    assert merge_local(hosts, {"me", "localhost"}) == [HostSlots("me", 4), HostSlots("b", 3)]
