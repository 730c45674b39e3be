"""The options of a training program, and where its results go."""

import errno
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from unisono.errors import DeviceError, OutputError, SettingError
from unisono.training import begin
from unisono.training.settings import Outputs, Settings, choose_backend, read, to_words, write

DEFAULTS = {"epochs": 70, "batch_per_replica": 64, "learning_rate": 0.005, "warmup_epochs": 5}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("UNISONO_REPLICAS", "UNISONO_SIMULATED_GPUS", "UNISONO_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    # Other tests of this process may have imported Keras, which has a backend from then on.
    monkeypatch.delitem(sys.modules, "keras", raising=False)


def settings_of(*words: str) -> Settings:
    return read("cifar10", "", DEFAULTS, words)


def test_a_recipe_gives_the_defaults():
    settings = settings_of()
    assert (settings.epochs, settings.num_epochs) == (70, 70)
    assert (settings.batch_per_replica, settings.learning_rate) == (64, 0.005)
    assert (settings.lr_scaling, settings.warmup_epochs, settings.seed) == ("linear", 5, 0)
    assert settings.output == "cifar10-results"


def test_the_schedule_is_that_of_all_epochs_when_only_some_are_trained():
    settings = settings_of("--epochs", "70", "--stop-after", "3")
    assert (settings.epochs, settings.num_epochs) == (70, 3)
    assert settings_of("--epochs", "2", "--stop-after", "3").num_epochs == 2


@pytest.mark.parametrize(
    "words",
    [
        ("--gpus", "4"),
        ("--gpus", "0,2"),
        ("--gpus", "1,"),
        ("--replicas", "2", "--mixed-precision", "--seed", "3"),
        ("--lr", "0.1", "--lr-scaling", "sqrt", "--stop-after", "1", "--output", "a b/plot.png"),
        ("--data", "synthetic", "--compare", "--warmup-epochs", "0"),
    ],
)
def test_settings_survive_a_new_start(words):
    settings = settings_of(*words)
    assert settings_of(*to_words(settings)) == settings


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--epochs", "0"], "'0' is not a whole number of at least 1"),
        (["--epochs", "-3"], "'-3' is not a whole number of at least 1"),
        (["--epochs", "two"], "'two' is not a whole number"),
        (["--stop-after", "0"], "at least 1"),
        (["--batch-per-replica", "0"], "at least 1"),
        (["--lr", "0"], "'0' is not a number above 0"),
        (["--lr", "nan"], "'nan' is not a number above 0"),
        (["--lr-scaling", "cubic"], "invalid choice"),
        (["--warmup-epochs", "-1"], "a whole number from 0"),
        (["--gpus", "all"], "'all' is not a number of GPUs, or ids such as 0,2"),
        (["--backend", "mxnet"], "invalid choice"),
        (["--epoch", "3"], "unrecognized arguments"),
    ],
)
def test_options_that_make_no_sense(words, found, capsys):
    with pytest.raises(SystemExit) as ended:
        settings_of(*words)
    assert ended.value.code == 2
    assert found in capsys.readouterr().err


def test_two_words_for_the_devices():
    with pytest.raises(SettingError, match=r"--replicas and for --gpus\. Leave one of the two out"):
        settings_of("--replicas", "2", "--gpus", "2")


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "2")
    with pytest.raises(DeviceError, match=r"Asked for GPUs \[0, 1, 2\]; this machine has \[0, 1\]"):
        begin(**DEFAULTS, name="x", arguments=["--gpus", "3", "--data", "synthetic"])


def test_a_backend_that_is_not_there(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "torch" or None)
    with pytest.raises(SettingError, match="the backend jax; installed are torch"):
        choose_backend(None)  # KERAS_BACKEND asks for it.
    with pytest.raises(SettingError, match="--backend torch"):
        choose_backend("tensorflow")
    monkeypatch.delenv("KERAS_BACKEND")
    monkeypatch.setenv("KERAS_HOME", "nowhere")
    choose_backend(None)
    assert os.environ["KERAS_BACKEND"] == "torch"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingError, match="Found no backend"):
        choose_backend(None)


def test_a_backend_after_keras_has_another(monkeypatch):
    keras = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "torch"))
    monkeypatch.setitem(sys.modules, "keras", keras)
    with pytest.raises(SettingError, match="Keras was already imported with torch"):
        choose_backend("jax")


