"""`unisono train` and `unisono recipe`: the recipes by their names, to run or to take over.

Imports no framework and runs no recipe to know it: what a page is for stands in its first line.
"""

import argparse
import ast
import difflib
import functools
import runpy
import sys
from importlib.resources import files
from typing import Any

from unisono.errors import ConfigurationError

_PACKAGE = "unisono.recipes"
NAMES = ("digits", "mnist", "cifar10", "resnet50")


def add_to(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a recipe; --list shows them",
        usage="unisono train RECIPE [options] | --list",
        description=f"{_list()}\n\n`unisono train RECIPE --help` shows the options of a recipe.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    train.add_argument("--list", dest="is_list", action="store_true", help="describe the recipes")
    train.add_argument("recipe", nargs="?", metavar="RECIPE", help=", ".join(NAMES))
    train.add_argument("options", nargs=argparse.REMAINDER, help="of the recipe")
    train.set_defaults(run=run, parser=train)
    train.prepare = functools.partial(_with_recipe_first, train)
    recipe = commands.add_parser("recipe", help="print the page of a recipe, to make it your own")
    recipe.add_argument("recipe", metavar="RECIPE", help=", ".join(NAMES))
    recipe.set_defaults(run=show)


def run(options: argparse.Namespace) -> int:
    if options.is_list:
        print(_list())
        return 0
    if options.recipe is None:
        options.parser.error("which recipe? `unisono train --list` describes them")
    name = _known(options.recipe)
    # The recipe is a program: it reads its options from the command line, and exits by itself.
    sys.argv = [f"unisono train {name}", *options.options]
    runpy.run_module(f"{_PACKAGE}.{name}", run_name="__main__", alter_sys=True)
    return 0


def _with_recipe_first(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Options of a recipe are known to the recipe alone, so its name must stand before them."""
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--list"):
        named = next((word for word in words if word in NAMES), "digits")
        rest = " ".join(word for word in words if word != named)
        parser.error(
            f"which recipe is {words[0]} for? Write its name first, as in `unisono train {named} "
            f"{rest}`; `unisono train --list` describes them"
        )
    return words


def show(options: argparse.Namespace) -> int:
    print(page(_known(options.recipe)), end="")
    return 0


def page(name: str) -> str:
    """The text of a recipe's page."""
    return files(_PACKAGE).joinpath(f"{name}.py").read_text(encoding="utf-8")


def _list() -> str:
    width = max(map(len, NAMES))
    return "\n".join(f"{name:{width}}  {_first_line(name)}" for name in NAMES)


def _first_line(name: str) -> str:
    return (ast.get_docstring(ast.parse(page(name))) or "").splitlines()[0]


def _known(name: str) -> str:
    if name in NAMES:
        return name
    near = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.4)
    guess = f" Did you mean {near[0]}?" if near else ""
    raise ConfigurationError(f"Asked for the recipe {name!r}; there are {', '.join(NAMES)}.{guess}")
