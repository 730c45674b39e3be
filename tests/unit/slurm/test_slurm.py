"""Jobs on a real Slurm cluster: submitted, seen, followed, ended; and tasks of every kind.

Programs here load no framework; tests/backend/test_slurm.py trains.
"""

import json
import shlex
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from slurm_cluster import make_cluster

pytestmark = pytest.mark.namespaces
WHO = """
import json, os, sys
import unisono
from unisono.launch.client import current_world
facts, world = unisono.topology(), current_world()
mine = [facts.rank, facts.world_size, facts.node, facts.local_rank, facts.launcher]
every = world.all_gather("who", mine) if world else [mine]
if facts.is_chief:
    print(json.dumps(every), flush=True)
print("rank", facts.rank, "is here", file=sys.stderr, flush=True)
"""
TELL = """
import json, os, sys
names = ("SLURM_JOB_NAME", "GREETING")
print(json.dumps([sys.argv[1:], [os.environ.get(name) for name in names]]))
"""
HOSTILE = [
    "", " ", "a b", "$HOME", "$(touch owned)", "`touch owned`", "; touch owned", "'", '"', "\\",
    "a'b\"c", "\n", "#SBATCH --nodes=9", "\n#SBATCH --nodes=9\n", "--wrap=touch owned", "-h", "*",
    "~", "ünï ☃ 字", "%x_%j", "${values[@]}", "!!", "&", "|", ">owned", "\t", "--", "\x7f",
    "\x1b[31m",
]  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with make_cluster(tmp_path_factory.mktemp("cluster"), 2) as made:
        yield made


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "script.py") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


