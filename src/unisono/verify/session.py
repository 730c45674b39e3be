"""The runs of one `unisono verify`, in order, and the verdict.

One device twice, then the replicas. Only if these differ by more than the contract allows, one
device runs once more with weights changed in their last bits, which shows how much of it is
rounding; then the causes are looked for.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.devices import format_replicas
from unisono.verify.causes import Cause
from unisono.verify.compare import CONTRACT, MOST_NOISE, Comparison, Quantity, compare
from unisono.verify.diagnose import (
    explain,
    explain_failure,
    explain_noise,
    notes_on_randomness,
)
from unisono.verify.evidence import Evidence
from unisono.verify.records import ProgramRecord
from unisono.verify.run import ChildRun, Runner, Variant

SAME, DIFFERS, NOTHING = 0, 1, 2
"""Exit codes: replicas give what one device gives; they do not; nothing could be compared."""
_ONE_PROCESS_EACH = "runs in one process per replica"


@dataclass(frozen=True)
class Options:
    """What is compared."""

    num_replicas: int = 2
    num_steps: int = 20
    has_processes: bool = False
    is_exact: bool = False
    has_same_batch: bool = False
    """Whether the program scales its batch with the replicas, and one device gets that batch."""
    timeout_s: float = 600.0
    seed: int = 1234


@dataclass
class Verification:
    """The outcome of a verification."""

    code: int
    verdict: str
    program: list[str]
    options: Options
    comparison: Comparison | None = None
    noise: Comparison | None = None
    rounding: Comparison | None = None
    causes: list[Cause] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    record: ProgramRecord = field(default_factory=ProgramRecord)
    """Of the replicas."""
    output: str = ""
    """What the program printed, where it failed."""


def verify(
    program: Sequence[str], options: Options, tell: Callable[[str], None] = lambda text: None
) -> Verification:
    """Run a program on one device and on replicas, and compare; `tell` is told the progress."""
    runner = Runner(
        program, num_steps=options.num_steps, seed=options.seed, timeout_s=options.timeout_s
    )
    return VerifySession(list(program), options, runner.run, tell).result()


class VerifySession:
    """One verification, however its runs are made."""

    def __init__(
        self,
        program: list[str],
        options: Options,
        run: Callable[[Variant], ChildRun],
        tell: Callable[[str], None],
    ) -> None:
        self._program = program
        self._options = options
        self._make_run = run
        self._tell = tell
        self._notes: list[str] = []
        claims = options.num_replicas if options.has_same_batch else None
        self._one = Variant(is_exact=options.is_exact, claims=claims)
        self._many = Variant(
            options.num_replicas, has_processes=options.has_processes, is_exact=options.is_exact
        )

    def result(self) -> Verification:
        one = self._run(self._one, "one device")
        if one.has_failed:
            return self._failed(one)
        if not one.record.steps:
            return self._nothing(one)
        again = self._run(self._one, "one device again: the noise floor")
        if again.has_failed:
            return self._failed(again)
        many = self._run_replicas()
        if many.has_failed:
            return self._failed_on_replicas(many)
        if (nothing := self._without_replicas(many)) is not None:
            return nothing
        return self._compared(one, again, many)

    # -- runs ----------------------------------------------------------------------------------

    def _run(self, variant: Variant, what: str) -> ChildRun:
        self._tell(what)
        return self._make_run(variant)

    def _run_replicas(self) -> ChildRun:
        run = self._run(self._many, self._names())
        if run.has_failed and _ONE_PROCESS_EACH in run.record.error_message:
            self._many = dataclasses.replace(self._many, has_processes=True)
            self._notes.append(
                "A custom training loop on torch has one process per replica: compared as with "
                "--processes."
            )
            run = self._run(self._many, self._names())
        return run

    def _names(self) -> str:
        names = format_replicas(self._options.num_replicas)
        return f"{names} in processes" if self._many.has_processes else names

    # -- results -------------------------------------------------------------------------------

    def _failed(self, run: ChildRun) -> Verification:
        why = (
            f"did not end within {self._options.timeout_s:g} seconds (--timeout)"
            if run.has_timed_out
            else f"fails on one device with {run.record.error_type or f'exit code {run.code}'}"
        )
        result = self._result(NOTHING, f"Nothing was compared: the program {why}.", run)
        return dataclasses.replace(result, output=run.record.error or run.output)

    def _nothing(self, run: ChildRun) -> Verification:
        return self._result(
            NOTHING,
            "Nothing was compared: the program trains no model that unisono sees. It records "
            "calls of fit and train_on_batch, and loops over strategy.distribute_dataset.",
            run,
        )

    def _without_replicas(self, many: ChildRun) -> Verification | None:
        record = many.record
        trained = [record.models[step.model] for step in record.steps if step.model >= 0]
        is_parallel = any(model.is_parallel for model in trained) or record.num_distributed
        if is_parallel or record.world_size > 1 or self._options.num_replicas == 1:
            return None
        return self._result(
            NOTHING,
            "Nothing was compared: the program uses unisono, but no model that it trains is on "
            "replicas. Call unisono.parallel(model) for the model that is trained, or build and "
            "compile it under strategy.scope().",
            many,
        )

    def _failed_on_replicas(self, many: ChildRun) -> Verification:
        verdict = (
            f"{self._names().capitalize()} do not give what 1 gives: the program runs on one "
            "device and fails on replicas."
        )
        if many.has_timed_out:
            verdict = (
                f"The program ends on one device, and not on {self._names()} within "
                f"{self._options.timeout_s:g} seconds (--timeout)."
            )
        failed = next((r for r in many.records if r.error), many.record)
        result = self._result(DIFFERS, verdict, many)
        return dataclasses.replace(
            result, causes=explain_failure(many), output=failed.error or many.output
        )

    def _compared(self, one: ChildRun, again: ChildRun, many: ChildRun) -> Verification:
        noise = compare(one.record, again.record)
        limit = max((CONTRACT[m.dtype] for m in one.record.models), default=CONTRACT["float32"])
        if noise.structure or noise.largest_of_all() > MOST_NOISE * limit:
            result = self._result(
                DIFFERS,
                "Two runs on one device differ already, by "
                f"{_number(noise.largest_of_all())}: nothing can be said about replicas.",
                many,
            )
            causes = explain_noise(one.record, again.record)
            return dataclasses.replace(result, noise=noise, causes=causes)
        comparison = compare(one.record, many.record, noise=noise)
        rounding = None
        if not comparison.is_same and not comparison.structure:
            perturbed = self._run(
                dataclasses.replace(self._one, perturbs=True),
                "one device with other last bits: how much rounding grows",
            )
            if not perturbed.has_failed:
                rounding = compare(one.record, perturbed.record)
                comparison = compare(one.record, many.record, noise=noise, rounding=rounding)
        result = self._result(*self._verdict(comparison, noise, rounding), many)
        result = dataclasses.replace(result, comparison=comparison, noise=noise, rounding=rounding)
        if comparison.is_same and many.record.replicas_differ:
            result.code = DIFFERS
            result.verdict = f"The replicas differ from each other. {many.record.replicas_differ}"
        elif not comparison.is_same:
            self._tell("the cause")
            evidence = Evidence(
                one, again, many, noise, comparison, rounding, lambda v: self._run(v, _about(v))
            )
            result.causes = explain(evidence)
        return result

    def _verdict(
        self, comparison: Comparison, noise: Comparison, rounding: Comparison | None
    ) -> tuple[int, str]:
        names = self._names()
        floor = f"two runs of one device differ by {_number(noise.largest_of_all())}"
        if comparison.is_same:
            text = f"{names} give what 1 gives ({_number(comparison.largest_of_all())}; {floor}"
            if rounding is not None:
                grown = _number(rounding.largest_of_all())
                text += f"; this net amplifies rounding: last bits of weights grow to {grown}"
            return SAME, f"{text})."
        first = comparison.first_large()
        if not first:
            return DIFFERS, f"{names} do something else than 1: {comparison.structure[0]}."
        quantity = first[0].quantity
        return DIFFERS, (
            f"{names} do not give what 1 gives: {_what(quantity)} at step {quantity.step} differs "
            f"first, by {_number(first[0].value)} ({floor})."
        )

    def _result(self, code: int, verdict: str, run: ChildRun) -> Verification:
        notes = list(self._notes)
        if run.record.adopted:
            notes.append(
                "The program does not use unisono: unisono.parallel was applied to each model at "
                f"its first call ({run.record.adopted[0]})."
            )
        notes += [
            f"{use.site}: a shuffle without a seed. Here it has the seed of `unisono verify`; two "
            "plain runs differ. Give it one, or call keras.utils.set_random_seed(0) before it."
            for use in notes_on_randomness(run.record)
        ]
        notes += run.record.notes
        return Verification(
            code, verdict, self._program, self._options, notes=notes, record=run.record
        )


def _what(quantity: Quantity) -> str:
    if quantity.kind == "weights":
        return quantity.name
    if quantity.kind == "optimizer":
        return f"the optimizer's {quantity.name}"
    kind = {"loss": "", "metrics": "", "evaluate": " of evaluate", "predict": " of predict"}
    return f"{quantity.name}{kind.get(quantity.kind, '')}"


def _about(variant: Variant) -> str:
    """What a run is for, in words."""
    if variant.claims:
        return "one device that is told the number of replicas"
    if variant.forces_sync:
        return "replicas with synchronized batch norm"
    if variant.is_exact:
        return "with the random numbers of one device"
    return "another run"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}".replace("e-0", "e-")
