"""Session settings, collected from several statements into one `unisono.configure` call.

Understood are the spellings that guides of the time taught: a `ConfigProto` in a variable, fields
set one by one, a session made with it and handed to Keras. Anything else is left to a person.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import libcst as cst

from unisono.compat.knowledge import IGNORED_SETTINGS, SETTINGS
from unisono.compat.lookup import change_of
from unisono.compat.migrate.imports import ReadNames
from unisono.compat.migrate.steps import (
    MigrationStep,
    bound,
    call,
    expression,
    keyword,
    literal,
    removed,
    source_of,
)

Values = dict[str, cst.BaseExpression]
_CONFIG, _OPTIONS = "tensorflow.ConfigProto", "tensorflow.GPUOptions"
_SESSION = ("tensorflow.Session", "tensorflow.InteractiveSession")
_SET_SESSION = "keras.backend.set_session"


class Sessions(MigrationStep):
    """Rewrites sessions, one block of statements at a time."""

    def __init__(self, needed: set[str]) -> None:
        super().__init__()
        self._needed = needed
        self._uses: dict[str, int] = {}
        self._plans: dict[cst.CSTNode, Any] = {}
        """The replacement of a statement: a new call, "remove", or a remark."""

    def visit_Module(self, node: cst.Module) -> None:
        self._uses = _count_names(node)
        self._plan(node.body)

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self._plan(node.body)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        plan = self._plans.get(original_node)
        if plan is None:
            return updated_node
        if isinstance(plan, str):
            if plan != "remove":
                self.remark(plan)
            return removed(updated_node)
        return updated_node.with_changes(body=[cst.Expr(plan)])

    def _plan(self, body: Sequence[cst.CSTNode]) -> None:
        """Plan the replacement of the statements of a block that make a session."""
        found = _Found()
        for statement in body:
            small = _only(statement)
            if small is not None:
                self._read(statement, small, found)
        if found.end is None or found.is_unclear:
            return
        mentions = sum(self._uses.get(name, 0) for name in found.names)
        if mentions != found.num_mentions:
            return  # Something else uses the configuration or the session.
        arguments = _arguments(found.values)
        if arguments is None:
            return
        for statement in found.statements:
            self._plans[statement] = "remove"
        if _is_pinned(found.values) and arguments:
            options = " ".join(f"--{_option(arg)}" for arg in arguments)
            self._plans[found.end] = f"Start it with `unisono run {options}`; each has its own GPU."
        elif arguments:
            self._needed.add("import unisono")
            self._plans[found.end] = call("unisono.configure", *arguments)

    def _read(self, statement: Any, small: cst.BaseSmallStatement, found: "_Found") -> None:
        if isinstance(small, cst.Assign) and len(small.targets) == 1:
            self._read_assignment(statement, small, found)
        elif isinstance(small, cst.Expr) and isinstance(small.value, cst.Call):
            inner = small.value
            if self._old(inner.func) == _SET_SESSION and len(inner.args) == 1:
                self._read_session(statement, inner.args[0].value, found)
            elif self._old(inner.func) in _SESSION:
                self._read_session(statement, inner, found)

    def _read_assignment(self, statement: Any, small: cst.Assign, found: "_Found") -> None:
        target, value = small.targets[0].target, small.value
        old = self._old(value.func) if isinstance(value, cst.Call) else None
        if isinstance(target, cst.Name) and isinstance(value, cst.Call):
            if old in (_CONFIG, _OPTIONS):
                values = self._fields(value, found)
                prefix = "" if old == _CONFIG else "gpu_options."
                found.take(statement, target.value, 1)
                found.add(values, prefix)
            elif old in _SESSION:
                self._read_session(statement, value, found)
                found.take(statement, target.value, 1)
        elif isinstance(target, cst.Attribute):
            path = source_of(target).split(".")
            if path[0] in found.names:
                found.take(statement, path[0], 1)
                found.add({".".join(path[1:]): value}, "")

    def _read_session(self, statement: Any, node: cst.BaseExpression, found: "_Found") -> None:
        if isinstance(node, cst.Name) and node.value in found.names:
            found.take(statement, node.value, 1)
            return
        if not isinstance(node, cst.Call) or self._old(node.func) not in _SESSION:
            found.is_unclear = found.is_unclear or found.end is not None
            return
        args = bound(node.args, ("target", "graph", "config"))
        if args is None or not set(args) <= {"config"} or found.end is not None:
            found.is_unclear = True
            return
        found.take(statement, None, 0)
        found.end = statement
        if "config" in args:
            self._read_config(args["config"].value, found)

    def _read_config(self, config: cst.BaseExpression, found: "_Found") -> None:
        if isinstance(config, cst.Name) and config.value in found.names:
            found.num_mentions += 1
        elif isinstance(config, cst.Call) and self._old(config.func) == _CONFIG:
            found.add(self._fields(config, found), "")
        else:
            found.is_unclear = True

    def _fields(self, node: cst.Call, found: "_Found") -> Values | None:
        args = bound(node.args, ())
        if args is None:
            return None
        values: Values = {}
        for name, arg in args.items():
            value = arg.value
            if name == "device_count" and isinstance(value, cst.Dict):
                for element in value.elements:
                    if not isinstance(element, cst.DictElement):
                        return None
                    values[f"device_count.{literal(element.key)}"] = element.value
            elif name == "gpu_options" and isinstance(value, cst.Call):
                inner = self._fields(value, found)
                if inner is None or self._old(value.func) != _OPTIONS:
                    return None
                values |= {f"gpu_options.{key}": each for key, each in inner.items()}
            elif name == "gpu_options" and isinstance(value, cst.Name):
                if value.value not in found.names:
                    return None
                found.num_mentions += 1
            else:
                values[name] = value
        return values

    def _old(self, node: cst.CSTNode) -> str | None:
        dotted = self.dotted(node)
        change = change_of(dotted) if dotted is not None else None
        return None if change is None else change.old


class _Found:
    """The statements of a block that make a session."""

    def __init__(self) -> None:
        self.statements: list[cst.CSTNode] = []
        self.names: set[str] = set()
        self.values: Values = {}
        self.num_mentions = 0
        self.end: cst.CSTNode | None = None
        """The statement that makes the session, which the new call replaces."""
        self.is_unclear = False

    def take(self, statement: cst.CSTNode, name: str | None, num_mentions: int) -> None:
        if statement not in self.statements:
            self.statements.append(statement)
        if name is not None:
            self.names.add(name)
        self.num_mentions += num_mentions

    def add(self, values: Values | None, prefix: str) -> None:
        if values is None:
            self.is_unclear = True
            return
        self.values |= {prefix + name: value for name, value in values.items()}


def _arguments(values: Values) -> list[cst.Arg] | None:
    """The arguments of `configure` for settings; None if the user has to decide."""
    found: dict[str, cst.BaseExpression] = {}
    for field in sorted(
        values, key=lambda name: list(SETTINGS).index(name) if name in SETTINGS else -1
    ):
        value = values[field]
        if field in IGNORED_SETTINGS:
            continue
        if field not in SETTINGS:
            return None
        if field == "device_count.GPU" and literal(value) == 0:
            return None
        if field == "gpu_options.visible_device_list":
            if _is_pinned(values):
                continue  # `unisono run` gives each process its own.
            value = _ids(value)
        if field == "gpu_options.allow_growth":
            if literal(value) is False:
                continue
            if literal(value) is not True:
                return None
            value = expression('"grow"')
        found[SETTINGS[field]] = value
    return [
        keyword(name, found[name]) for name in ("gpus", "memory", "cpu_threads") if name in found
    ]


def _is_pinned(values: Values) -> bool:
    """Whether each process takes the GPU of its local rank, as under `unisono run`."""
    value = values.get("gpu_options.visible_device_list")
    return value is not None and "local_rank" in source_of(value)


def _option(arg: cst.Arg) -> str:
    assert arg.keyword is not None
    value = literal(arg.value)
    shown = source_of(arg.value) if value is ... else value
    return f"{arg.keyword.value.replace('_', '-')} {shown}"


def _ids(value: cst.BaseExpression) -> cst.BaseExpression:
    text = literal(value)
    if isinstance(text, str) and all(part.strip().isdigit() for part in text.split(",")):
        return expression(repr([int(part) for part in text.split(",")]))
    return expression(f"[int(i) for i in ({source_of(value)}).split(',')]")


def _only(statement: cst.CSTNode) -> cst.BaseSmallStatement | None:
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        return statement.body[0]
    return None


def _count_names(module: cst.Module) -> Counter[str]:
    counts: Counter[str] = Counter()
    module.visit(ReadNames(lambda name: counts.update([name])))
    return counts
