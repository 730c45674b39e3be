"""Batch scripts as a person would have written them, and words that nothing interprets."""

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import LaunchError
from unisono.slurm.batch import (
    Job,
    batch_script,
    check,
    for_option,
    for_shell,
    for_variable,
    option_of,
    seconds_of,
)
from unisono.slurm.submission import sweep_of

GUIDE = Job(
    program=("example.py", "--epochs", "20"),
    name="keras",
    num_nodes=2,
    gpus_per_node=2,
    cpus_per_node=8,
    partition="cas_v100_4",
    time="24:00:00",
    comment="tensorflow",
    modules=("gcc/8.3.0", "cuda/10.0"),
    venv="/home/ada/keras",
)
GUIDE_SCRIPT = """\
#!/bin/bash -l
#SBATCH --job-name=keras
#SBATCH --partition=cas_v100_4
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --comment=tensorflow
#SBATCH --output=%x_%j.out
#SBATCH --error=%x_%j.err
#SBATCH --signal=USR1@120
#SBATCH --no-requeue

set -e
module purge
module load gcc/8.3.0 cuda/10.0
source /home/ada/keras/bin/activate

srun --cpus-per-task=8 unisono run --log-dir keras_$SLURM_JOB_ID example.py --epochs 20
"""
SWEEP = Job(
    program=("-m", "my.training"),
    name="rates",
    account="ab12",
    qos="long",
    conda="ml env",
    env=(("GREETING", "it's $HOME"),),
    options=("--mem=32G", "--exclusive", "--output=all.txt"),
    is_requeued=True,
    sweep=(("--rate=0.1",), ("--rate=a b",)),
)
SWEEP_SCRIPT = """\
#!/bin/bash -l
#SBATCH --job-name=rates
#SBATCH --account=ab12
#SBATCH --qos=long
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --array=0-1
#SBATCH --error=%x_%A_%a.err
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --mem=32G
#SBATCH --exclusive
#SBATCH --output=all.txt

set -e
source "$(conda info --base)/etc/profile.d/conda.sh"
conda activate 'ml env'
export UNISONO_REQUEUE=1
export GREETING='it'"'"'s $HOME'

case $SLURM_ARRAY_TASK_ID in
    0) values=(--rate=0.1) ;;
    1) values=('--rate=a b') ;;
esac

srun unisono run --log-dir rates_${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID -m my.training \
"${values[@]}" || code=$?
if [ "${code:-0}" -eq 75 ]; then  # Preempted: continue later.
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "${code:-0}"
"""


@pytest.mark.parametrize(("job", "script"), [(GUIDE, GUIDE_SCRIPT), (SWEEP, SWEEP_SCRIPT)])
def test_the_script_is_what_a_person_would_have_written(job, script):
    assert batch_script(check(job)) == script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_without_anything_to_set_up_it_is_short():
    script = batch_script(Job(program=("a.py",), name="a", python="/usr/bin/python3"))
    assert script.splitlines()[-1] == (
        "srun /usr/bin/python3 -m unisono run --log-dir a_$SLURM_JOB_ID a.py"
    )
    assert "set -e" not in script


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0")), max_size=4))
def test_the_program_gets_its_words_as_they_were_given(words):
    """By a real shell, which is given the script's last line with another command."""
    script = batch_script(Job(program=("a.py", *words), name="a"))
    line = script[script.index("srun ") :]
    line = line.replace("srun unisono run --log-dir a_$SLURM_JOB_ID", "printf '%s\\0'", 1)
    done = subprocess.run(
        ["bash", "-c", line.encode(errors="surrogateescape")], capture_output=True, check=True
    )
    assert done.stdout.decode(errors="surrogateescape").split("\0") == ["a.py", *words, ""]


@given(st.text())
def test_a_word_of_the_shell_is_one_word(word):
    if "\0" in word:
        with pytest.raises(LaunchError, match="zero byte"):
            for_shell(word)
    else:
        assert shlex.split(for_shell(word)) == [word]


@given(st.text(min_size=1, max_size=200))
def test_an_option_is_one_line(value):
    try:
        line = for_option("comment", value)
    except LaunchError:
        assert any(ord(c) < 32 or ord(c) == 127 for c in value)
        return
    assert "\n" not in line
    assert line.startswith("#SBATCH --comment=")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("24:00:00", 86400),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("2-12:30:05", 217805),
    ],
)
def test_times_are_slurms(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "1h", "a", "-5", "1:2:3:4", "0", "00:00:00", "1-", "٣"])
def test_a_time_that_is_none(text):
    with pytest.raises(LaunchError, match="--time"):
        seconds_of(text)


def test_a_short_job_is_not_warned_for_most_of_its_time():
    assert check(Job(program=("a.py",), name="a", time="2")).warning_s == 30
    assert check(Job(program=("a.py",), name="a", time="60")).warning_s == 120


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"name": "a/b"}, "job name"),
        ({"name": "-a"}, "job name"),
        ({"venv": "/v", "conda": "c"}, "Choose one"),
        ({"time": "soon"}, "--time"),
    ],
)
def test_jobs_that_make_no_sense(changes, found):
    with pytest.raises(LaunchError, match=found):
        check(Job(**{"program": ("a.py",), "name": "a", **changes}))


@pytest.mark.parametrize("text", ["mem=3", "-n 3", "--Mem=3", "--a;b", ""])
def test_options_that_are_none(text):
    with pytest.raises(LaunchError, match="--sbatch"):
        option_of(text)


def test_an_option_cannot_hide_another():
    name, value = option_of("--mem=1\n#SBATCH --nodes=9")
    with pytest.raises(LaunchError, match="line breaks"):
        for_option(name, value)


@pytest.mark.parametrize("name", ["nodes", "array", "wrap", "ntasks"])
def test_options_that_are_ours(name):
    with pytest.raises(LaunchError, match=r"of `unisono submit`"):
        option_of(f"--{name}=1")


@pytest.mark.parametrize("text", ["A", "=b", "1A=b", "A B=c", "A;B=c"])
def test_variables_that_are_none(text):
    with pytest.raises(LaunchError, match="NAME=VALUE"):
        for_variable(text)
    assert for_variable("A=b=c") == ("A", "b=c")


def test_sweeps_are_every_combination():
    found = sweep_of(["rate=0.1,0.01", "depth=2,3"])
    assert found == (
        ("--rate=0.1", "--depth=2"),
        ("--rate=0.1", "--depth=3"),
        ("--rate=0.01", "--depth=2"),
        ("--rate=0.01", "--depth=3"),
    )
    for bad in ("rate", "=1", "--rate=1", "rate="):
        with pytest.raises(LaunchError, match="--sweep"):
            sweep_of([bad])
    with pytest.raises(LaunchError, match="fewer"):
        sweep_of(["rate=" + ",".join(map(str, range(1001)))])
