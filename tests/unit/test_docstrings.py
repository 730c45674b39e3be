"""Every public call is documented as in Keras: Args, Returns, Raises, and an example that is run.

Sources are parsed and not imported, because callbacks and schedules import Keras.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest
from examples import doctest_names

import unisono
import unisono.compat
import unisono.training

PACKAGE = Path(unisono.__file__).parent
EXCEPTIONS = {
    name
    for name in unisono.__all__
    if inspect.isclass(getattr(unisono, name)) and issubclass(getattr(unisono, name), BaseException)
}
# Nothing that a caller can get wrong.
NEVER_RAISE = {
    "devices",
    "log_placement",
    "Device",
    "Topology",
    "Context",
    "Strategy.scope",
    "Strategy.gather",
    "Strategy.replicate",
    "Strategy.experimental_local_results",
    "Run.num_steps",
    "Run.prepare_keras",
    "Run.describe",
}
# Made by `begin` and not by users.
NEVER_MADE = {"Run"}


def exported() -> dict[str, Path]:
    """The public names that are calls or classes, each with the file that defines it."""
    found = {}
    for module in (unisono, unisono.compat, unisono.compat.mxnet, unisono.training):
        for name in set(module.__all__) - EXCEPTIONS - {"mxnet"}:
            found[name] = Path(inspect.getsourcefile(getattr(module, name)))
    for path in (PACKAGE / "callbacks.py", PACKAGE / "schedules.py"):
        (names,) = re.findall(r"^__all__ = (\[.*?\])", path.read_text(), re.MULTILINE | re.DOTALL)
        found |= dict.fromkeys(ast.literal_eval(names), path)
    return found


def definitions() -> dict[str, tuple[Path, ast.AST]]:
    """Public functions and classes, and the public methods of those that users call."""
    found = {}
    for name, path in exported().items():
        (node,) = [
            node
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if getattr(node, "name", None) == name
        ]
        found[name] = path, node
        if name in ("Strategy", "Run"):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
                    found[f"{name}.{method.name}"] = path, method
    return found


DEFINITIONS = definitions()
IS_PROPERTY = {
    name
    for name, (_, node) in DEFINITIONS.items()
    if any(getattr(each, "id", "") == "property" for each in getattr(node, "decorator_list", ()))
}


def parameters(node: ast.AST) -> list[str]:
    """The parameters of a function, of a class' `__init__`, or the fields of a dataclass."""
    if isinstance(node, ast.ClassDef):
        made = [each for each in node.body if getattr(each, "name", "") == "__init__"]
        if not made:
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            return [each.target.id for each in fields]
        node = made[0]
    given = node.args
    names = [each.arg for each in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    starred = [(given.vararg, "*"), (given.kwarg, "**")]
    names += [f"{stars}{each.arg}" for each, stars in starred if each is not None]
    return [name for name in names if name != "self"]


def sections(node: ast.AST) -> dict[str, str]:
    """The sections of a docstring by name; what comes before them is named ""."""
    text = ast.get_docstring(node) or ""
    parts = re.split(r"^(Args|Returns|Raises|Example):\n", text, flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("name", sorted(DEFINITIONS))
def test_a_public_call_has_all_sections(name):
    _, node = DEFINITIONS[name]
    found = sections(node)
    first_line = found[""].partition("\n")[0]
    assert first_line.endswith("."), first_line
    if name in IS_PROPERTY:
        return
    described = re.findall(r"^ {4}(\*{0,2}\w+): \S", found.get("Args", ""), re.MULTILINE)
    if name not in NEVER_MADE:
        assert sorted(described) == sorted(parameters(node))
    returns = getattr(node, "returns", None)
    is_returning = returns is not None and ast.unparse(returns) != "None"
    assert ("Returns" in found) == is_returning
    if name not in NEVER_RAISE | NEVER_MADE:
        assert re.match(r" {4}\w+: \S", found["Raises"])


# `Run` is used by the examples of docs/training.md and by the recipes.
@pytest.mark.parametrize("name", sorted(name for name in DEFINITIONS if not name.startswith("Run")))
def test_a_public_call_has_an_example_that_is_run(name):
    path, node = DEFINITIONS[name]
    assert re.match(r" {4}>>> \S", sections(node)["Example"])
    module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    assert f"{module}.{name}" in doctest_names()


@pytest.mark.parametrize("name", sorted(EXCEPTIONS))
def test_an_exception_says_when_it_is_raised(name):
    assert inspect.getdoc(getattr(unisono, name)).partition("\n")[0].endswith((".", ":"))
