"""Why runs differ: from what they recorded, and from runs in which one thing is changed.

Differences of what goes into training (seeds, data, arguments, learning rate) are looked at first:
they explain everything after them. What remains is a computation that depends on how the rows of a
batch are split. Where a cause can be switched off, a run without it shows whether it is the only
one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unisono.verify import source
from unisono.verify.causes import REMEDIES, Cause
from unisono.verify.compare import Comparison, compare
from unisono.verify.records import Call, ModelFacts, RandomUse, Record, Site
from unisono.verify.run import Run, Variant

_HYPERPARAMETERS = ("batch_size", "steps_per_epoch", "epochs", "validation_batch_size", "steps")
_REPLICA_NAMES = {"num_replicas_in_sync", "num_replicas", "world_size", "local_size"}
_RATIO_SPREAD = 0.02


@dataclass
class Evidence:
    """The runs that were made, and a way to make another."""

    one: Run
    again: Run
    many: Run
    noise: Comparison
    comparison: Comparison
    rounding: Comparison | None
    run: Callable[[Variant], Run]

    @property
    def num_replicas(self) -> int:
        return self.many.variant.num_replicas

    def agrees_with(self, other: Run, one: Run | None = None) -> Comparison | None:
        """The comparison with a further run, if that agrees; None where it does not."""
        if other.has_failed:
            return None
        base = (one or self.one).record
        found = compare(base, other.record, noise=self.noise, rounding=self.rounding)
        return found if found.is_same else None


def explain(evidence: Evidence) -> list[Cause]:
    """The causes of a difference between one device and replicas; the surest first."""
    one, many = evidence.one.record, evidence.many.record
    found = [*_ranks(evidence.many), *_seeds(one, many, "differs with the number of replicas")]
    found += _inputs(evidence)
    if not found:
        found += _computation(evidence)
    return found


def explain_noise(one: Record, again: Record) -> list[Cause]:
    """The causes of a difference between two runs on one device."""
    found = list(_seeds(one, again, "differs from run to run"))
    unseeded = [use for use in one.random if use.seed is None and use.what != "shuffle"]
    shuffles = [use for use in one.random if use.seed is None and use.what == "shuffle"]
    arrays = _differing_data(one, again)
    is_data_other = bool(arrays) or _first_other_batch(one, again) is not None
    shown = (
        f"{arrays[0]} has other values in each run"
        if arrays
        else "the batches differ from run to run"
        if is_data_other
        else "two runs on one device differ"
    )
    for use in unseeded:
        found.append(
            _cause(
                "unseeded data", f"the program {_MADE[use.what]} without a seed", shown, use.site
            )
        )
    if not unseeded and is_data_other:
        for use in shuffles:
            found.append(_cause("shuffle", "the program shuffles without a seed", shown, use.site))
    if not found and _starts_differ(one, again):
        found.append(
            Cause(
                "initial weights",
                "the model begins with other weights in each run",
                "the variables differ before the first step",
                "Make the model after keras.utils.set_random_seed, and load no file that the "
                "program itself has written.",
                _site_of_training(one),
            )
        )
    if not found:
        found.append(
            Cause(
                "not repeatable",
                "two runs on one device differ",
                "the same weights and data give other results" if not is_data_other else shown,
                "Look for random numbers from another source, for the time or for the environment "
                "in the program; on GPUs, switch on deterministic operations.",
                _site_of_training(one),
                is_proven=False,
            )
        )
    return found


_MADE = {
    "numpy": "makes a NumPy generator",
    "python": "makes a generator of Python's random",
}


def explain_failure(run: Run) -> list[Cause]:
    """Why a program that runs on one device fails on replicas."""
    records = run.records
    failed = [r for r in records if r.error and r.error_type != "PeerLostError"] or [
        r for r in records if r.error
    ]
    ranks = list(_ranks(run))
    if not failed:
        text = "it did not end in time" if run.has_timed_out else "its processes ended"
        return ranks or [
            Cause(
                "failure",
                "the program does not come to its end on replicas",
                text,
                "See the output of the program.",
                None,
                is_proven=False,
            )
        ]
    first = failed[0]
    message = first.error_message
    if "different rows" in message or "global batches of" in message:
        site = first.error_site or _site_of_training(first)
        said = message.split(". ")[0]
        return [
            *_seeds_by_rank(records),
            _cause("data by process", "the program gives its processes different data", said, site),
        ]
    if first.error_type == "DisagreementError":
        return ranks or [
            _cause(
                "one rank",
                "the program makes other calls in one process",
                message,
                first.error_site,
            )
        ]
    return [
        Cause(
            "failure",
            f"the program fails on replicas with {first.error_type}",
            message.strip().splitlines()[0] if message.strip() else first.error_type,
            "See the traceback.",
            first.error_site,
        )
    ]


def _cause(
    key: str, what: str, evidence: str, site: Site | None, *, is_proven: bool = True
) -> Cause:
    return Cause(key, what, evidence, REMEDIES[key], site, is_proven)


# -- what goes into training ----------------------------------------------------------------------


def _seeds(one: Record, other: Record, how: str) -> Iterator[Cause]:
    for mine, theirs in zip(one.random, other.random, strict=False):
        if (mine.what, mine.site) == (theirs.what, theirs.site) and mine.seed != theirs.seed:
            yield _cause(
                "seed",
                f"the program gives {mine.what} a seed that {how}",
                f"{mine.seed}, and {theirs.seed}",
                mine.site,
            )


def _seeds_by_rank(records: list[Record]) -> Iterator[Cause]:
    for other in records[1:]:
        yield from _seeds(records[0], other, "differs from process to process")
        return


def _inputs(evidence: Evidence) -> list[Cause]:
    """Arguments, hyperparameters and data that are not those of one device."""
    one, many = evidence.one.record, evidence.many.record
    found: list[Cause] = []
    rows = _rows(one), _rows(many)
    for mine, theirs in zip(one.calls, many.calls, strict=False):
        found += _arguments(mine, theirs, many)
    is_batch_known = any(cause.key == "global batch" for cause in found)
    if not is_batch_known and rows[0] and rows[1] and rows[0] != rows[1]:
        site = _scaling_site(many) or _site_of_training(many)
        seen = f"global batches of {rows[0][0]} rows, and of {rows[1][0]}"
        found.append(_cause("global batch", "the program scales its global batch", seen, site))
    found += _optimizers(one, many)
    if any(cause.key in ("global batch", "learning rate") for cause in found):
        found = _tried_with_claim(evidence, found)
    if not found:
        found += _data(evidence)
    if not found and _starts_differ(one, many):
        found.append(
            Cause(
                "initial weights",
                "the model begins with other weights on replicas",
                "the variables differ before the first step",
                "Make the model in the same way for any number of replicas, after "
                "keras.utils.set_random_seed.",
                _scaling_site(many) or _site_of_training(many),
            )
        )
    return found


def _arguments(mine: Call, theirs: Call, many: Record) -> Iterator[Cause]:
    if mine.name != theirs.name:
        return
    for name in {**mine.arguments, **theirs.arguments}:
        first, second = mine.arguments.get(name), theirs.arguments.get(name)
        if first == second or isinstance(first, list) or isinstance(second, list):
            continue
        key = "global batch" if name == "batch_size" else "arguments"
        what = (
            "the program scales its global batch with the number of replicas"
            if name == "batch_size"
            else f"the program gives {mine.name} another {name} on replicas"
        )
        shown = f"{name}={first!r}, and {name}={second!r}"
        scaling = _scaling_site(many) if key == "global batch" else None
        if scaling is not None and theirs.site is not None:
            shown += f" in line {theirs.site.line}"
        yield _cause(key, what, shown, scaling or theirs.site)


def _optimizers(one: Record, many: Record) -> Iterator[Cause]:
    for mine, theirs in zip(one.models, many.models, strict=False):
        site = theirs.optimizer_site or theirs.compile_site
        for name in {**mine.optimizer, **theirs.optimizer}:
            first, second = mine.optimizer.get(name), theirs.optimizer.get(name)
            if first == second or name == "name":
                continue
            key = "learning rate" if name == "learning_rate" else "arguments"
            what = f"the program gives the optimizer another {name.replace('_', ' ')} on replicas"
            shown = f"{name}={_short(first)}, and {name}={_short(second)}"
            yield _cause(key, what, shown, site)
            return
    for number, (step, other) in enumerate(zip(one.steps, many.steps, strict=False), start=1):
        rates = step.learning_rate, other.learning_rate
        if None not in rates and not np.isclose(rates[0], rates[1], rtol=1e-4, atol=0):  # type: ignore[arg-type]
            site = many.models[other.model].optimizer_site
            yield _cause(
                "learning rate",
                "the program changes the learning rate in another way on replicas",
                f"{rates[0]:g}, and {rates[1]:g}, at step {number}",
                _callback_site(many) or site,
            )
            return


def _tried_with_claim(evidence: Evidence, found: list[Cause]) -> list[Cause]:
    """Whether one device that is told the number of replicas gives what they give."""
    variant = replace(evidence.one.variant, claims=evidence.num_replicas)
    told = evidence.run(variant)
    agreed = None if told.has_failed else compare(told.record, evidence.many.record)
    if agreed is None or not agreed.is_same:
        return found
    shown = f"with the same, one device and replicas agree ({agreed.largest_of_all():.0e})"
    return [replace(cause, evidence=f"{cause.evidence}; {shown}") for cause in found]


def _data(evidence: Evidence) -> Iterator[Cause]:
    one, many = evidence.one.record, evidence.many.record
    arrays = _differing_data(one, many)
    large = evidence.comparison.first_large()
    until = large[0].quantity.step if large else None
    batch = None if arrays else _first_other_batch(one, many, until)
    if not arrays and batch is None:
        return
    shown = (
        f"{arrays[0]} has other values on replicas"
        if arrays
        else f"the global batch of step {batch} has other values on replicas"
    )
    unseeded = [use for use in many.random if use.seed is None]
    for use in unseeded:
        key = "shuffle" if use.what == "shuffle" else "unseeded data"
        what = _MADE.get(use.what, "shuffles")
        yield _cause(key, f"the program {what} without a seed", shown, use.site)
    if not unseeded:
        site = _scaling_site(many) or _site_of_training(many)
        yield _cause("arguments", "the program trains on other data on replicas", shown, site)


# -- processes ------------------------------------------------------------------------------------


def _ranks(run: Run) -> Iterator[Cause]:
    """What one process does and another does not."""
    records = [record for record in run.records if record.world_size > 1]
    for other in records[1:]:
        first = records[0]
        pairs = zip(first.calls, other.calls, strict=False)
        for mine, theirs in pairs:
            if mine.name != theirs.name:
                yield _cause(
                    "one rank",
                    "the program makes other calls in one process",
                    f"rank {first.rank} calls {mine.name}, rank {other.rank} {theirs.name}",
                    mine.site,
                )
                return
        longer = max((first, other), key=lambda record: len(record.calls))
        if len(first.calls) != len(other.calls):
            extra = longer.calls[min(len(first.calls), len(other.calls))]
            yield _cause(
                "one rank",
                f"the program calls {extra.name} in one process only",
                f"rank {longer.rank} calls it, the other does not",
                extra.site,
            )
            return
        yield from _states_by_rank(first, other)


def _states_by_rank(first: Record, other: Record) -> Iterator[Cause]:
    for number, (mine, theirs) in enumerate(zip(first.steps, other.steps, strict=False), start=1):
        if mine.learning_rate != theirs.learning_rate:
            yield _cause(
                "one rank",
                "the program changes the learning rate in one process only",
                f"step {number}: {mine.learning_rate:g} on rank {first.rank}, "
                f"{theirs.learning_rate:g} on rank {other.rank}",
                _callback_site(first) or _site_of_training(first),
            )
            return


# -- the computation ------------------------------------------------------------------------------


def _computation(evidence: Evidence) -> list[Cause]:
    many = evidence.many.record
    found: list[Cause] = []
    for detect in (
        _batch_norm,
        _random_layers,
        _random_ops,
        _torch_batch_norm,
        _undecided_loss,
        _mixing,
        _loop,
        _stateful,
        _layer_state,
        _metrics_only,
    ):
        found += detect(evidence)
        if any(cause.is_proven for cause in found):
            break
    if not found and many.replicas_differ:
        found.append(
            Cause(
                "replicas differ",
                "the program changes a value on one replica only",
                many.replicas_differ,
                "Change it in a callback or before training, on all replicas.",
                _site_of_training(many),
            )
        )
    return found or [_unknown(evidence)]


def _random_layers(evidence: Evidence) -> Iterator[Cause]:
    many = evidence.many.record
    if many.backend == "jax" or evidence.many.variant.is_exact:
        return
    layers = [layer for model in _trained(many) for layer in model.layers if layer.is_random]
    own = [use for use in many.draws if use.what.startswith("keras.")]
    if layers or own:
        names = [layer.kind for layer in layers] or [use.what for use in own]
        sites = [layer.site for layer in layers] or [use.site for use in own]
        agreed = _tried_exactly(evidence)
        yield _cause(
            "random layer",
            f"{', '.join(dict.fromkeys(names))}: replicas draw random numbers of their own on "
            f"{_TITLES.get(many.backend, many.backend)}",
            "they also differ with those of one device, so it is not the only cause"
            if agreed is None
            else f"with those of one device they agree ({agreed.largest_of_all():.0e})",
            sites[0],
            is_proven=agreed is not None,
        )


def _random_ops(evidence: Evidence) -> Iterator[Cause]:
    """Random numbers of the framework itself, which have a state outside of Keras."""
    many = evidence.many.record
    for use in many.draws:
        if not use.what.startswith("keras."):
            yield _cause(
                "random op",
                f"{use.what} draws other random numbers on replicas",
                _first_words(evidence),
                use.site,
                is_proven=False,
            )
            return


def _tried_exactly(evidence: Evidence) -> Comparison | None:
    """The comparison with the random numbers of one device on replicas, if that agrees."""
    one = evidence.one
    if any(use.seed is None for use in one.record.random):
        one = evidence.run(replace(one.variant, is_exact=True))
    exact = evidence.run(replace(evidence.many.variant, is_exact=True))
    return evidence.agrees_with(exact, one)


_TITLES = {"tensorflow": "TensorFlow", "torch": "torch"}


def _batch_norm(evidence: Evidence) -> Iterator[Cause]:
    models = [m for m in _trained(evidence.many.record) if not m.is_sync]
    layers = [layer for model in models for layer in model.layers if layer.is_batch_norm]
    if not layers:
        return
    agreed = evidence.agrees_with(evidence.run(replace(evidence.many.variant, forces_sync=True)))
    shown = (
        f"with it synchronized they agree ({agreed.largest_of_all():.0e})"
        if agreed is not None
        else f"{layers[0].name} is not synchronized"
    )
    keyword = _keyword_site(evidence.many.record, "sync_batch_norm")
    yield _cause(
        "batch norm",
        "batch norm is kept per replica (sync_batch_norm=False)",
        shown,
        keyword or layers[0].site,
        is_proven=agreed is not None,
    )


def _torch_batch_norm(evidence: Evidence) -> Iterator[Cause]:
    for model in _trained(evidence.many.record):
        for layer in model.layers:
            if layer.inner_batch_norms:
                yield _cause(
                    "torch batch norm",
                    f"{layer.name} has a batch norm of torch ({layer.inner_batch_norms[0]}), "
                    "which is kept per replica",
                    _first_words(evidence),
                    layer.site,
                    is_proven=layer.name in _first_words(evidence),
                )
                return


def _undecided_loss(evidence: Evidence) -> Iterator[Cause]:
    many = evidence.many.record
    for text in many.warnings:
        if "neither a mean nor a sum" in text or "could not be tried" in text:
            said = text.split(". ")[0].rpartition(": ")[2]
            own = [site for m in _trained(many) for site in m.own_methods.values()]
            adding = list(source.calls(many.files, {"add_loss"}))
            sites = adding if "add_loss" in said and adding else own or adding
            yield _cause(
                "loss",
                "the loss is neither a mean nor a sum over the rows of a batch",
                said,
                sites[0] if sites else _site_of_training(many),
            )
            return


def _mixing(evidence: Evidence) -> Iterator[Cause]:
    """What the model computes from other rows than its own, by a try on halves of a batch."""
    if evidence.many.record.backend == "jax":
        return
    for model in _trained(evidence.one.record):
        layer = next((one for one in model.layers if one.name == model.mixing.layer), None)
        if layer is not None:
            yield _cause(
                "layer",
                f"{layer.name} ({layer.kind}) computes with other rows of the batch, of which a "
                "replica has only its own",
                "on the halves of a batch it gives other rows than on the whole",
                layer.site,
            )
        elif model.mixing.is_loss:
            own = list(model.own_methods.values())
            yield _cause(
                "loss",
                "the loss is neither a mean nor a sum over the rows of a batch",
                "that of a batch is neither the mean nor the sum of those of its halves",
                own[0] if own else model.compile_site,
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
        yield _cause("loop data", "the loop trains every replica on the same rows", shown, site)
        return
    clips = list(source.calls(many.files, source.CLIPPING))
    reduces = any(True for _ in source.calls(many.files, {"reduce_gradients"}))
    if clips and not reduces and many.backend != "jax":
        yield _cause(
            "loop gradients",
            "the loop clips the gradients of one replica's rows",
            _first_words(evidence),
            clips[0],
        )
        return
    ratio = _update_ratio(one, many)
    count = evidence.num_replicas
    if ratio is not None and any(np.isclose(ratio, r, rtol=0.05) for r in (count, 1 / count)):
        sites = list(source.calls(many.files, {"apply_gradients", "apply", "compute_average_loss"}))
        yield _cause(
            "loop loss",
            "the loop's loss is not that of the global batch",
            f"the first gradient is {ratio:.2f} times that of one device",
            _loss_site(many) or (sites[0] if sites else site),
        )


def _stateful(evidence: Evidence) -> Iterator[Cause]:
    for model in _trained(evidence.many.record):
        for layer in model.layers:
            if layer.is_stateful and evidence.many.record.backend != "jax":
                yield _cause(
                    "stateful",
                    f"{layer.name} is stateful, with one state per row of the batch",
                    _first_words(evidence),
                    layer.site,
                    is_proven=False,
                )
                return


def _layer_state(evidence: Evidence) -> Iterator[Cause]:
    first = evidence.comparison.first_large()
    models = evidence.many.record.models
    for difference in first:
        quantity = difference.quantity
        if quantity.kind != "weights" or quantity.model < 0:
            continue
        for layer in models[quantity.model].layers:
            is_its = quantity.name.startswith(f"{layer.path}/") or f"/{layer.name}/" in (
                f"/{quantity.name}"
            )
            if layer.is_custom and is_its and layer.site is not None:
                yield _cause(
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
    sites = [model.compile_site for model in _trained(many) if model.compile_site is not None]
    yield _cause(
        "metric",
        f"{first.name!r} is computed in another way on replicas; the weights are the same",
        f"it differs first at step {first.step}",
        sites[0] if sites else _site_of_training(many),
        is_proven=False,
    )


def _unknown(evidence: Evidence) -> Cause:
    many = evidence.many.record
    own = [site for model in _trained(many) for site in model.own_methods.values()]
    if own:
        return _cause(
            "train step",
            "the program's own step depends on how the rows of a batch are split",
            _first_words(evidence),
            own[0],
            is_proven=False,
        )
    return Cause(
        "unknown",
        "no cause was found that `unisono verify` knows",
        _first_words(evidence),
        "If the program has nothing that depends on single replicas, this is a bug of unisono: "
        "please report it, with the output of --json.",
        _site_of_training(many),
        is_proven=False,
    )


# -- what was recorded ----------------------------------------------------------------------------


def _trained(record: Record) -> list[ModelFacts]:
    parts = [part for step in record.steps for part in (step, *step.others)]
    return [record.models[i] for i in dict.fromkeys(p.model for p in parts) if i >= 0]


def _rows(record: Record) -> list[int]:
    return [step.num_rows for step in record.steps if step.num_rows]


def _differing_data(one: Record, other: Record) -> list[str]:
    """Arguments that are arrays and have other values, in words."""
    found = []
    for mine, theirs in zip(one.calls, other.calls, strict=False):
        for name in ("x", "y", "sample_weight", "validation_data"):
            first, second = mine.arguments.get(name), theirs.arguments.get(name)
            if isinstance(first, list) and first[0] == "array" and first != second:
                found.append(f"{name} of {mine.name}")
    return found


def _first_other_batch(one: Record, other: Record, until: int | None = None) -> int | None:
    """The first step whose batch differs; `until`: later ones are a consequence.

    Replicas draw fewer random numbers than one device from the generator that shuffles the next
    epoch.
    """
    done = 0
    for mine, theirs in zip(one.steps, other.steps, strict=False):
        done += mine.num_steps
        if until is not None and done > until:
            return None
        if None not in (mine.data, theirs.data) and mine.data != theirs.data:
            return done
    return None


def _starts_differ(one: Record, other: Record) -> bool:
    for mine, theirs in zip(one.models, other.models, strict=False):
        pairs = zip(mine.start, theirs.start, strict=False)
        if any(not np.array_equal(a, b, equal_nan=True) for a, b in pairs):
            return True
    return False


def _site_of_training(record: Record) -> Site | None:
    sites = [call.site for call in record.calls if call.name in ("fit", "train_on_batch")]
    found = [site for site in [*sites, *record.loop_sites] if site is not None]
    return found[0] if found else None


def _scaling_site(record: Record) -> Site | None:
    return next(source.mentions(record.files, _REPLICA_NAMES), None)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _callback_site(record: Record) -> Site | None:
    return next(source.mentions(record.files, {"learning_rate"}), None)


def _keyword_site(record: Record, name: str) -> Site | None:
    return next(source.keywords(record.files, name), None)


def _loss_site(record: Record) -> Site | None:
    return next(source.calls(record.files, {"gradient", "backward"}), None)


def _first_words(evidence: Evidence) -> str:
    first = evidence.comparison.first_large()
    if not first:
        return "; ".join(evidence.comparison.structure)
    quantity = first[0].quantity
    return f"{quantity.name} differs first, at step {quantity.step} (by {first[0].value:.0e})"


def _update_ratio(one: Record, many: Record) -> float | None:
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


def notes_on_randomness(record: Record) -> Iterator[RandomUse]:
    """Shuffles that two plain runs of the program would do in different orders."""
    seeds = any("seed" in use.what for use in record.random)
    for use in record.random:
        if use.what == "shuffle" and use.seed is None and not seeds:
            yield use
