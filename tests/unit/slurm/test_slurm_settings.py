"""Defaults of `unisono submit` from files, for a cluster and a partition."""

import pytest

from unisono.errors import LaunchError
from unisono.slurm.defaults import defaults, read_settings

WHOLE = """
nodes = 2
partition = "gpu"
module = ["gcc/8.3.0"]
env = {A = "b", C = 3}
[slurm.partitions.gpu]
gpus-per-node = 4
[slurm.partitions.small]
gpus-per-node = 1
[slurm.cluster.lune]
account = "ab12"
partition = "small"
[slurm.cluster.lune.partitions.small]
time = "1:00:00"
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "unisono.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path

    return write


def found_in(folder, cluster="other", partition=None):
    return defaults(*read_settings(folder), cluster=cluster, partition=partition)


def test_the_narrower_wins(write):
    folder = write(f"[slurm]{WHOLE}")
    common = {"nodes": 2, "module": ["gcc/8.3.0"], "env": ["A=b", "C=3"]}
    assert found_in(folder) == {**common, "partition": "gpu", "gpus-per-node": 4}
    there = {"partition": "small", "gpus-per-node": 1, "account": "ab12", "time": "1:00:00"}
    assert found_in(folder, "lune") == {**common, **there}
    assert found_in(folder, partition="small")["gpus-per-node"] == 1


def test_pyproject_and_the_folders_above(write, tmp_path):
    write("[tool.unisono.slurm]\nnodes = 3\n", "pyproject.toml")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert found_in(inner) == {"nodes": 3}
    (inner / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert found_in(inner) == {"nodes": 3}
    (inner / "unisono.toml").write_text("[slurm]\nnodes = 4\n")
    assert found_in(inner) == {"nodes": 4}


def test_no_file_is_no_setting(tmp_path):
    assert found_in(tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[slurm]\nnods = 2", "Did you mean nodes"),
        ("[slurm]\nnodes = 'two'", "a whole number"),
        ("[slurm]\nnodes = true", "a whole number"),
        ("[slurm]\nmodule = 3", "a list of texts"),
        ("[slurm]\nenv = 3", "a table"),
        ("[slurm]\nrequeue = 'yes'", "true or false"),
        ("[slurm]\ntime = 3", "a text"),
        ("slurm = 3", "Make it a table"),
        ("[slurm]\ncluster = 3", "Make it tables"),
        ("[slurm", "Mend the file"),
    ],
)
def test_settings_that_make_no_sense(write, text, said):
    with pytest.raises(LaunchError, match=said):
        found_in(write(text))
