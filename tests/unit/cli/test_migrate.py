"""`unisono migrate`: what it makes of old programs and notebooks, and of what is neither."""

import ast
import json
import os
import re
import stat
import textwrap
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import unisono.compat
from unisono.cli import main
from unisono.compat import knowledge, lookup
from unisono.compat.migrate.files import replace
from unisono.compat.migrate.imports import is_in_keras
from unisono.compat.migrate.notebooks import migrate_notebook
from unisono.compat.migrate.source import migrate_source
from unisono.compat.syntax import check_syntax
from unisono.errors import DataError


def migrated(text: str) -> str:
    """A migrated program, which is Python and needs no second migration."""
    code = migrate_source(textwrap.dedent(text).encode(), "old.py").code
    ast.parse(code)
    assert migrate_source(code, "new.py").code == code
    return code.decode()


# -- the table in source ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            "from keras.utils import multi_gpu_model\nm = multi_gpu_model(model, 4)\n",
            "import unisono\nm = unisono.parallel(model, gpus=4)\n",
        ),
        (
            "from keras.utils.training_utils import multi_gpu_model\n"
            "m = multi_gpu_model(model, gpus=None, cpu_merge=False)\n",
            "import unisono\nm = unisono.parallel(model)\n",
        ),
        (
            "import keras\nm = keras.utils.multi_gpu_model(model, gpus=G, cpu_relocation=True)\n",
            "import unisono.compat\nimport keras\n"
            "m = unisono.compat.multi_gpu_model(model, gpus=G, cpu_relocation=True)\n",
        ),
        (
            "from keras.optimizers import rmsprop, SGD\nopt = rmsprop(lr=1e-4)\n",
            "from keras.optimizers import RMSprop, SGD\nopt = RMSprop(learning_rate=1e-4)\n",
        ),
        (
            "from tensorflow.keras.optimizers import Adam\nopt = Adam(1e-3, decay=1e-3 / 70)\n",
            "from tensorflow.keras.optimizers.schedules import InverseTimeDecay\n"
            "from tensorflow.keras.optimizers import Adam\n"
            "opt = Adam(InverseTimeDecay(1e-3, decay_steps=1, decay_rate=1e-3 / 70))\n",
        ),
        (
            "import tensorflow as tf\nopt = tf.keras.optimizers.SGD(momentum=0.9, decay=1e-2)\n",
            "import tensorflow as tf\nopt = tf.keras.optimizers.SGD(momentum=0.9, "
            "learning_rate=tf.keras.optimizers.schedules.InverseTimeDecay("
            "0.01, decay_steps=1, decay_rate=1e-2))\n",
        ),
        (
            "from keras.optimizers import sgd as descent\nopt = descent(lr=1, decay=0.0)\n",
            "from keras.optimizers import SGD as descent\nopt = descent(learning_rate=1.0)\n",
        ),
        (
            "model.fit_generator(data, 10, 3, workers=1, max_queue_size=10, callbacks=c)\n",
            "model.fit(data, steps_per_epoch=10, epochs=3, callbacks=c)\n",
        ),
        ("model.evaluate_generator(data, steps=3)\n", "model.evaluate(data, steps=3, verbose=0)\n"),
        ("model.predict_generator(data)\n", "model.predict(data, verbose=0)\n"),
        ("metric.reset_states()\n", "metric.reset_state()\n"),
        ("print(H.history['val_acc'])\n", "print(H.history['val_accuracy'])\n"),
        ('H = h.history\nplot(H["acc"])\n', 'H = h.history\nplot(H["accuracy"])\n'),
        ("model.compile('sgd', metrics=['acc'])\n", "model.compile('sgd', metrics=['accuracy'])\n"),
        ('EarlyStopping(monitor="val_acc")\n', 'EarlyStopping(monitor="val_accuracy")\n'),
        ("EarlyStopping('acc', patience=2)\n", "EarlyStopping('accuracy', patience=2)\n"),
        (
            "keras.callbacks.ModelCheckpoint(p, 'val_acc')\n",
            "keras.callbacks.ModelCheckpoint(p, 'val_accuracy')\n",
        ),
        ("m.compile(o, 'mse', ['acc', f])\n", "m.compile(o, 'mse', ['accuracy', f])\n"),
        (
            "METRICS = ['acc']\nm.compile(o, metrics=METRICS)\n",
            "METRICS = ['accuracy']\nm.compile(o, metrics=METRICS)\n",
        ),
        (
            "m.compile(o, metrics={'a': ['acc'], 'b': 'acc'})\n",
            "m.compile(o, metrics={'a': ['accuracy'], 'b': 'accuracy'})\n",
        ),
        (
            "try: from keras.utils import multi_gpu_model\nexcept ImportError: pass\n"
            "if 1: from keras.utils.np_utils import to_categorical; x = 1\n",
            "try: pass\nexcept ImportError: pass\n"
            "if 1: from keras.utils import to_categorical; x = 1\n",
        ),
        (
            'ModelCheckpoint("w-{epoch}-{val_acc:.2f}.h5")\n',
            'ModelCheckpoint("w-{epoch}-{val_accuracy:.2f}.h5")\n',
        ),
        (
            "import tensorflow as tf\nr = tf.keras.losses.Reduction.AUTO\n",
            'import tensorflow as tf\nr = "sum_over_batch_size"\n',
        ),
        (
            "import tensorflow as tf\ns = tf.distribute.MirroredStrategy(['/gpu:0', '/gpu:1'])\n",
            "import unisono\nimport tensorflow as tf\ns = unisono.Strategy(gpus=[0, 1])\n",
        ),
        (
            "import tensorflow as tf\ns = tf.distribute.MirroredStrategy(devices=names)\n",
            "import unisono.compat\nimport tensorflow as tf\n"
            "s = unisono.compat.MirroredStrategy(devices=names)\n",
        ),
        ("strategy.experimental_run_v2(step, args=(x,))\n", "strategy.run(step, args=(x,))\n"),
        (
            "import tensorflow as tf\ntf.config.experimental.set_visible_devices(g[:2], 'GPU')\n",
            "import unisono\nimport tensorflow as tf\nunisono.configure(gpus=[0, 1])\n",
        ),
        (
            "import tensorflow as tf\n"
            "tf.config.experimental.set_virtual_device_configuration(\n"
            "    g[0], [tf.config.experimental.VirtualDeviceConfiguration(memory_limit=1024)])\n",
            'import unisono\nimport tensorflow as tf\nunisono.configure(memory="1024MiB")\n',
        ),
        (
            "import horovod.tensorflow.keras as hvd\nhvd.init()\n",
            "import unisono.horovod as hvd\nhvd.init()\n",
        ),
        (
            "import horovod.keras\nhorovod.keras.init()\n",
            "import unisono.horovod\nunisono.horovod.init()\n",
        ),
        (
            "from keras import backend as K\nK.set_value(model.optimizer.lr, 0.1)\n",
            "from keras import backend as K\nmodel.optimizer.learning_rate.assign(0.1)\n",
        ),
        ("import unisono.compat.legacy  # first\nx.reset_states()\n", "# first\nx.reset_state()\n"),
        (
            "import unisono.compat.legacy\nprint(unisono.devices())\n",
            "import unisono\nprint(unisono.devices())\n",
        ),
        (
            "from keras.layers.core import Dense\nfrom keras.engine.topology import Layer\n",
            "from keras.layers import Dense\nfrom keras import Layer\n",
        ),
        (
            "from keras.preprocessing.image import ImageDataGenerator, img_to_array\n"
            "ImageDataGenerator()\n",
            "from unisono.compat.images import ImageDataGenerator\n"
            "from keras.preprocessing.image import img_to_array\nImageDataGenerator()\n",
        ),
        (
            "import tensorflow as tf\ntf.set_random_seed(1)\n",
            "import tensorflow as tf\ntf.random.set_seed(1)\n",
        ),
    ],
)
def test_what_becomes_of_old_code(old, new):
    assert migrated(old) == new


