"""What a training shows at its end: the table, two side by side, the plot; and how far it is."""

import io

import pytest

from unisono.training import results
from unisono.training.recorder import Bar
from unisono.training.results import clock

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def record(num_replicas: int, speed: float, accuracies: list[float], **more: object) -> dict:
    history = [
        {
            "epoch": i + 1,
            "epoch_s": 1100 / speed if i else 9.0,
            "train_s": 1000 / speed,
            "samples_per_s": speed if i else 1.0,
            "learning_rate": 0.1,
            "loss": 1.0 - value,
            "accuracy": value - 0.01,
            "val_loss": 1.1 - value,
            "val_accuracy": value,
        }
        for i, value in enumerate(accuracies)
    ]
    return {
        "recipe": "digits",
        "backend": "jax",
        "num_replicas": num_replicas,
        "total_s": 75.0,
        "is_interrupted": False,
        "devices": [{"kind": "cpu"}],
        "history": history,
        "checksum": "1f2e" if num_replicas > 1 else None,
        **more,
    }


ONE = record(1, 100.0, [0.5, 0.9, 0.8])
FOUR = record(4, 380.0, [0.4, 0.7, 0.85])


def test_the_small_table():
    lines = [" ".join(line.split()) for line in results.summary(FOUR).splitlines()]
    assert lines == [
        "4 replicas",
        "epochs 3",
        "epoch time 2.89 s",
        "total time 1:15",
        "samples/s 380",
        "final test accuracy 85.00%",
        "best test accuracy 85.00% (epoch 3)",
        "replicas hold the same model yes (1f2e)",
    ]


def test_two_side_by_side():
    lines = [" ".join(line.split()) for line in results.comparison(ONE, FOUR).splitlines()]
    assert lines[0] == "1 replica 4 replicas"
    assert "best test accuracy 90.00% (epoch 2) 85.00% (epoch 3)" in lines
    assert "speed-up 3.80 x" in lines
    assert "efficiency 95%" in lines
    assert lines[-1].startswith("Each CPU replica has its own cores")


def test_columns_are_aligned():
    *rows, _ = results.comparison(ONE, FOUR).splitlines()
    assert len({len(row) for row in rows}) == 1


def test_gpus_need_no_note():
    gpus = record(4, 380.0, [0.4], devices=[{"kind": "gpu"}])
    assert results.comparison(ONE, gpus).splitlines()[-1].startswith("efficiency")


def test_a_training_of_one_epoch_counts_it():
    assert results.samples_per_s(record(1, 100.0, [0.5])) == 1.0


@pytest.mark.parametrize("records", [[ONE], [ONE, FOUR], [record(1, 1.0, [0.5])]])
def test_the_plot_is_a_picture_of_some_size(records, tmp_path):
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "plot.png"
    results.draw(records, path)
    assert path.read_bytes().startswith(PNG_SIGNATURE)
    with image.open(path) as picture:
        assert picture.width > 1000
        assert len(picture.convert("RGB").getcolors(1 << 20)) > 20


def test_the_plot_says_who_and_how_long():
    assert results._title([ONE, FOUR]) == (
        "digits (jax): 1 replica in 1:15, 4 replicas in 1:15; the best epoch is marked"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_shows_speed_time_left_and_logs(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    now = iter([0.0, 4.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    bar = Bar(2)
    bar.begin("epoch 1/3", 10, 1000)
    bar.update(4, {"loss": 0.5})
    assert terminal.getvalue() == (
        "\r\x1b[Kepoch 1/3  [========............] 4/10  100 samples/s (50 per replica)  "
        "0:06 left  loss 0.5000"
    )
    bar.clear()
    assert terminal.getvalue().endswith("\r\x1b[K")


def test_a_narrow_terminal_is_not_wrapped(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "30")
    bar = Bar(1)
    bar.begin("epoch 1/3", 10, 1000)
    bar.update(1, {"loss": 0.5})
    assert len(terminal.getvalue().removeprefix("\r\x1b[K")) == 29


def test_the_clock():
    assert [clock(s) for s in (0.2, 59.6, 4450, 86400)] == ["0:00", "1:00", "1:14:10", "24:00:00"]
