"""Whole programs: without a `__main__` guard, from standard input, in a notebook."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from scripts import run, start, wait_until_gone, workers_of

SCRIPT = Path(__file__).with_name("user_script.py")

SHORT = """
import keras, numpy as np, unisono

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(x)

model = unisono.parallel(Net(), replicas=2)
model.compile("sgd", "mse")
history = model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=4, verbose=0)
print("rows:", model.predict(np.ones((5, 4)), verbose=0).shape[0])
"""


def _check(done):
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("unisono: ") == 1, done.stdout
    assert "Traceback" not in done.stderr
    assert not workers_of(done.pid)
    assert not _left_in_session(done.pid)


def _left_in_session(session):
    """Processes whose session was that of a script, or whose parent it was."""
    left = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                left.append(int(entry.name))
    return left


def test_a_script_without_a_guard_runs_once(tmp_path):
    script = tmp_path / "train.py"
    shutil.copy(SCRIPT, script)
    done = run("train.py", cwd=tmp_path)
    _check(done)
    lines = done.stdout.splitlines()
    assert [line for line in lines if "runs in" in line] == [f"the script runs in {done.pid}"]
    assert lines[-1] == "close"
    assert os.listdir(tmp_path) == ["train.py"]


def test_classes_live_in_a_module_beside_the_script(tmp_path):
    script = tmp_path / "beside"
    script.mkdir()
    head, tail = SHORT.split("model = ", 1)
    (script / "nets.py").write_text(head)
    (script / "main.py").write_text("from nets import Net, np, unisono\nmodel = " + tail)
    # Started elsewhere, in a folder whose files have the names of modules.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("nets.py", "cloudpickle.py", "pickle.py"):
        (elsewhere / name).write_text("raise RuntimeError('the wrong file')")
    done = run(str(script / "main.py"), cwd=elsewhere)
    _check(done)
    assert "rows: 5" in done.stdout


def test_the_interactive_prompt():
    typed = SHORT.replace("\n\n    def", "\n    def") + "\nexit()\n"
    done = run("-i", "-q", text=typed)
    _check(done)
    assert "rows: 5" in done.stdout


INTERRUPTED = """
import keras, numpy as np, unisono

class Net(keras.Sequential):
    def call(self, x, training=None, mask=None):
        return 0.5 * super().call(x, training=training, mask=mask)

model = Net([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(1)])
model = unisono.parallel(model, replicas=2)
model.compile("adam", "mse")
x, y = np.ones((512, 64), "float32"), np.ones((512, 1), "float32")
begun = keras.callbacks.LambdaCallback(
    on_train_batch_end=lambda batch, logs: batch == 5 and print("begun", flush=True)
)
try:
    model.fit(x, y, batch_size=64, epochs=10**6, verbose=0, callbacks=[begun])
except KeyboardInterrupt:
    print("interrupted", flush=True)
assert all(np.isfinite(w).all() for w in model.get_weights())
model.fit(x, y, batch_size=64, verbose=0)
print("trained on", flush=True)
"""


def test_ctrl_c_leaves_a_model_that_trains_on():
    process = start("-c", INTERRUPTED)
    try:
        while process.stdout.readline() != "begun\n":
            assert process.poll() is None
        workers = workers_of(process.pid)
        # Keras loses a KeyboardInterrupt in a bare `except` of its logs, now and then: as a user
        # would, press again where training goes on.
        line = "begun\n"
        while line == "begun\n":
            os.killpg(process.pid, signal.SIGINT)
            pressed = time.monotonic()
            while line == "begun\n" and time.monotonic() < pressed + 2:
                line = process.stdout.readline()
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert (line, out) == ("interrupted\n", "trained on\n")
    assert not wait_until_gone(workers, 5)


@pytest.mark.slow
def test_a_notebook(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    define, use = SHORT.split("model = ", 1)
    cells = [define, "model = " + use, "import os\nprint('pid', os.getpid())"]
    cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "", "language": "python"}
    nbclient.NotebookClient(notebook, timeout=150, kernel_name=_kernel(tmp_path)).execute()
    printed = ["".join(out.get("text", "") for out in cell.outputs) for cell in cells]
    assert "rows: 5" in printed[1]
    assert printed[1].count("unisono: ") == 1
    kernel = int(printed[2].split("pid ")[1])
    assert not workers_of(kernel)


def _kernel(folder):
    """A kernel of this very Python, whatever kernels are installed."""
    from ipykernel.kernelspec import write_kernel_spec
    from jupyter_client.kernelspec import KernelSpecManager

    path = write_kernel_spec(str(folder / "this_python"))
    KernelSpecManager().install_kernel_spec(path, "this_python", prefix=str(folder), user=False)
    os.environ["JUPYTER_PATH"] = str(folder / "share" / "jupyter")
    return "this_python"
