"""Import statements: old names are imported from their new modules, and new imports are added."""

import ast
import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import libcst as cst

from unisono.compat.knowledge import CHANGES, IMAGES, MODULES
from unisono.compat.lookup import canonical, change_of, gone_with, today
from unisono.compat.migrate.files import MARK
from unisono.compat.migrate.steps import MigrationStep, dotted_name, removed, source_of

_LEGACY = "unisono.compat.legacy"
Target = tuple[str, str, str | None]
"""A module, a name in it, and the name after `as`."""


class Imports(MigrationStep):
    """Rewrites imports, after the rest of the program has been rewritten."""

    def __init__(self, in_use: set[str]) -> None:
        super().__init__()
        self._in_use = in_use

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        body = self._statements(updated_node.body)
        if not body:
            return removed(updated_node)
        if len(updated_node.body) > 1 or len(body) == 1:
            return updated_node.with_changes(body=body)
        first, *others = body
        return cst.FlattenSentinel(
            [
                updated_node.with_changes(body=[first]),
                *(cst.SimpleStatementLine([small]) for small in others),
            ]
        )

    def leave_SimpleStatementSuite(
        self, original_node: cst.SimpleStatementSuite, updated_node: cst.SimpleStatementSuite
    ) -> Any:
        """`try: from a import b`, on one line."""
        body = self._statements(updated_node.body)
        return updated_node.with_changes(body=body or [cst.Pass()])

    def _statements(self, statements: Sequence[Any]) -> list[Any]:
        body: list[Any] = []
        for small in statements:
            if isinstance(small, cst.ImportFrom):
                body += self._from(small)
            elif isinstance(small, cst.Import):
                body += self._plain(small)
            else:
                body.append(small)
        return body

    def _plain(self, statement: cst.Import) -> list[cst.BaseSmallStatement]:
        """`import a.b as c`."""
        names = []
        for alias in statement.names:
            if dotted_name(alias.name) == _LEGACY and not self._uses("unisono"):
                continue  # A migrated program does not need it.
            old = dotted_name(alias.name)
            if root(old) in FRAMEWORKS:
                self._check(old)
            new = _home(old, MODULES.get(canonical(old), canonical(old)))
            new = new.removesuffix(".compat.legacy") if old == _LEGACY else new
            changed = alias if new == old else alias.with_changes(name=_expression(new))
            names.append(changed)
        return [statement.with_changes(names=_once(names))] if names else []

    def _from(self, statement: cst.ImportFrom) -> list[cst.BaseSmallStatement]:
        """`from a.b import c`, as one statement per new module."""
        if statement.relative or statement.module is None:
            return [statement]
        module = dotted_name(statement.module)
        if root(module) not in FRAMEWORKS:
            return [statement]
        if isinstance(statement.names, cst.ImportStar):
            self._check(module)
            self._check_star(today(canonical(module)))
            successor = _home(module, today(canonical(module)))
            if successor == module:
                return [statement]
            return [statement.with_changes(module=_expression(successor))]
        targets = [self._target(module, alias) for alias in statement.names]
        if all(
            target == (module, dotted_name(alias.name), _bound(alias))
            for target, alias in zip(targets, statement.names, strict=True)
        ):
            return [statement]
        return _grouped(statement, module, targets)

    def _target(self, module: str, alias: cst.ImportAlias) -> Target | None:
        """From where to import a name; None if it is no longer needed."""
        name, bound = dotted_name(alias.name), _bound(alias)
        dotted = f"{module}.{name}"
        known_as = bound or name
        if canonical(dotted) in MODULES:
            parent, _, last = _home(module, MODULES[canonical(dotted)]).rpartition(".")
            return parent, last, known_as if known_as != last else None
        change = change_of(dotted)
        if change is None or self._check(dotted) or _is_still_there(dotted, change.new):
            if change is None:
                self._check(dotted)
            return _home(module, today(canonical(module))), name, bound
        if change.new is not None and _is_renamed(change.old, change.new):
            new = change.new.rpartition(".")[2]
            return _home(module, change.module), new, known_as if self._uses(known_as) else None
        if not self._uses(known_as):
            return None
        if change.new is None:
            return module, name, bound
        parent, _, last = change.new.rpartition(".")
        return parent, last, known_as if known_as != last else None

    def _check_star(self, module: str) -> None:
        for change in CHANGES:
            if change.module == module and self._uses(change.name) and not is_in_keras(change.old):
                self.remark(
                    f"{change.old} is old: write {change.write}. Import it by its name, and "
                    "unisono migrate does it."
                )

    def _uses(self, name: str) -> bool:
        return name in self._in_use

    def _check(self, dotted: str) -> bool:
        """Whether a name has no successor; leaves a remark if so."""
        gone = gone_with(dotted)
        if gone is not None:
            self.remark(f"{gone.old} is gone: {gone.why}. Instead: {gone.write}.")
        elif not _is_known(dotted):
            self.remark(
                f"{dotted} is not in Keras 3, and it is no name that unisono knows of Keras 2."
            )
        return gone is not None