@pytest.mark.parametrize(
    "program",
    [
        "args.lr = 0.1\nprint(args.lr, config.decay)\n",
        "batch_size = 64 * G\n",
        "import keras\nmodel.fit(x, y, batch_size=64 * G)\nkeras.optimizers.Adam(1e-3)\n",
        'row["acc"] = 1\nlabels = ["acc", "val_acc"]\n',
        'for key in ["loss"]:\n    print(H.history[key])\n',
        "from tensorflow.keras.preprocessing.image import ImageDataGenerator\n",
        "import unisono\nmodel = unisono.parallel(model)\n",
        "def multi_gpu_model(m, gpus):\n    return m\nmulti_gpu_model(a, gpus=2)\n",
        "",
        "# only a comment",
    ],
)
def test_what_is_not_old_stays(program):
    assert migrated(program) == program


@pytest.mark.parametrize(
    ("call", "is_old"),
    [
        ('model.save_weights("final.h5")', True),
        ('model.save_weights(filepath="final")', True),
        ('model.save_weights("final.weights.h5")', False),
        ("model.save_weights(path)", False),
        ('ModelCheckpoint("w.{epoch}.hdf5", monitor="val_loss")', True),
        ('keras.callbacks.ModelCheckpoint("w.h5", save_weights_only=True)', True),
        ('ModelCheckpoint("m.h5")', False),
        ('ModelCheckpoint("m.keras")', False),
    ],
)
def test_names_of_files_are_left_to_a_person(call, is_old):
    done = migrate_source(f"import keras\n{call}\n".encode(), "old.py")
    assert call in done.code.decode()
    assert [".weights.h5" in remark.text for remark in done.remarks] == [True] * is_old


