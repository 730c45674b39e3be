"""Data for recipes: found, read, and refused where something is wrong with it."""

import os
from pathlib import Path

import numpy as np
import pytest

from unisono.errors import DataError
from unisono.training.datasets import DATA, Form, check_source, has_class_folders, load, synthetic

FORM = Form("cifar10", (8, 8, 3), 10)
GRAY = Form("mnist", (8, 8, 1), 10)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(DATA, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def arrays(form: Form = FORM, num: int = 30, **changed: np.ndarray) -> dict[str, np.ndarray]:
    (x_train, y_train), (x_test, y_test) = synthetic(form, num_train=num)
    found = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    return found | changed


def saved(path: Path, **changed: np.ndarray) -> Path:
    np.savez_compressed(path, **arrays(**changed))
    return path


def test_an_npz(tmp_path):
    path = saved(tmp_path / "any.npz")
    (x_train, y_train), (x_test, _) = load(FORM, str(path))
    assert x_train.shape == (30, 8, 8, 3)
    assert x_train.dtype == np.uint8
    assert y_train.shape == (30,)
    assert len(x_test) == 10


def test_a_folder_with_the_npz_and_the_variable(tmp_path, monkeypatch):
    saved(tmp_path / "cifar10.npz")
    (x_train, _), _ = load(FORM, str(tmp_path))
    monkeypatch.setenv(DATA, str(tmp_path))
    (again, _), _ = load(FORM, None)
    np.testing.assert_array_equal(x_train, again)


def test_what_was_brought_before_is_found(tmp_path):
    folder = tmp_path / "home" / ".cache" / "unisono" / "data"
    folder.mkdir(parents=True)
    saved(folder / "cifar10.npz")
    assert load(FORM, None)[0][0].shape == (30, 8, 8, 3)


def test_a_recipe_s_own_data_is_what_is_left(monkeypatch, tmp_path):
    monkeypatch.setenv(DATA, str(tmp_path))
    own = synthetic(FORM)
    assert load(FORM, None, otherwise=lambda: own) is own


def test_images_without_a_channel_and_labels_in_a_column(tmp_path):
    parts = arrays(GRAY)
    path = tmp_path / "mnist.npz"
    np.savez(
        path,
        **(
            parts
            | {k: parts[k][..., 0] for k in ("x_train", "x_test")}
            | {k: parts[k][:, None] for k in ("y_train", "y_test")}
        ),
    )
    (x_train, y_train), _ = load(GRAY, str(path))
    assert x_train.shape == (30, 8, 8, 1)
    assert y_train.shape == (30,)


def test_synthetic_images_follow_the_seed_and_can_be_told_apart():
    (x_train, y_train), (x_test, y_test) = load(FORM, "synthetic:200")
    assert len(x_train) == 200
    assert len(load(FORM, "synthetic")[0][0]) == 2048
    np.testing.assert_array_equal(x_train, load(FORM, "synthetic:200")[0][0])
    assert not np.array_equal(x_train, load(FORM, "synthetic:200", seed=1)[0][0])
    means = np.stack([x_train[y_train == c].mean(0) for c in range(10)])
    distances = ((x_test[:, None].astype(float) - means) ** 2).sum((2, 3, 4))
    assert np.mean(distances.argmin(1) == y_test) == 1.0


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"x_train": np.zeros((30, 9, 8, 3), "uint8")}, r"x_train is \(30, 9, 8, 3\)\. The recipe"),
        ({"x_test": np.zeros((10, 8, 8), "uint8")}, r"x_test is \(10, 8, 8\)"),
        ({"x_test": np.zeros((0, 8, 8, 3), "uint8")}, "x_test is empty"),
        ({"x_train": np.full((30, 8, 8, 3), "a")}, "x_train holds <U1"),
        ({"x_train": np.full((30, 8, 8, 3), np.nan)}, "x_train has values that are not finite"),
        ({"y_train": np.full(30, 10)}, "y_train has the label 10. Labels of 10 classes are 0 to 9"),
        ({"y_test": np.full(10, -1)}, "y_test has the label -1"),
        (
            {"y_train": np.zeros(29, "uint8")},
            r"x_train has 30 images and y_train the shape \(29,\)",
        ),
        ({"y_train": np.zeros((30, 10), "uint8")}, r"y_train the shape \(30, 10\)"),
        ({"y_train": np.zeros(30, "float32")}, "y_train holds float32. Give integers"),
    ],
)
def test_data_of_the_wrong_form(tmp_path, changed, found):
    path = saved(tmp_path / "wrong.npz", **changed)
    with pytest.raises(DataError, match=found) as raised:
        load(FORM, str(path))
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_was_cut_off_is_named(tmp_path, share):
    path = saved(tmp_path / "cut.npz")
    os.truncate(path, int(path.stat().st_size * share))
    with pytest.raises(DataError, match="damaged or truncated") as raised:
        load(FORM, str(path))
    assert str(path) in str(raised.value)


