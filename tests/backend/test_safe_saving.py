"""A save that is killed or finds no room leaves what was there before; links and modes are kept."""

import contextlib
import errno
import functools
import json
import os
import pickle
import resource
import signal
import stat
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
from scripts import run, start
from twins import adopted, apart, fit, rows

import unisono
from unisono.errors import OutputError

BACKEND = keras.backend.backend()
KILLED = Path(__file__).with_name("killed_saves.py")
LEFT = Path(__file__).with_name("left_behind.py")


@pytest.fixture(scope="module")
def model():
    return adopted()


@pytest.fixture
def files(tmp_path):
    """A folder, from which nothing temporary may be left."""
    yield tmp_path
    assert not list(tmp_path.rglob(".unisono*"))


def values(path: Path) -> list[np.ndarray]:
    return keras.models.load_model(path).get_weights()


def change(model: keras.Model) -> None:
    model.set_weights([weight + 1 for weight in model.get_weights()])


@pytest.mark.slow
def test_a_kill_leaves_the_previous_file(tmp_path):
    files, temporary = tmp_path / "files", tmp_path / "temporary"
    files.mkdir()
    temporary.mkdir()
    done = run(str(KILLED), str(files), "7", TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert [kill["ended"] for kill in told["kills"]] == [signal.SIGKILL] * 7
    one = {name: [1.0] for name in ("model", "weights", "shards")}
    for number, kill in enumerate(told["kills"]):
        assert kill["saved"].keys() == one.keys(), kill
        for found in kill["saved"].values():  # Of one save, whichever.
            assert len(found) == 1, kill
            assert 1 <= found[0] <= 2 + number, kill
    assert told["kills"][0]["saved"] == one
    assert any(name.startswith(".unisono") for name in told["left"])
    assert told["last"] == {name: [100.0] for name in one}
    assert [name for name in told["names"] if name.startswith(".")] == []
    assert len(told["names"]) == 6, told["names"]
    assert [path.name for path in temporary.glob("tmp*")] == []


@pytest.mark.slow
@pytest.mark.skipif(BACKEND != "torch", reason="it alone has a folder for its workers")
def test_nothing_temporary_is_left_for_long(tmp_path):
    """What a process leaves that is ended in the middle of a save goes with the next."""
    files, temporary = tmp_path / "files", tmp_path / "temporary"
    files.mkdir()
    temporary.mkdir()
    (temporary / "unisono-mine").mkdir()
    (temporary / "unisono-mine" / "notes").touch()
    processes = [start(str(LEFT), str(files), TMPDIR=str(temporary)) for _ in range(2)]
    try:
        for process, number in zip(processes, (signal.SIGTERM, signal.SIGKILL), strict=True):
            assert process.stdout.readline().strip().endswith("here")
            process.send_signal(number)
            process.wait(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert len(list(temporary.glob("unisono-*"))) == 3
    assert [path.name[:14] for path in files.iterdir()] == [".unisono-save-"] * 2
    program = "import sys, keras, unisono; model = keras.Sequential([keras.Input((4,)), "
    program += "keras.layers.Dense(1)]); unisono.parallel(model, replicas=2).save(sys.argv[1])"
    (tmp_path / "save.py").write_text(program)
    words = ("-m", "unisono", "run", "--replicas", "1", str(tmp_path / "save.py"))
    done = run(*words, str(files / "model.keras"), TMPDIR=str(temporary))
    assert done.returncode == 0, done.stderr
    assert [path.name for path in files.iterdir()] == ["model.keras"]
    assert [path.name for path in temporary.glob("tmp*")] == []
    assert [path.name for path in temporary.glob("unisono-*")] == ["unisono-mine"]


@contextlib.contextmanager
def full_disk(num_bytes: int):
    """A limit on the size of files, at which writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def method(model, name):
    return model.save_weights if "weights" in name else model.save


def function(model, name):
    """The same by a function of Keras, which is given the model."""
    save = keras.saving.save_weights if "weights" in name else keras.saving.save_model
    return functools.partial(save, model)


@pytest.mark.parametrize("how", [method, function])
@pytest.mark.parametrize("name", ["m.keras", "m.h5", "m.weights.h5", "m.weights.json"])
def test_a_full_disk_leaves_the_previous_file(files, model, name, how):
    path = files / name
    more = {"max_shard_size": 1} if name.endswith(".json") else {}
    save = how(model, name)
    save(path, **more)
    before = {file.name: file.read_bytes() for file in files.iterdir()}
    change(model)
    with full_disk(2000), pytest.raises(OSError, match=f"Could not write {path}: ") as caught:
        save(path, **more)
    assert isinstance(caught.value, OutputError)
    assert caught.value.filename == str(path)
    assert ".unisono-save" not in str(caught.value)
    assert caught.value.__cause__ is not None
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert {file.name: file.read_bytes() for file in files.iterdir()} == before
    save(path, **more)
    assert path.read_bytes() != before[name]


def test_callbacks_leave_the_previous_file(files, model, monkeypatch):
    """A kill or a full disk meets Keras' checkpoints in the same methods; and the note of them."""
    x, y = rows()
    path, backup = files / "best.keras", files / "backup"
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(path)),
        keras.callbacks.BackupAndRestore(str(backup), delete_checkpoint=False),
    ]
    fit(model, x, y, callbacks=callbacks)
    note = backup / "training_metadata.json"
    before = {file: file.read_bytes() for file in (path, note)}
    assert json.loads(before[note]) == {"epoch": 1, "batch": 0}
    with monkeypatch.context() as only, full_disk(5):
        only.setitem(vars(model), "save_weights", lambda *args, **kwargs: None)
        with pytest.raises(OutputError, match=str(note)):
            callbacks[1]._save_model()
    assert note.read_bytes() == before[note]
    with full_disk(2000), pytest.raises(OutputError, match=str(path)):
        fit(model, x, y, callbacks=callbacks[:1])
    assert path.read_bytes() == before[path]


