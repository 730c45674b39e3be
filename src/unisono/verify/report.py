"""The result for people, as text, and for programs, as JSON."""

import dataclasses
import math
from typing import Any

from unisono.devices import format_replicas
from unisono.verify.compare import KINDS, Comparison
from unisono.verify.records import Site
from unisono.verify.session import Verification

_MOST_LAYERS = 5
_MOST_OUTPUT_LINES = 30
_TITLES = {"optimizer": "optimizer state", "loss": "losses"}


def as_text(result: Verification) -> str:
    """The table, the verdict, and the causes with what to write instead."""
    parts = [table(result)] if result.comparison is not None or result.noise is not None else []
    parts.append(result.verdict)
    for cause in result.causes:
        lines = [f"{'Cause' if cause.is_proven else 'Likely cause'}: {cause.what}."]
        if cause.site is not None:
            lines.append(f"  {cause.site.file}, line {cause.site.line}: {cause.site.text}")
        lines += [f"  Seen: {cause.evidence}.", f"  {cause.remedy}"]
        parts.append("\n".join(lines))
    if result.output:
        last = result.output.rstrip().splitlines()[-_MOST_OUTPUT_LINES:]
        parts.append("\n".join(["The program's output ends with:", *(f"  {x}" for x in last)]))
    if result.notes:
        parts.append("\n".join(f"Note: {note}" for note in result.notes))
    return "\n\n".join(parts)


def rows(result: Verification) -> list[tuple[str, ...]]:
    """The largest difference of each kind, and of each layer where it is large."""
    many = format_replicas(result.options.num_replicas)
    found: list[tuple[str, ...]] = [("largest difference", "one device again", many, "allowed")]
    for kind in KINDS:
        noise = _largest(result.noise, kind)
        ours = result.comparison.largest(kind) if result.comparison is not None else None
        if noise is None and ours is None:
            continue
        large = [
            d
            for d in (result.comparison.differences if result.comparison else [])
            if d.quantity.kind == kind and d.is_large
        ]
        shown = max(large, key=lambda d: d.value) if large else ours
        found.append(
            (
                _TITLES.get(kind, kind),
                _number(noise),
                "" if shown is None else _number(shown.value) + (" !" if shown.is_large else ""),
                "" if shown is None else _number(shown.limit),
            )
        )
        if kind == "weights" and result.comparison is not None:
            layers = result.comparison.large_by_layer()
            for layer, value in layers[:_MOST_LAYERS]:
                found.append((f"  {layer}", "", f"{_number(value)} !", ""))
            if len(layers) > _MOST_LAYERS:
                found.append((f"  and {len(layers) - _MOST_LAYERS} more layers", "", "", ""))
    return found


def table(result: Verification) -> str:
    """The rows as aligned columns."""
    lines = rows(result)
    widths = [max(len(row[i]) for row in lines) for i in range(len(lines[0]))]
    shown = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in lines)
    return "\n".join(shown)


def as_json(result: Verification) -> dict[str, Any]:
    """All of it, for programs."""
    comparison = result.comparison
    first = comparison.first_large() if comparison is not None else []
    return {
        "code": result.code,
        "verdict": result.verdict,
        "program": result.program,
        "backend": result.record.backend,
        "options": dataclasses.asdict(result.options),
        "num_steps": result.record.num_steps,
        "largest": _kinds(comparison),
        "noise": _kinds(result.noise),
        "rounding": _kinds(result.rounding),
        "first": None
        if not first
        else {
            "step": first[0].quantity.step,
            "kind": first[0].quantity.kind,
            "name": first[0].quantity.name,
            "difference": _finite(first[0].value),
            "allowed": first[0].limit,
        },
        "layers": dict(comparison.large_by_layer()) if comparison is not None else {},
        "structure": comparison.structure if comparison is not None else [],
        "causes": [
            {
                "cause": cause.key,
                "what": cause.what,
                "evidence": cause.evidence,
                "remedy": cause.remedy,
                "is_proven": cause.is_proven,
                "site": _site(cause.site),
            }
            for cause in result.causes
        ],
        "notes": result.notes,
        "output": result.output,
    }


def _kinds(comparison: Comparison | None) -> dict[str, float | None]:
    return {kind: _finite(_largest(comparison, kind)) for kind in KINDS}


def _largest(comparison: Comparison | None, kind: str) -> float | None:
    found = None if comparison is None else comparison.largest(kind)
    return None if found is None else found.value


def _site(site: Site | None) -> dict[str, Any] | None:
    return None if site is None else dataclasses.asdict(site)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.0e}"