def test_a_plot_names_the_place_of_the_rest(tmp_path):
    outputs = Outputs.at(tmp_path / "some" / "plot.PNG")
    assert outputs.plot == tmp_path / "some" / "plot.PNG"
    assert outputs.model == tmp_path / "some" / "model.keras"
    outputs = Outputs.at(tmp_path / "folder")
    assert outputs.plot == tmp_path / "folder" / "plot.png"
    assert outputs.table == tmp_path / "folder" / "history.csv"


def test_the_folder_is_tried_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"Asked for results in .*file/x: .*--output"):
        Outputs.at(tmp_path / "file" / "x").check()
    with pytest.raises(OutputError, match="/proc"):
        Outputs.at(Path("/proc/unisono")).check()
    (tmp_path / "taken" / "model.keras").mkdir(parents=True)
    with pytest.raises(OutputError, match=r"model.keras exists and cannot be replaced"):
        Outputs.at(tmp_path / "taken").check()
    Outputs.at(tmp_path / "new" / "deep").check()
    assert list((tmp_path / "new" / "deep").iterdir()) == []


def test_a_full_disk_is_told_and_leaves_the_old_file(tmp_path):
    path = tmp_path / "history.csv"
    path.write_text("old")

    def fill(draft: Path) -> None:
        draft.write_text("half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError) as raised:
        write(path, fill)
    assert f"Could not write {path}: No space left on device (" in str(raised.value)
    assert "The model is still in memory" in str(raised.value)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_really_full_disk(tmp_path):
    """/dev/full takes nothing, as a disk without room does."""
    with pytest.raises(OutputError, match="No space left on device"):
        write(tmp_path / "x", lambda draft: Path("/dev/full").write_text("much"))


def test_a_program_without_a_file_has_no_processes(plain_python, tmp_path):
    script = (
        "from unisono.training import begin; import os; os.chdir(os.environ['FOLDER'])\n"
        "begin(epochs=1, batch_per_replica=1, learning_rate=0.1)"
    )
    here = {"FOLDER": str(tmp_path), "KERAS_BACKEND": os.environ["KERAS_BACKEND"]}
    done = plain_python(["-c", script, "--replicas", "2", "--data", "synthetic"], **here)
    assert done.returncode == 1
    assert done.stderr.startswith("training: Asked for replicas in separate processes")


def test_begin_here(tmp_path):
    words = ["--output", str(tmp_path), "--data", "synthetic", "--epochs", "4"]
    run = begin(**DEFAULTS, name="x", arguments=words)
    assert (run.epochs, run.num_epochs, run.num_replicas, run.global_batch) == (4, 4, 1, 64)
    assert run.devices == {"replicas": 1}
    assert run.num_steps(65) == 2
    assert run.is_chief


@pytest.mark.parametrize("words", [["--replicas", "4"], ["--compare"]])
def test_a_run_of_processes_has_its_replicas(words, monkeypatch, tmp_path):
    world = SimpleNamespace(size=2, is_chief=True)
    monkeypatch.setattr("unisono.training.run.current_world", lambda: world)
    with pytest.raises(SettingError, match="in a run of 2 processes, each of which is one replica"):
        begin(**DEFAULTS, name="x", arguments=[*words, "--output", str(tmp_path)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "64 per replica × 1 = 64 global; learning rate 0.005, not scaled"),
        (
            ["--gpus", "4"],
            "64 per replica × 4 = 256 global; learning rate 0.005 × 4 = 0.02 after 5 epochs of "
            "warm-up",
        ),
        (
            ["--gpus", "4", "--lr-scaling", "sqrt", "--warmup-epochs", "1"],
            "64 per replica × 4 = 256 global; learning rate 0.005 × √4 = 0.01 after 1 epoch of "
            "warm-up",
        ),
        (
            ["--gpus", "2", "--warmup-epochs", "0"],
            "64 per replica × 2 = 128 global; learning rate 0.005 × 2 = 0.01",
        ),
        (
            ["--gpus", "2", "--lr-scaling", "none"],
            "64 per replica × 2 = 128 global; learning rate 0.005, not scaled",
        ),
    ],
)
def test_what_is_done_to_the_learning_rate_is_told(words, said, monkeypatch):
    from unisono.training.run import Run

    if words:
        monkeypatch.setenv("UNISONO_SIMULATED_GPUS", "4")
    assert Run(settings_of(*words)).describe() == said