def test_a_file_that_is_no_archive_is_not_to_be_unpickled(tmp_path):
    path = tmp_path / "other.npz"
    path.write_bytes(b"something else" * 9)
    with pytest.raises(DataError, match=r"not an \.npz archive") as raised:
        load(FORM, str(path))
    assert "pickle" not in str(raised.value)


def test_a_damaged_byte_is_noticed(tmp_path):
    path = tmp_path / "damaged.npz"
    np.savez(path, **arrays())
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match="damaged or truncated"):
        load(FORM, str(path))


def test_files_that_are_something_else(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"is not an \.npz with x_train, y_train, x_test, y_test"):
        load(FORM, str(tmp_path / "one.npy"))
    np.savez(tmp_path / "half.npz", x_train=np.zeros(3), other=np.zeros(3))
    with pytest.raises(DataError, match=r"Found no y_train, x_test, y_test in .*x_train, other"):
        load(FORM, str(tmp_path / "half.npz"))


def test_a_source_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(
        DataError, match=r"there is no such file or folder\. Choose: --data FILE\.npz"
    ):
        check_source(str(tmp_path / "none"))
    monkeypatch.setenv(DATA, str(tmp_path / "none"))
    with pytest.raises(DataError, match="UNISONO_DATA set to either"):
        check_source(None)
    for good in ("synthetic", "synthetic:10", str(tmp_path)):
        check_source(good)
    with pytest.raises(DataError, match=r"found neither cifar10\.npz nor folders of images there"):
        load(FORM, str(tmp_path))


def make_images(folder: Path, count: int, colour: int) -> None:
    image = pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True)
    for i in range(count):
        image.fromarray(np.full((12, 10, 3), colour, "uint8")).save(folder / f"{i}.png")


def test_a_folder_of_class_folders(tmp_path):
    make_images(tmp_path / "cat", 10, 20)
    make_images(tmp_path / "dog", 5, 200)
    (tmp_path / "notes.txt").write_text("no image")
    assert has_class_folders(tmp_path)
    form = Form("cifar10", (8, 8, 3), None, folder_shape=(6, 6, 3))
    (x_train, y_train), (x_test, y_test) = load(form, str(tmp_path))
    assert x_train.shape == (12, 6, 6, 3)
    assert sorted(y_test) == [0, 0, 1]
    assert (x_train[y_train == 0] == 20).all()
    assert (x_test[y_test == 1] == 200).all()


def test_folders_for_train_and_test(tmp_path):
    for part, count in (("train", 3), ("test", 2)):
        make_images(tmp_path / part / "a", count, 0)
        make_images(tmp_path / part / "b", count, 255)
    (_, y_train), (_, y_test) = load(FORM, str(tmp_path))
    assert (list(y_train), list(y_test)) == ([0, 0, 0, 1, 1, 1], [0, 0, 1, 1])
    make_images(tmp_path / "test" / "c", 1, 0)
    with pytest.raises(DataError, match=r"has the classes \['c'\]"):
        load(FORM, str(tmp_path))


def test_images_that_are_damaged_are_named(tmp_path):
    make_images(tmp_path / "a", 3, 0)
    make_images(tmp_path / "b", 3, 9)
    cut = tmp_path / "b" / "1.png"
    os.truncate(cut, cut.stat().st_size // 2)
    with pytest.raises(DataError, match="is damaged, truncated or not an image") as raised:
        load(FORM, str(tmp_path))
    assert str(cut) in str(raised.value)


def test_a_class_of_one_image(tmp_path):
    make_images(tmp_path / "a", 3, 0)
    make_images(tmp_path / "b", 1, 9)
    with pytest.raises(DataError, match=r"has one image\. A class needs at least two"):
        load(FORM, str(tmp_path))


def test_without_network_the_choices_are_told(monkeypatch):
    keras = pytest.importorskip("keras")

    def fail() -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", fail)
    with pytest.raises(DataError) as raised:
        load(FORM, None)
    said = str(raised.value)
    assert "Could not download cifar10 with keras.datasets (ConnectionError: no route)" in said
    for choice in ("--data FILE.npz", "--data FOLDER", "UNISONO_DATA", "--data synthetic"):
        assert choice in said
