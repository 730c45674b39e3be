"""Causes in the computation: what depends on how the rows of a batch are split over replicas.

Where a cause can be switched off, a run without it shows whether it is the only one.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from unisono.verify import source
from unisono.verify.causes import Cause
from unisono.verify.compare import compare
from unisono.verify.evidence import (
    Evidence,
    cause_of,
    first_difference,
    scaling_site,
    site_of_training,
    trained_models,
)
from unisono.verify.records import ProgramRecord, Site

_RATIO_SPREAD = 0.02
_SCALES = {"scale_regularization_loss"}
_TITLES = {"tensorflow": "TensorFlow", "torch": "torch"}


def computation_causes(evidence: Evidence) -> list[Cause]:
    """The causes, the surest first; at least one, which may say that none is known."""
    found = [*_undecided_loss(evidence), *_mixing(evidence)]
    if not found:
        found, evidence = _switched_off(evidence)
    for detect in _OTHERS:
        if any(cause.is_proven for cause in found):
            break
        found += detect(evidence)
    return found or [_unknown(evidence)]


# -- causes that a run can be made without --------------------------------------------------------


def _switched_off(evidence: Evidence) -> tuple[list[Cause], Evidence]:
    """Causes that can be switched off, and the evidence of runs without them."""
    many = evidence.many.record
    found, variant = [], evidence.many.variant
    if (batch_norm := _batch_norm(many)) is not None:
        found.append(batch_norm)
        variant = replace(variant, forces_sync=True)
    can_draw_alike = many.backend == "torch"
    random = _random_layers(many)
    if random is not None and not (can_draw_alike and variant.is_exact):
        found.append(random)
        variant = replace(variant, is_exact=variant.is_exact or can_draw_alike)
    if variant == evidence.many.variant:
        return found, evidence
    one = evidence.one
    if variant.is_exact and any(use.seed is None for use in one.record.random):
        one = evidence.run(replace(one.variant, is_exact=True))
    changed = evidence.run(variant)
    how = " and ".join(_WITHOUT[cause.key] for cause in found)
    if changed.has_failed or one.has_failed:
        return found, evidence
    comparison = compare(
        one.record, changed.record, noise=evidence.noise, rounding=evidence.rounding
    )
    is_all = comparison.is_same
    shown = (
        f"with {how} they agree ({comparison.largest_of_all():.0e})"
        if is_all
        else f"they also differ with {how}, so there is another cause"
    )
    found = [replace(cause, evidence=shown, is_proven=is_all) for cause in found]
    return found, replace(evidence, one=one, many=changed, comparison=comparison)


_WITHOUT = {
    "batch norm": "synchronized batch norm",
    "random layer": "the random numbers of one device",
}


def _batch_norm(many: ProgramRecord) -> Cause | None:
    models = [m for m in trained_models(many) if not m.is_sync]
    layers = [layer for model in models for layer in model.layers if layer.is_batch_norm]
    if not layers:
        return None
    return cause_of(
        "batch norm",
        "batch norm is kept per replica (sync_batch_norm=False)",
        f"{layers[0].name} is not synchronized",
        _keyword_site(many, "sync_batch_norm") or layers[0].site,
    )


def _random_layers(many: ProgramRecord) -> Cause | None:
    if many.backend == "jax":
        return None
    layers = [layer for model in trained_models(many) for layer in model.layers if layer.is_random]
    own = [use for use in many.draws if use.what.startswith("keras.")]
    if not layers and not own:
        return None
    names = [layer.kind for layer in layers] or [use.what for use in own]
    sites = [layer.site for layer in layers] or [use.site for use in own]
    return cause_of(
        "random layer",
        f"{', '.join(dict.fromkeys(names))}: replicas draw random numbers of their own on "
        f"{_TITLES.get(many.backend, many.backend)}",
        "random numbers are drawn in a step",
        sites[0],
        is_proven=False,
    )


# -- causes that are seen in the records ----------------------------------------------------------


def _random_ops(evidence: Evidence) -> Iterator[Cause]:
    """Random numbers of the framework itself, which have a state outside of Keras."""
    many = evidence.many.record
    for use in many.draws:
        if not use.what.startswith("keras."):
            yield cause_of(
                "random op",
                f"{use.what} draws other random numbers on replicas",
                first_difference(evidence),
                use.site,
                is_proven=False,
            )
            return


def _torch_batch_norm(evidence: Evidence) -> Iterator[Cause]:
    for model in trained_models(evidence.many.record):
        for layer in model.layers:
            if layer.inner_batch_norms:
                yield cause_of(
                    "torch batch norm",
                    f"{layer.name} has a batch norm of torch ({layer.inner_batch_norms[0]}), "
                    "which is kept per replica",
                    first_difference(evidence),
                    layer.site,
                    is_proven=layer.name in first_difference(evidence),
                )
                return


def _undecided_loss(evidence: Evidence) -> Iterator[Cause]:
    many = evidence.many.record
    for text in many.warnings:
        if "neither a mean nor a sum" in text or "could not be tried" in text:
            said = text.split(". ")[0].rpartition(": ")[2]
            own = [site for m in trained_models(many) for site in m.own_methods.values()]
            adding = list(source.calls(many.files, {"add_loss"}))
            sites = adding if "add_loss" in said and adding else own or adding
            yield cause_of(
                "loss",
                "the loss is neither a mean nor a sum over the rows of a batch",
                said,
                sites[0] if sites else site_of_training(many),
            )
            return


def _mixing(evidence: Evidence) -> Iterator[Cause]:
    """What the model computes from other rows than its own, by a try on halves of a batch."""
    if evidence.many.record.backend == "jax":
        return
    for model in trained_models(evidence.one.record):
        layer = next((one for one in model.layers if one.name == model.mixing.layer), None)
        if layer is not None:
            yield cause_of(
                "layer",
                f"{layer.name} ({layer.kind}) computes with other rows of the batch, of which a "
                "replica has only its own",
                "on the halves of a batch it gives other rows than on the whole",
                layer.site,
            )
        elif model.mixing.is_loss:
            own = list(model.own_methods.values())
            yield cause_of(
                "loss",
                "the loss is neither a mean nor a sum over the rows of a batch",
                "that of a batch is neither the mean nor the sum of those of its halves",
                own[0] if own else model.compile_site,
            )


def _claimed(evidence: Evidence) -> Iterator[Cause]:
    """Whatever a program computes with the number of replicas."""
    site = scaling_site(evidence.many.record)
    if site is None or evidence.one.variant.claims is not None:
        return
    told = evidence.run(replace(evidence.one.variant, claims=evidence.num_replicas))
    if evidence.agrees_with(evidence.many, told) is not None:
        yield cause_of(
            "arguments",
            "the program computes with the number of replicas",
            "one device that is told their number gives what they give",
            site,
        )


def _loop(evidence: Evidence) -> Iterator[Cause]:
    """Custom training loops, where the program itself reduces losses and gradients."""
    one, many = evidence.one.record, evidence.many.record
    is_loop = bool(many.loop_sites) or (not many.calls and many.uses_unisono)
    if not is_loop:
        return
    site = many.loop_sites[0] if many.loop_sites else None
    if not many.num_distributed:
        shown = "no batch came from strategy.distribute_dataset"
        yield cause_of("loop data", "the loop trains every replica on the same rows", shown, site)
        return
    clips = list(source.calls(many.files, source.CLIPPING))
    reduces = any(True for _ in source.calls(many.files, {"reduce_gradients"}))
    if clips and not reduces and many.backend != "jax":
        yield cause_of(
            "loop gradients",
            "the loop clips the gradients of one replica's rows",
            first_difference(evidence),
            clips[0],
        )
        return
    if many.backend != "jax" and not any(True for _ in source.calls(many.files, _SCALES)):
        for used in source.mentions(many.files, {"losses"}, is_attribute=True):
            if used.text and ".losses" in used.text and "keras.losses" not in used.text:
                yield cause_of(
                    "loop regularization",
                    "the loop adds the model's own losses once for each replica",
                    first_difference(evidence),
                    used,
                    is_proven=False,
                )
                return
    ratio = _update_ratio(one, many)
    count = evidence.num_replicas
    if ratio is not None and any(np.isclose(ratio, r, rtol=0.05) for r in (count, 1 / count)):
        sites = list(source.calls(many.files, {"apply_gradients", "apply", "compute_average_loss"}))
        yield cause_of(
            "loop loss",
            "the loop's loss is not that of the global batch",
            f"the first gradient is {ratio:.2f} times that of one device",
            _loss_site(many) or (sites[0] if sites else site),
        )


def _stateful(evidence: Evidence) -> Iterator[Cause]:
    for model in trained_models(evidence.many.record):
        for layer in model.layers:
            if layer.is_stateful and evidence.many.record.backend != "jax":
                yield cause_of(
                    "stateful",
                    f"{layer.name} is stateful, with one state per row of the batch",
                    first_difference(evidence),
                    layer.site,
                    is_proven=False,
                )
                return


def _layer_state(evidence: Evidence) -> Iterator[Cause]:
    first = evidence.comparison.first_large()
    models = evidence.many.record.models
    # The loss of a step may differ by a state that the same step has written.
    later = [
        each
        for each in evidence.comparison.differences
        if each.is_large and first and each.quantity.step == first[0].quantity.step
        if each.quantity.kind == "weights"
    ]
    most = sorted(later, key=lambda each: -each.value)[:1]
    for difference in [*first, *most]:
        quantity = difference.quantity
        if quantity.kind != "weights" or quantity.model < 0:
            continue
        for layer in models[quantity.model].layers:
            is_its = quantity.name.startswith(f"{layer.path}/") or f"/{layer.name}/" in (
                f"/{quantity.name}"
            )
            if layer.is_custom and is_its and layer.site is not None:
                yield cause_of(
                    "layer state",
                    f"{layer.name} ({layer.kind}) computes with the rows of one replica",
                    f"{quantity.name} differs first, at step {quantity.step}",
                    layer.site,
                    is_proven=False,
                )
                return


def _metrics_only(evidence: Evidence) -> Iterator[Cause]:
    large = {d.quantity.kind for d in evidence.comparison.differences if d.is_large}
    if not large or large & {"weights", "optimizer"}:
        return
    first = evidence.comparison.first_large()[0].quantity
    many = evidence.many.record
    sites = [model.compile_site for model in trained_models(many) if model.compile_site is not None]
    yield cause_of(
        "metric",
        f"{first.name!r} is computed in another way on replicas; the weights are the same",
        f"it differs first at step {first.step}",
        sites[0] if sites else site_of_training(many),
        is_proven=False,
    )


def _differing_replicas(evidence: Evidence) -> Iterator[Cause]:
    many = evidence.many.record
    if many.replicas_differ:
        yield Cause(
            "replicas differ",
            "the program changes a value on one replica only",
            many.replicas_differ,
            "Change it in a callback or before training, on all replicas.",
            site_of_training(many),
        )


_OTHERS = (
    _random_ops,
    _torch_batch_norm,
    _claimed,
    _loop,
    _stateful,
    _layer_state,
    _metrics_only,
    _differing_replicas,
)


def _unknown(evidence: Evidence) -> Cause:
    many = evidence.many.record
    own = [site for model in trained_models(many) for site in model.own_methods.values()]
    if own:
        return cause_of(
            "train step",
            "the program's own step depends on how the rows of a batch are split",
            first_difference(evidence),
            own[0],
            is_proven=False,
        )
    return Cause(
        "unknown",
        "no cause was found that `unisono verify` knows",
        first_difference(evidence),
        "If the program has nothing that depends on single replicas, this is a bug of unisono: "
        "please report it, with the output of --json.",
        site_of_training(many),
        is_proven=False,
    )


def _keyword_site(record: ProgramRecord, name: str) -> Site | None:
    return next(source.keywords(record.files, name), None)


def _loss_site(record: ProgramRecord) -> Site | None:
    return next(source.calls(record.files, {"gradient", "backward"}), None)


def _update_ratio(one: ProgramRecord, many: ProgramRecord) -> float | None:
    """By what number the first update, or the optimizer's first moments, are larger on replicas."""
    if not one.steps or not many.steps:
        return None
    ratios: list[Any] = []
    for mine, theirs in zip(
        (one.steps[0], *one.steps[0].others), (many.steps[0], *many.steps[0].others), strict=False
    ):
        if mine.model < 0 or theirs.model < 0:
            continue
        start = one.models[mine.model].start
        ratios += [
            _ratio(after - before, other - before)
            for before, after, other in zip(start, mine.weights, theirs.weights, strict=False)
            if after.dtype.kind == "f" and after.shape == other.shape == before.shape
        ]
        names = one.models[mine.model].optimizer_variables
        for name, first, second in zip(names, mine.optimizer, theirs.optimizer, strict=False):
            if "momentum" in name and first.dtype.kind == "f" and first.shape == second.shape:
                ratios.append(_ratio(first, second))
    found = [ratio for ratio in ratios if ratio is not None and not np.isclose(ratio, 1, rtol=0.02)]
    return float(np.median(found)) if found else None


def _ratio(first: Any, second: Any) -> float | None:
    first, second = np.asarray(first, "float64"), np.asarray(second, "float64")
    largest = np.abs(first).max(initial=0.0)
    is_clear = np.abs(first) > 0.1 * largest
    if not largest or not is_clear.any():
        return None
    ratios = second[is_clear] / first[is_clear]
    is_constant = np.std(ratios) <= _RATIO_SPREAD * abs(np.mean(ratios))
    return float(np.mean(ratios)) if is_constant else None