def submit(cluster, folder: Path, *words: object):
    done = cluster.unisono("submit", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[2]


def test_a_job_on_two_nodes_from_beginning_to_end(cluster, tmp_path, write):
    words = ["--nodes", 2, "--gpus-per-node", 2, "--env", "UNISONO_SIMULATED_GPUS=2"]
    job = submit(cluster, tmp_path, *words, "--job-name", "who", write(WHO))
    followed = cluster.unisono("logs", job, "-f", cwd=tmp_path)
    places = [[0, 4, 0, 0, "unisono"], [1, 4, 0, 1, "unisono"]]
    places += [[2, 4, 1, 0, "unisono"], [3, 4, 1, 1, "unisono"]]
    assert json.loads(followed.stdout) == places
    assert followed.stderr == "rank 0 is here\n"
    again = cluster.unisono("logs", job, cwd=tmp_path)
    assert (again.stdout, again.stderr) == (followed.stdout, followed.stderr)
    of_rank = cluster.unisono("logs", job, "--rank", 3, cwd=tmp_path)
    assert of_rank.stdout == "rank 3 is here\n"
    header, *_, last = cluster.unisono("jobs", cwd=tmp_path).stdout.splitlines()
    assert header.split()[:4] == ["JOB", "NAME", "STATE", "CODE"]
    assert last.split()[:4] == [job, "who", "COMPLETED", "0"]
    assert last.endswith("n[1-2]  script.py")
    over = cluster.unisono("cancel", job, cwd=tmp_path)
    assert "over before" in over.stdout


def test_waiting_shows_the_output_and_gives_the_code(cluster, tmp_path, write):
    script = write("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    done = cluster.unisono("submit", "--wait", script, cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout.endswith("out\n")
    assert "err\n" in done.stderr
    assert "FAILED" in done.stderr.splitlines()[-1]


def test_a_job_is_remembered_when_slurm_has_forgotten_it(cluster, tmp_path, write):
    """By what was seen of its end, and by what the run left beside its logs."""
    job = submit(cluster, tmp_path, write("import sys; sys.exit(5)"))
    cluster.wait_for_state(job, "FAILED")
    path = next(Path(cluster.folder).glob(f"records/unisono/jobs/*-{job}/job.json"))
    record = json.loads(path.read_text())
    assert record["ended"] == []
    gone = path.parent.with_name("stage-99999")
    path.parent.rename(gone)
    (gone / "job.json").write_text(json.dumps(record | {"job": 99999}))
    (tmp_path / f"script_{job}").rename(tmp_path / "script_99999")
    row = cluster.unisono("jobs", cwd=tmp_path).stdout.splitlines()[-1].split()
    assert row[:4] == ["99999", "script", "FAILED", "5"]
    (tmp_path / "script_99999" / "outcome.json").unlink()
    row = cluster.unisono("jobs", cwd=tmp_path).stdout.splitlines()[-1].split()
    assert row[:3] == ["99999", "script", "UNKNOWN"]


def test_a_sweep_is_an_array_of_jobs(cluster, tmp_path, write):
    words = ["--sweep", "rate=0.1,a b", "--sweep", "depth=2", "--job-name", "s", "--wait"]
    done = cluster.unisono("submit", *words, write(TELL), "first", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[2]
    for i, rate in enumerate(["0.1", "a b"]):
        told = json.loads(cluster.unisono("logs", f"{job}_{i}", cwd=tmp_path).stdout)
        assert told[0] == ["first", f"--rate={rate}", "--depth=2"]
    whole = cluster.unisono("logs", job, cwd=tmp_path)
    assert whole.returncode == 1
    assert f"{job}_0 to {job}_1" in whole.stderr
    rows = cluster.unisono("jobs", cwd=tmp_path).stdout.splitlines()[-2:]
    assert [row.split()[0] for row in rows] == [f"{job}_0", f"{job}_1"]
    assert rows[0].endswith("script.py first --rate=0.1 --depth=2")


def test_cancelling(cluster, tmp_path, write):
    script = write("import time; open('begun', 'w').close(); time.sleep(600)")
    job = submit(cluster, tmp_path, script)
    cluster.wait_for((tmp_path / "begun").exists, 60)
    done = cluster.unisono("cancel", job, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cluster.wait_for_state(job, "CANCELLED", seconds=20)


def test_hostile_words_reach_the_program_and_nothing_else(cluster, tmp_path, write):
    check_words(cluster, tmp_path, write(TELL), HOSTILE)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30), max_size=40
    )
)
def test_any_words_reach_the_program(cluster, tmp_path, write, words):
    check_words(cluster, tmp_path, write(TELL), words)


def check_words(cluster, folder: Path, script: str, words: list[str]) -> None:
    name = "".join(c for c in "".join(words) if c.isprintable() and c not in "/\\")[:60].strip()
    name = name.lstrip("-") or "a"
    greeting = "".join(words)
    options = ["--job-name", name, "--env", f"GREETING={greeting}", "--wait"]
    options += [f"--comment=x{name}y"]
    done = cluster.unisono("submit", *options, script, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    out = next(path for path in folder.iterdir() if path.suffix == ".out")
    told = json.loads(out.read_text().splitlines()[-1])
    assert told == [words, [name, greeting]]
    job = done.stdout.split()[2]
    comment = cluster.call("squeue", "-h", "-t", "all", "-j", job, "-o", "%k")
    assert comment == f"x{name}y".strip()
    assert not list(folder.rglob("owned"))
    for path in folder.iterdir():
        if path.name != script:
            path.unlink() if path.is_file() else remove(path)


def remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--partition", "hihg", "script.py"], "Did you mean high?"),
        (["--gpus-per-node", 3, "script.py"], "nodes of partition main have 2 GPU(s) at most"),
        (["--nodes", 3, "script.py"], "partition main has 2"),
        (["--time", "1h", "script.py"], "--time '1h'"),
        (["--partition", "high", "--time", "2:00:00", "script.py"], "allows 60 minutes"),
        (["--venv", "nowhere", "script.py"], "nowhere/bin/activate"),
        (["--job-name", "a\nb", "script.py"], "line breaks"),
        (["--comment", "a\n#SBATCH --nodes=9", "script.py"], "line breaks"),
        (["--sbatch", "--constraint=fast", "script.py"], "Slurm's sbatch refused"),
        (["--env", "A", "script.py"], "NAME=VALUE"),
        (["--sweep", "a", "script.py"], "--sweep"),
        (["nothing.py"], "nothing.py"),
    ],
)
def test_what_cannot_be_submitted_leaves_nothing_behind(cluster, tmp_path, write, words, said):
    write("print()")
    before = cluster.call("squeue", "-h", "-t", "all", "-o", "%i")
    done = cluster.unisono("submit", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert said in done.stderr
    assert cluster.call("squeue", "-h", "-t", "all", "-o", "%i") == before
    assert not list(Path(cluster.folder).glob("records/unisono/jobs/.draft*"))


@pytest.mark.parametrize(
    "words", [["logs", "99"], ["cancel", "99"], ["logs", "x"], ["cancel", "-"]]
)
def test_a_job_that_does_not_exist(cluster, tmp_path, words):
    done = cluster.unisono(*words, cwd=tmp_path)
    assert done.returncode == 1
    assert "Asked for job" in done.stderr


def test_a_machine_without_slurm(cluster, tmp_path, write):
    script = write("print()")
    done = cluster.unisono("submit", script, cwd=tmp_path, PATH="")
    assert done.returncode == 1
    assert "it is not on this machine" in done.stderr
    dry = cluster.unisono("submit", "--dry-run", script, cwd=tmp_path, PATH="")
    assert dry.returncode == 0
    assert dry.stdout.startswith("#!/bin/bash\n#SBATCH --job-name=script\n")


def test_the_script_of_the_documentation(cluster, tmp_path, write):
    page = (Path(__file__).parents[3] / "docs" / "slurm.md").read_text()
    block = page[page.index("$ unisono submit --dry-run") + 2 :]
    command, _, script = block[: block.index("```")].partition("\n")
    write("print()", "example.py")
    home = tmp_path / "ada"
    (home / "keras" / "bin").mkdir(parents=True)
    for name in ("activate", "unisono"):
        (home / "keras" / "bin" / name).touch()
    done = cluster.unisono(*shlex.split(command)[1:], cwd=tmp_path, HOME=str(home))
    assert done.stdout.replace(str(home), "/home/ada") == script


@pytest.mark.parametrize(
    ("options", "places"),
    [
        (["-N2", "--ntasks-per-node=2", "--gres=gpu:2"], [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (["-N2", "--ntasks-per-node=2", "--gpus-per-task=1"], [(0, 0), (0, 1), (1, 0), (1, 1)]),
        (["-N1", "-n2", "--gres=gpu:2", "--gpu-bind=single:1"], [(0, 0), (0, 1)]),
        (["-N2", "-n3"], [(0, 0), (0, 1), (1, 0)]),
        (["-N2", "--ntasks-per-node=8", "--gres=gpu:2"], [(0, 0), (0, 1), (1, 0), (1, 1)]),
    ],
)
@pytest.mark.parametrize("command", [[], ["-m", "unisono", "run"]], ids=["python", "unisono_run"])
def test_tasks_of_srun_find_each_other(cluster, tmp_path, write, options, places, command):
    script = write(WHO)
    words = ["srun", *options, sys.executable, *command, script]
    done = cluster.run(*words, cwd=tmp_path, UNISONO_SIMULATED_GPUS="2")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(node, local) for _, _, node, local, _ in found] == places
    assert [rank for rank, *_ in found] == list(range(len(places)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-N2", "--ntasks-per-node=1", "--gres=gpu:2"], "srun unisono run script.py"),
        (["-N2", "-n3", "--gres=gpu:1"], "#SBATCH --ntasks-per-node=1"),
    ],
)
def test_tasks_that_do_not_fit_are_explained(cluster, tmp_path, write, options, said):
    words = ["srun", *options, sys.executable, write(WHO)]
    done = cluster.run(*words, cwd=tmp_path, UNISONO_START_TIMEOUT="3")
    assert done.returncode != 0
    assert said in done.stderr


def test_tasks_that_do_not_fit_end_before_a_framework_is_loaded(cluster, tmp_path, write):
    (tmp_path / "keras.py").write_text("print('loaded')")
    words = ["srun", "-N2", "--ntasks-per-node=1", "--gres=gpu:2", sys.executable]
    done = cluster.run(*words, write("import unisono, keras"), cwd=tmp_path)
    assert done.returncode != 0
    assert done.stderr.count("#SBATCH --ntasks-per-node=2") == 2  # Once for each node.
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_more_processes_than_cores_are_remarked_on(cluster, tmp_path, write):
    words = ["srun", "-N1", "-n1", sys.executable, "-m", "unisono", "run", "--replicas", "9"]
    done = cluster.run(*words, write("print('ran')"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --cpus-per-task=9" in done.stderr
    assert done.stdout == "ran\n"


def test_more_replicas_than_the_allocation_has(cluster, tmp_path, write):
    words = ["srun", "-N1", "-n1", "--gres=gpu:2", sys.executable, "-m", "unisono", "run"]
    words += ["--gpus", "0,1,2", write(WHO)]
    done = cluster.run(*words, cwd=tmp_path, UNISONO_SIMULATED_GPUS="2")
    assert done.returncode != 0
    assert "Slurm gave this task 2 GPU(s)" in done.stderr


def test_steps_of_one_allocation_do_not_mix(cluster, tmp_path, write):
    step = f"srun -N1 -n2 --exact {sys.executable} {write(WHO)}"
    write(
        f"#!/bin/bash\n#SBATCH -N2 --ntasks-per-node=2 -o out\n{step} & {step} & wait\n", "job.sh"
    )
    done = cluster.run("sbatch", "--wait", "job.sh", cwd=tmp_path)
    lines = [line for line in (tmp_path / "out").read_text().splitlines() if line[0] == "["]
    assert done.returncode == 0
    assert [[place[1] for place in json.loads(line)] for line in lines] == [[2, 2], [2, 2]]