class ReadNames(cst.CSTVisitor):
    """Calls `found` for each name that a program reads: neither attributes nor keywords."""

    def __init__(self, found: Callable[[str], None]) -> None:
        self.found = found

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.found(node.value)


class _NamesOutsideOfImports(ReadNames):
    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if node.raw_value.isidentifier():  # In `__all__`, say.
            self.found(node.raw_value)


def names_in_use(module: cst.Module) -> set[str]:
    """Names that a program uses outside of its imports."""
    found: set[str] = set()
    module.visit(_NamesOutsideOfImports(found.add))
    return found


def _grouped(
    statement: cst.ImportFrom, module: str, targets: Sequence[Target | None]
) -> list[cst.BaseSmallStatement]:
    groups: dict[str, list[cst.ImportAlias]] = {}
    assert not isinstance(statement.names, cst.ImportStar)
    for target, alias in zip(targets, statement.names, strict=True):
        if target is not None:
            parent, name, bound = target
            new = alias.with_changes(
                name=cst.Name(name),
                asname=cst.AsName(cst.Name(bound)) if bound and bound != name else None,
            )
            groups.setdefault(parent, []).append(new)
    found: list[cst.BaseSmallStatement] = []
    for parent, names in groups.items():
        if not parent:  # A name that is a whole package today: `import keras as engine`.
            found += [cst.Import([_last(alias)]) for alias in names]
        else:
            aliases = _once(names, statement.names[-1].comma)
            changed = statement.with_changes(module=_expression(parent), names=aliases)
            found.append(changed)
    return found


def _once(
    names: Sequence[cst.ImportAlias], last_comma: Any = cst.MaybeSentinel.DEFAULT
) -> list[cst.ImportAlias]:
    seen: dict[str, cst.ImportAlias] = {}
    for alias in names:
        key = f"{dotted_name(alias.name)} {_bound(alias)}"
        seen.setdefault(key, alias)
    kept = list(seen.values())
    last = kept[-1].with_changes(comma=last_comma)
    return [*(_with_comma(alias) for alias in kept[:-1]), last]


def _with_comma(alias: cst.ImportAlias) -> cst.ImportAlias:
    if isinstance(alias.comma, cst.Comma):
        return alias
    return alias.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))


def _last(alias: cst.ImportAlias) -> cst.ImportAlias:
    return alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)


def _home(old: str, new: str) -> str:
    """A canonical name in the package that the program uses, such as `tensorflow.keras`."""
    if canonical(old) == old or not new.startswith("keras"):
        return new
    prefix = old.removesuffix(canonical(old).removeprefix("keras"))
    return prefix + new.removeprefix("keras") if canonical(old).startswith("keras") else old


def _is_renamed(old: str, new: str) -> bool:
    return old.rpartition(".")[0] == new.rpartition(".")[0]


def _is_still_there(dotted: str, new: str | None) -> bool:
    """Whether a name is an image generator, which `tensorflow.keras` still has."""
    return (new or "").startswith(IMAGES) and not dotted.startswith("keras.")


def _is_known(dotted: str) -> bool:
    name = canonical(dotted)
    if not name.startswith("keras.") or change_of(dotted) is not None or name in MODULES:
        return True
    return is_in_keras(dotted) or is_in_keras(today(name))