def test_a_backup_in_a_list_of_keras_leaves_the_previous_note(files, model, monkeypatch):
    x, y = rows()
    backup = keras.callbacks.BackupAndRestore(str(files), delete_checkpoint=False)
    given = keras.callbacks.CallbackList([backup], add_history=True, model=model)
    fit(model, x, y, callbacks=given)
    note = files / "training_metadata.json"
    before = note.read_bytes()
    monkeypatch.setitem(vars(model), "save_weights", lambda *args, **kwargs: None)
    with full_disk(5), pytest.raises(OutputError, match=str(note)):
        backup._save_model()
    assert note.read_bytes() == before


def test_links_modes_and_names(files, model):
    (files / "far").mkdir()
    real, link = files / "far" / "real.bin", files / "latest.keras"
    link.symlink_to(Path("far") / "real.bin")
    model.save(link)  # Through a link that leads nowhere yet.
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o666 & ~umask()
    real.chmod(0o640)
    change(model)
    model.save(str(link))
    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert apart(model.get_weights(), values(link)) == 0
    with zipfile.ZipFile(real) as archive:
        assert archive.namelist() == ["metadata.json", "config.json", "model.weights.h5"]
    assert sorted(path.name for path in files.rglob("*")) == ["far", "latest.keras", "real.bin"]


def umask() -> int:
    now = os.umask(0)
    os.umask(now)
    return now


def test_overwriting_is_asked_for_once(files, model, monkeypatch):
    path, asked, answer = files / "m.keras", [], "n"
    monkeypatch.setattr("builtins.input", lambda text: asked.append(text) or answer)
    model.save(path, overwrite=False)
    assert asked == []
    before = path.read_bytes()
    model.save(path, overwrite=False)
    assert path.read_bytes() == before
    answer = "y"
    change(model)
    model.save(path, False)
    assert asked == [f"[WARNING] {path} already exists - overwrite? [y/n]"] * 2
    assert apart(model.get_weights(), values(path)) == 0


def test_what_keras_refuses_it_still_refuses(files, model):
    with pytest.raises(ValueError, match=f"filepath={files}/m.txt") as caught:
        model.save(f"{files}/m.txt")
    assert ".unisono" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match=f"Could not write {files}/none/m.keras"):
        model.save(files / "none" / "m.keras")
    (files / "folder.keras").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder\.keras"):
        model.save(files / "folder.keras")
    with pytest.raises(TypeError):
        model.save()
    with pytest.raises(ValueError, match="no_such_thing"):
        model.save(files / "m.keras", no_such_thing=1)
    assert [path.name for path in files.iterdir()] == ["folder.keras"]


def test_a_file_that_may_not_be_written_to(files, model):
    path = files / "m.keras"
    model.save(path)
    before = path.read_bytes()
    path.chmod(0o444)
    if os.access(path, os.W_OK):
        pytest.skip("root may write to anything")
    with pytest.raises(PermissionError, match=str(path)) as caught:
        model.save(path)
    assert caught.value.errno == errno.EACCES
    assert path.read_bytes() == before


def test_folders_on_the_way_are_made_as_keras_makes_them(files, model):
    model.save(files / "a" / "b" / "m.h5")
    assert [path.name for path in (files / "a" / "b").iterdir()] == ["m.h5"]
    model.save(files / "folder", zipped=False)
    (files / "folder" / "mine.txt").write_text("mine")
    (files / "folder" / "assets").mkdir(exist_ok=True)
    (files / "folder" / "assets" / "mine.txt").write_text("mine")
    change(model)
    model.save(files / "folder", zipped=False)
    assert apart(model.get_weights(), values(files / "folder")) == 0
    assert (files / "folder" / "mine.txt").read_text() == "mine"
    assert (files / "folder" / "assets" / "mine.txt").read_text() == "mine"


def test_a_device_is_written_to_and_not_replaced(files, model):
    (files / "null.keras").symlink_to("/dev/null")
    model.save(files / "null.keras")
    assert stat.S_ISCHR((files / "null.keras").stat().st_mode)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="its export alone is quick, and all are alike")
def test_an_export_replaces_its_folder_at_once(files, model, capfd, monkeypatch):
    folder = files / "serving"
    model.export(folder)
    (folder / "mine.txt").write_text("mine")
    folder.chmod(0o750)
    before = (folder / "saved_model.pb").stat().st_ino
    change(model)
    model.export(str(folder))
    out = capfd.readouterr()
    assert f"Saved artifact at '{folder}'" in out.out
    assert ".unisono" not in out.out + out.err
    assert stat.S_IMODE(folder.stat().st_mode) == 0o750
    assert (folder / "mine.txt").read_text() == "mine"
    assert (folder / "saved_model.pb").stat().st_ino != before
    x = np.ones((2, 4), "float32")
    served = keras.layers.TFSMLayer(folder, call_endpoint="serve")(x)
    np.testing.assert_allclose(served, model(x), rtol=1e-6)
    monkeypatch.chdir(folder)
    change(model)
    model.export(".", verbose=False)
    assert Path("mine.txt").read_text() == "mine"
    contents = sorted(path.name for path in folder.iterdir())
    with full_disk(2000), pytest.raises(OutputError, match=f"Could not write {folder}: "):
        model.export(folder)
    assert sorted(path.name for path in folder.iterdir()) == contents


def test_a_released_model_saves_as_ever(files):
    model = unisono.release(adopted())
    assert not {"save", "save_weights", "export"} & set(vars(model))
    model.save(files / "m.keras")
    assert sys.modules["keras"] is keras