def test_a_long_sum_is_read():
    text = "'a'" + " + 'a'" * 300
    assert migrated(f"metric.reset_states({text})\n") == f"metric.reset_state({text})\n"


def test_lines_are_counted_as_python_does():
    done = migrate_source(b"\x0cimport tensorflow as tf\n\x0c\ntf.placeholder(1)\n", "old.py")
    number = done.code.decode().split("\n").index("tf.placeholder(1)") + 1
    assert [remark.place for remark in done.remarks] == [f"line {number}"]


def test_comments_and_formatting_stay():
    text = """\
        '''Docstring.'''
        # Above the import.
        from keras.utils import multi_gpu_model  # gone soon
        x = {  'a':1 }   # as it was
        def f( a ):
            # inside
            return multi_gpu_model( a , gpus = 2 )
        """
    new = migrated(text)
    assert "# Above the import.\n" in new
    assert "# gone soon\n" in new
    assert "x = {  'a':1 }   # as it was\n" in new
    assert "def f( a ):\n    # inside\n    return unisono.parallel( a , gpus = 2 )\n" in new


def test_an_import_that_was_alone_in_its_block():
    new = migrated(
        """
        try:
            from keras.utils import multi_gpu_model
        except ImportError:
            multi_gpu_model = None
        """
    )
    assert "from unisono.compat import multi_gpu_model" in new
    assert "except ImportError:\n    multi_gpu_model = None" in new
    new = migrated("def f():\n    # why\n    from keras.utils import multi_gpu_model\n")
    assert new == "def f():\n    # why\n    pass\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            """
            config = tf.ConfigProto(device_count={"GPU": 1, "CPU": 56})
            sess = tf.Session(config=config)
            keras.backend.set_session(sess)
            """,
            "unisono.configure(gpus=1, cpu_threads=56)",
        ),
        (
            """
            config = tf.compat.v1.ConfigProto()
            config.gpu_options.allow_growth = True
            config.gpu_options.visible_device_list = "0,2"
            config.allow_soft_placement = True
            keras.backend.set_session(tf.compat.v1.Session(config=config))
            """,
            'unisono.configure(gpus=[0, 2], memory="grow")',
        ),
        (
            """
            options = tf.GPUOptions(per_process_gpu_memory_fraction=0.3)
            session = tf.Session(config=tf.ConfigProto(gpu_options=options))
            """,
            "unisono.configure(memory=0.3)",
        ),
    ],
)
def test_settings_of_sessions(old, new):
    head = "import keras\nimport tensorflow as tf\n"
    assert migrated(head + textwrap.dedent(old)) == f"import unisono\n{head}\n{new}\n"


@pytest.mark.parametrize(
    "program",
    [
        "import tensorflow as tf\nwith tf.Session() as s:\n    s.run(x)\n",
        "import tensorflow as tf\nc = tf.ConfigProto()\ns = tf.Session(config=c)\ns.run(x)\n",
        "import tensorflow as tf\ns = tf.Session(config=tf.ConfigProto(device_count={'GPU': 0}))\n",
        "import tensorflow as tf\nx = tf.placeholder(tf.float32)\n",
        "from tensorflow.python.keras.layers import Dense\n",
        "from keras.utils import multi_gpu_modle\n",
        "from keras import backend as K\nK.mean(x)\n",
        "model.fit_generator(*args)\n",
        "for key in ['acc', 'loss']:\n    print(H.history[key])\n",
        "from keras.utils import *\nm = multi_gpu_model(m, 2)\n",
        "from keras.optimizers import Adam\nAdam(lr=1, **rest)\n",
        "model.fit_generator(data, workers=8)\n",
        "model.reset_states()\n",
        "import horovod.torch as hvd\n",
    ],
)
def test_what_needs_a_person_is_said(program):
    done = migrate_source(program.encode(), "old.py")
    again = migrate_source(done.code, "new.py")
    assert again.code == done.code
    assert done.remarks == again.remarks
    assert done.remarks
    lines = done.code.decode().splitlines()
    for remark in done.remarks:
        line = lines[int(remark.place.removeprefix("line ")) - 1]
        assert line
        assert not line.strip().startswith("#")


# -- any program at all ----------------------------------------------------------------------------

_NAMES = [change.old for change in knowledge.CHANGES if ".Reduction." not in change.old]
_NAMES += [*knowledge.MODULES, "keras.utils.np_utils.to_categorical", "keras.no_such_name"]
_ALL_NAMES = st.sampled_from(
    [
        name.replace("keras", home, 1) if name.startswith("keras") else name
        for name in _NAMES
        for home in ("keras", "tensorflow.keras")
    ]
)


@st.composite
def imports(draw):
    """An import of an old name, and how it is then spelled."""
    dotted = draw(_ALL_NAMES)
    module, _, name = dotted.rpartition(".")
    how = draw(st.sampled_from(["import", "import as", "from", "from as", "try"]))
    if how == "import" or not module:
        return f"import {dotted.split('.')[0]}\n", dotted
    if how == "import as":
        return f"import {module} as m  # here\n", f"m.{name}"
    if how == "from as":
        return f"from {module} import {name} as n\n", "n"
    line = f"from {module} import {name}\n"
    if how == "try":
        line = f"try:\n    {line}except ImportError:\n    {name} = None\n"
    return line, name


@st.composite
def uses(draw):
    """A statement that does something with a name; `$` stands for it."""
    argument = st.sampled_from(
        [
            "model",
            "gpus=2",
            "lr=0.1",
            "decay=1e-3",
            "'GPU'",
            "*rest",
            "config=c",
            "x, y",
            "True",
            "",
        ]
    )
    arguments = ", ".join(
        part for part in draw(st.lists(argument, max_size=3, unique=True)) if part
    )
    order = [part for part in arguments.split(", ") if part and "=" not in part]
    order += [part for part in arguments.split(", ") if "=" in part]
    call = f"$({', '.join(order)})"
    method = draw(st.sampled_from([m.old for m in knowledge.METHODS]))
    return draw(
        st.sampled_from(
            [
                f"a = {call}\n",
                f"{call}  # called\n",
                "b = $\n",
                f"def f(v):\n    # inside\n    return {call}\n",
                f"with {call} as s:\n    s.run(1)\n",
                f"if {call}: pass\n",
                f"c.gpu_options.allow_growth = True; {call}\n",
                f"model.{method}({', '.join(order)})\n",
                "h = model.history['acc'] + $.lr\n",
                "for g in $.x:\n\tprint(g)\n",
            ]
        )
    )


@given(st.lists(st.tuples(imports(), uses()), min_size=1, max_size=4), st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_migrated_code_always_parses_and_a_second_time_changes_nothing(parts, has_docstring):
    text = '"""Doc."""\n' * has_docstring
    text += "".join(line for (line, _), _ in parts)
    text += "".join(use.replace("$", name) for (_, name), use in parts)
    try:
        ast.parse(text)
    except SyntaxError:
        return  # Such as a keyword twice.
    done = migrate_source(text.encode(), "old.py")
    ast.parse(done.code)
    assert migrate_source(done.code, "new.py").code == done.code
    _check_imports(done.code, [remark.text for remark in done.remarks])


def _check_imports(code, remarks):
    """Every name that is imported is there, or a remark or the program says that it may not be."""
    tree = ast.parse(code)
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)]
    guarded = {id(each) for node in tries for each in node.body}
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "unisono.compat":
            assert {alias.name for alias in node.names} <= set(unisono.compat.__all__)
        if isinstance(node, ast.ImportFrom) and node.module.startswith(
            ("keras", "tensorflow.keras")
        ):
            for alias in node.names:
                dotted = f"{node.module}.{alias.name}"
                assert is_in_keras(dotted) or any(
                    dotted in r or "gone" in r or "old" in r for r in remarks
                ), dotted
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in [name for name in names if name.split(".")[0] in ("keras", "horovod")]:
            is_there = name.startswith("keras") and is_in_keras(name)
            assert is_there or any("gone" in r or "not in" in r for r in remarks), name


# -- the table itself ------------------------------------------------------------------------------


def test_today_s_names_of_the_table_are_in_keras():
    for change in knowledge.CHANGES:
        if change.new is not None and change.new.startswith("keras."):
            assert is_in_keras(change.new), change
        if change.old.startswith("keras.") and not change.old.startswith("keras.losses.Reduction."):
            assert not is_in_keras(change.old), f"{change.old} is back"
    for old, new in knowledge.MODULES.items():
        assert new.startswith("unisono") or is_in_keras(new)
        assert old.startswith("horovod") or not is_in_keras(old)


def test_names_of_all_homes_are_one():
    for home in ("keras", "tensorflow.keras", "tensorflow.compat.v1.keras"):
        change = lookup.change_of(f"{home}.utils.training_utils.multi_gpu_model")
        assert change is not None
        assert change.old == "keras.utils.multi_gpu_model"
    assert lookup.change_of("tensorflow.compat.v1.Session").old == "tensorflow.Session"
    assert lookup.change_of("keras.layers.Dense") is None
    assert lookup.gone_with("tensorflow.python.keras.layers.Dense") is not None


# -- the command -----------------------------------------------------------------------------------

OLD = "from keras.optimizers import sgd\nopt = sgd(lr=0.1)\n"


def test_a_diff_by_default(tmp_path, capsys):
    path = tmp_path / "old.py"
    path.write_text(OLD)
    assert main(["migrate", str(path)]) == 0
    shown = capsys.readouterr().out
    assert {"-opt = sgd(lr=0.1)", "+opt = SGD(learning_rate=0.1)"} <= set(shown.splitlines())
    assert path.read_text() == OLD
    assert os.listdir(tmp_path) == ["old.py"]
    main(["migrate", "--diff", str(path)])
    assert capsys.readouterr().out == shown


def test_writing_keeps_a_backup_and_the_mode(tmp_path, capsys):
    path = tmp_path / "old.py"
    path.write_text(OLD)
    path.chmod(0o750)
    link = tmp_path / "link.py"
    link.symlink_to(path)
    assert main(["migrate", "--write", str(link)]) == 0
    assert path.read_text() == "from keras.optimizers import SGD\nopt = SGD(learning_rate=0.1)\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert link.is_symlink()
    assert (tmp_path / "old.py.orig").read_text() == OLD
    assert "old.py.orig" in capsys.readouterr().out
    path.write_text(OLD + "x = 1\n")
    main(["migrate", "--write", str(path)])
    assert (tmp_path / "old.py.orig").read_text() == OLD
    assert (tmp_path / "old.py.orig.1").read_text() == OLD + "x = 1\n"
    main(["migrate", "--write", str(path)])
    assert "nothing to change" in capsys.readouterr().out
    assert len(os.listdir(tmp_path)) == 4


def test_an_encoding_and_line_ends_stay(tmp_path):
    path = tmp_path / "old.py"
    before = "# -*- coding: latin-1 -*-\r\n# caf\xe9\r\nmetric.reset_states()\r\n"
    path.write_bytes(before.encode("latin-1"))
    main(["migrate", "--write", str(path)])
    assert path.read_bytes() == before.replace("states", "state").encode("latin-1")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("for i in xrange(3):\n    pass\n", ["xrange is Python 2: write range."]),
        ("name = raw_input('name? ')\n", ["raw_input is Python 2: write input."]),
        ("try:\n    xrange\nexcept NameError:\n    xrange = range\nxrange(3)\n", []),
        ("from functools import reduce\nreduce(max, [1])\n", []),
        ("numpy.xrange(3)\n", []),
    ],
)
def test_functions_of_python_2_are_remarked_on(code, said):
    done = migrate_source(code.encode(), "old.py")
    assert [remark.text for remark in done.remarks] == said
    assert migrate_source(done.code, "old.py").code == done.code


def test_what_needs_a_person_is_listed_with_lines(tmp_path, capsys):
    path = tmp_path / "old.py"
    path.write_text("import tensorflow as tf\n\nx = tf.placeholder(tf.float32)\n")
    assert main(["migrate", "--write", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "1 place needs you" in shown
    number = int(shown.rpartition(", line ")[2].split(":")[0])
    assert path.read_text().splitlines()[number - 1] == "x = tf.placeholder(tf.float32)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import keras\nprint 'hello'\n", "line 2 is Python 2: a print statement"),
        ("try:\n    f()\nexcept IOError, e:\n    pass\n", "line 3 is Python 2"),
        ("x = 0777\n", "line 1 is Python 2"),
        ("def f(:\n", "line 1 is not Python"),
        ("\x00\x01", "is not Python"),
        (b"\xff\xfe\x00x", "is not Python"),
        ("To whom it may concern,\n", "line 1 is not Python"),
        ("# coding: nosuch\n", "is not Python: unknown encoding: nosuch"),
        ("x = a" + ".b" * 20_000 + "\n", "nested too deeply"),
        ("x = " + "(" * 5_000, "is not Python"),
    ],
)
@pytest.mark.parametrize("option", ["--diff", "--write"])
def test_files_that_are_not_python_3(tmp_path, capsys, text, said, option):
    path = tmp_path / "old.py"
    content = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(content)
    assert main(["migrate", option, str(path)]) == 1
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""
    assert "Traceback" not in told.err
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["old.py"]


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["migrate", str(tmp_path / "none.py"), str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "No such file" in told
    assert "Is a directory" in told


def test_a_bad_file_does_not_stop_the_others(tmp_path, capsys):
    (tmp_path / "bad.py").write_text("print 1\n")
    (tmp_path / "good.py").write_text(OLD)
    assert main(["migrate", "--write", str(tmp_path / "bad.py"), str(tmp_path / "good.py")]) == 1
    assert "SGD" in (tmp_path / "good.py").read_text()


def test_a_write_that_fails_leaves_the_file(tmp_path, monkeypatch):
    path = tmp_path / "old.py"
    path.write_text(OLD)
    monkeypatch.setattr(os, "replace", _fail)
    with pytest.raises(DataError, match="No space left"):
        replace(path, OLD.encode(), b"new")
    assert path.read_text() == OLD
    assert sorted(os.listdir(tmp_path)) == ["old.py", "old.py.orig"]


def _fail(*arguments):
    raise OSError(28, "No space left on device")


# -- notebooks -------------------------------------------------------------------------------------


def notebook(*sources, as_text=False):
    cells = [
        {
            "cell_type": "markdown",
            "metadata": {},
            "source": ["# from keras.optimizers import sgd\n"],
        },
        *(
            {
                "cell_type": "code",
                "execution_count": 3,
                "metadata": {"tags": ["x"]},
                "outputs": [{"name": "stdout", "output_type": "stream", "text": ["h\u00e9\n"]}],
                "source": source if as_text else source.splitlines(keepends=True),
            }
            for source in sources
        ),
    ]
    whole = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False).encode() + b"\n"


def sources(content):
    return [
        "".join(cell["source"])
        for cell in json.loads(content)["cells"]
        if cell["cell_type"] == "code"
    ]


@pytest.mark.parametrize("as_text", [True, False])
def test_a_notebook_is_migrated_as_one_program(as_text):
    before = notebook(
        "%matplotlib inline\n!pip install keras\nfrom keras.optimizers import sgd",
        "%%bash\nls $HOME",
        "if True:\n    %time x = 1\nopt = sgd(lr=0.1)\nprint('%d'\n      % 3)\n",
        "",
        "from keras.utils import multi_gpu_model\nm = multi_gpu_model(model, gpus=2)",
        as_text=as_text,
    )
    after, changes, remarks = migrate_notebook(before, "old.ipynb")
    assert sources(after) == [
        "%matplotlib inline\n!pip install keras\nimport unisono\nfrom keras.optimizers import SGD",
        "%%bash\nls $HOME",
        "if True:\n    %time x = 1\nopt = SGD(learning_rate=0.1)\nprint('%d'\n      % 3)\n",
        "",
        "m = unisono.parallel(model, gpus=2)",
    ]
    assert [name for name, _, _ in changes] == [f"old.ipynb, cell {i}" for i in (2, 4, 6)]
    assert remarks == []
    cells = json.loads(after)["cells"]
    assert cells[1]["outputs"] == json.loads(before)["cells"][1]["outputs"]
    assert isinstance(cells[1]["source"], str) == as_text
    assert migrate_notebook(after, "new.ipynb")[0] == after


@pytest.mark.parametrize(
    "line",
    [
        "# unisono 0 cell 2",
        "pass  # unisono 0 aside 7",
        "'''\n# unisono 0 cell 9\n'''",
        "!pip install \\\n    keras \\\n    numpy",
        "%%notfirst",
        "x = 'a\u2028b'",
    ],
)
def test_cells_with_anything_in_them(line):
    before = notebook(f"from keras.optimizers import sgd\n{line}\nsgd(lr=0.1)", "y = 1", "%x")
    after, _, _ = migrate_notebook(before, "old.ipynb")
    new = f"from keras.optimizers import SGD\n{line}\nSGD(learning_rate=0.1)"
    assert sources(after) == [new, "y = 1", "%x"]
    assert migrate_notebook(after, "new.ipynb")[0] == after


def test_half_a_character_in_a_notebook():
    before = notebook("metric.reset_states()").replace(b"h\xc3\xa9", b"\\ud800")
    after, _, _ = migrate_notebook(before, "old.ipynb")
    assert sources(after) == ["metric.reset_state()"]
    assert json.loads(after)["cells"][1]["outputs"] == json.loads(before)["cells"][1]["outputs"]


def test_remarks_of_a_notebook_name_the_cell(tmp_path, capsys):
    path = tmp_path / "old.ipynb"
    path.write_bytes(notebook("import tensorflow as tf", "x = 1\ny = tf.placeholder(tf.float32)"))
    assert main(["migrate", "--write", str(path)]) == 0
    assert "old.ipynb, cell 3, line 4: tensorflow.placeholder is gone" in capsys.readouterr().out
    assert (tmp_path / "old.ipynb.orig").exists()


def test_a_notebook_with_nothing_old_is_not_touched(tmp_path):
    path = tmp_path / "new.ipynb"
    content = json.dumps(json.loads(notebook("x = 1"))).encode()  # On one line.
    path.write_bytes(content)
    assert main(["migrate", "--write", str(path)]) == 0
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"cells": [}', "line 1 is no notebook: broken JSON"),
        (b'{\n"cells": [\n', "line 3 is no notebook: broken JSON"),
        (b"[]", "no list of cells"),
        (b'{"worksheets": []}', "format 4"),
        (b"\xff\xff", "broken JSON"),
        (b'{"cells": [{"cell_type": "code", "source": 3}]}', "no text"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_broken_notebooks(tmp_path, capsys, content, said):
    path = tmp_path / "old.ipynb"
    path.write_bytes(content)
    assert main(["migrate", "--write", str(path)]) == 1
    assert said in capsys.readouterr().err
    assert path.read_bytes() == content
    assert os.listdir(tmp_path) == ["old.ipynb"]


def test_a_cell_that_is_python_2():
    with pytest.raises(DataError, match=r"old.ipynb, cell 3, line 2 is Python 2"):
        migrate_notebook(notebook("x = 1", "%time\nprint x"), "old.ipynb")


def test_the_page_shows_what_becomes_of_its_program():
    page = Path(__file__).parents[3] / "docs" / "old-scripts.md"
    old, new = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    # The page is formatted.
    assert ast.dump(ast.parse(migrated(old.partition("\n\n")[2]))) == ast.dump(ast.parse(new))


def test_what_is_right_is_not_refused():
    check_syntax("print('x')\nexec('y')\nx = '\\d <>'\n", "new.py")
