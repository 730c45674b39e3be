"""The examples of README.md, of docs/ and of docstrings run on every backend, as written."""

import functools
import json
import os
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from examples import BACKENDS, blocks, doctest_names

ROOT = Path(__file__).parents[2]
ALL_EXAMPLES_S = 900
pytestmark = pytest.mark.timeout(ALL_EXAMPLES_S + 20)
BLOCKS = [block for block in blocks(ROOT) if block.language == "python"]
NAMES = {block.name: block.backends for block in BLOCKS}
NAMES |= dict.fromkeys(sorted(doctest_names()), BACKENDS)
# One backend in every run, the others where there is time.
EXAMPLES = [
    pytest.param(backend, name, marks=[] if backend == "jax" else pytest.mark.slow)
    for name, backends in NAMES.items()
    for backend in backends
]


@functools.cache
def report_of(backend: str, folder: Path) -> dict:
    """What each example printed and raised; all of a backend run in one process, once."""
    if PathFinder.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("UNISONO_")}
    # Two replicas, where an example leaves the number open and would get one here.
    ours = {"KERAS_BACKEND": backend, "UNISONO_REPLICAS": "2", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "examples.py"), str(ROOT)],
        cwd=folder,
        env=inherited | ours,
        capture_output=True,
        text=True,
        timeout=ALL_EXAMPLES_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize(("backend", "name"), EXAMPLES)
def test_example_runs(backend, name, folder):
    assert report_of(backend, folder)[name]["error"] == ""


@pytest.mark.slow
def test_the_announcement_on_a_page_is_what_is_printed(folder):
    """Each line that a page shows as unisono's own is printed by an example of that page."""
    shown = [
        (block.page, line)
        for block in blocks(ROOT)
        if block.language == "text"
        for line in block.code.splitlines()
        if re.match(rf"unisono: ({'|'.join(BACKENDS)})\b", line)
    ]
    assert shown
    for page, line in shown:
        backend = re.match(r"unisono: (\w+)", line)[1]
        report = report_of(backend, folder)
        printed = [report[name]["output"] for name in report if name.startswith(f"{page}:")]
        assert any(line in output.splitlines() for output in printed), line


def test_every_page_with_code_is_found():
    pages = {"README.md", *(f"docs/{name}.md" for name in ("parallel", "placement", "coming-from"))}
    pages |= {"docs/devices.md", "docs/strategy.md", "docs/hosts.md", "docs/failures.md"}
    pages |= {"docs/horovod.md", "docs/processes.md", "docs/training.md", "docs/old-scripts.md"}
    pages |= {"docs/slurm.md", "docs/top.md"}
    assert pages <= {block.page for block in BLOCKS}
    assert {"unisono.parallel.parallel", "unisono.data.shards.shard_bounds"} <= set(NAMES)


def test_links_between_pages_lead_somewhere():
    for path in [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


def test_names_in_the_architecture_page_exist():
    page = re.sub(
        r"^```.*?^```$", "", _read("docs/architecture.md"), flags=re.MULTILINE | re.DOTALL
    )
    folders = [ROOT, *(path for path in (ROOT / "src").rglob("*") if path.is_dir())]
    words = {w for path in (ROOT / "src").rglob("*.py") for w in re.findall(r"\w+", _read(path))}
    for name in re.findall(r"`([\w./]+)(?:\(.*?\))?`", page):
        if "/" in name or name.endswith((".py", ".md", ".toml")):
            assert any((folder / name).exists() for folder in folders), name
        else:
            assert words.issuperset(name.split(".")), name


def test_the_architecture_page_lists_every_package():
    drawn = _read("docs/architecture.md").split("```")[1]
    package = ROOT / "src" / "unisono"
    parts = {path.name for path in package.iterdir() if (path / "__init__.py").exists()}
    parts |= {path.stem for path in package.glob("*.py") if not path.stem.startswith("__")}
    assert parts == set(re.findall(r"\b(\w+)(?:/|\.py)\s", re.sub(r"base\.py.*", "", drawn)))


def _read(path: str | Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")