def _bound(alias: cst.ImportAlias) -> str | None:
    return source_of(alias.asname.name) if alias.asname is not None else None


def _expression(dotted: str) -> Any:
    return cst.parse_expression(dotted)


FRAMEWORKS = ("keras", "tensorflow", "horovod")


def add_imports(module: cst.Module, needed: set[str]) -> cst.Module:
    """Add missing imports, above the first import of a framework."""
    there = {source_of(small).strip() for line in module.body for small in _imports_in(line)}
    if any(text.startswith("import unisono.") and " as " not in text for text in there | needed):
        there.add("import unisono")
    lines = [cst.parse_statement(text + "\n") for text in sorted(needed - there)]
    if not lines:
        return module
    place = next(
        (i for i, statement in enumerate(module.body) if _names_framework(statement)),
        _after_head(module.body),
    )
    body: list[Any] = list(module.body)
    if place < len(body):
        above = list(getattr(body[place], "leading_lines", ()))
        # A remark stays with its statement.
        split = next((i for i, line in enumerate(above) if _is_remark(line)), len(above))
        body[place] = body[place].with_changes(leading_lines=above[split:])
        lines[0] = lines[0].with_changes(leading_lines=above[:split])
    return module.with_changes(body=[*body[:place], *lines, *body[place:]])


def _is_remark(line: cst.EmptyLine) -> bool:
    return line.comment is not None and line.comment.value.startswith(MARK)


def _imports_in(statement: Any) -> list[cst.BaseSmallStatement]:
    body = statement.body if isinstance(statement, cst.SimpleStatementLine) else []
    return [small for small in body if isinstance(small, (cst.Import, cst.ImportFrom))]


def _names_framework(statement: Any) -> bool:
    for small in _imports_in(statement):
        if isinstance(small, cst.Import):
            roots = [root(dotted_name(alias.name)) for alias in small.names]
        else:
            assert isinstance(small, cst.ImportFrom)
            roots = [root(dotted_name(small.module))] if small.module is not None else []
        if {*FRAMEWORKS, "unisono"} & set(roots):
            return True
    return False


def _after_head(body: Sequence[Any]) -> int:
    """The first place for imports: after the docstring and `__future__` imports."""
    place = 0
    for i, statement in enumerate(body):
        if not isinstance(statement, cst.SimpleStatementLine):
            break
        small = statement.body[0]
        is_docstring = (
            i == 0
            and isinstance(small, cst.Expr)
            and isinstance(small.value, (cst.SimpleString, cst.ConcatenatedString))
        )
        is_future = isinstance(small, cst.ImportFrom) and (
            small.module is not None and dotted_name(small.module) == "__future__"
        )
        if not is_docstring and not is_future:
            break
        place = i + 1
    return place


def root(dotted: str) -> str:
    return dotted.partition(".")[0]


def is_in_keras(dotted: str) -> bool:
    """Whether the installed Keras has a name; reads its files, as importing it needs a backend.

    >>> is_in_keras("keras.utils.to_categorical")
    True
    """
    rest = canonical(dotted).removeprefix("keras").removeprefix(".")
    home = "" if canonical(dotted) == dotted else "_tf_keras/keras"
    parts = rest.split(".") if rest else []
    folder = ""
    for i, part in enumerate(parts):
        names = _names(f"{home}/{folder}".strip("/"))
        if names is None:
            return False
        if part not in names:
            return False
        folder = f"{folder}/{part}".strip("/")
        if _names(f"{home}/{folder}".strip("/")) is None:
            return True  # A class or a function; its attributes are not checked.
        if i + 1 == len(parts):
            return True
    return True


@functools.cache
def _names(folder: str) -> frozenset[str] | None:
    """The names in a package of Keras; None if there is no such package."""
    spec = importlib.util.find_spec("keras")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0], folder, "__init__.py")
    if not path.is_file():
        return None
    tree = ast.parse(path.read_bytes())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    inner = {each.name for each in path.parent.iterdir() if (each / "__init__.py").is_file()}
    return frozenset(names | inner | {"__version__"})
