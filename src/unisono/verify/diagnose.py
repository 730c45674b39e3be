"""Why runs differ: from what they recorded, and from runs in which one thing is changed."""

from collections.abc import Iterator

from unisono.verify.causes import Cause
from unisono.verify.computation import computation_causes
from unisono.verify.evidence import (
    Evidence,
    cause_of,
    differing_data,
    first_other_batch,
    site_of_training,
    starts_differ,
)
from unisono.verify.inputs import (
    MADE,
    input_causes,
    rank_causes,
    seed_causes,
    seed_causes_by_rank,
)
from unisono.verify.records import ProgramRecord, RandomUse
from unisono.verify.run import ChildRun


def explain(evidence: Evidence) -> list[Cause]:
    """The causes of a difference between one device and replicas; the surest first."""
    one, many = evidence.one.record, evidence.many.record
    found = [
        *rank_causes(evidence.many),
        *seed_causes(one, many, "differs with the number of replicas"),
    ]
    found += input_causes(evidence)
    if not found:
        found += computation_causes(evidence)
    return found


def explain_noise(one: ProgramRecord, again: ProgramRecord) -> list[Cause]:
    """The causes of a difference between two runs on one device."""
    found = list(seed_causes(one, again, "differs from run to run"))
    unseeded = [use for use in one.random if use.seed is None and use.what != "shuffle"]
    shuffles = [use for use in one.random if use.seed is None and use.what == "shuffle"]
    arrays = differing_data(one, again)
    is_data_other = bool(arrays) or first_other_batch(one, again) is not None
    shown = (
        f"{arrays[0]} has other values in each run"
        if arrays
        else "the batches differ from run to run"
        if is_data_other
        else "two runs on one device differ"
    )
    for use in unseeded:
        found.append(
            cause_of(
                "unseeded data", f"the program {MADE[use.what]} without a seed", shown, use.site
            )
        )
    if not unseeded and is_data_other:
        for use in shuffles:
            found.append(
                cause_of("shuffle", "the program shuffles without a seed", shown, use.site)
            )
    if not found and starts_differ(one, again):
        found.append(
            Cause(
                "initial weights",
                "the model begins with other weights in each run",
                "the variables differ before the first step",
                "Make the model after keras.utils.set_random_seed, and load no file that the "
                "program itself has written.",
                site_of_training(one),
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
                site_of_training(one),
                is_proven=False,
            )
        )
    return found


def explain_failure(run: ChildRun) -> list[Cause]:
    """Why a program that runs on one device fails on replicas."""
    records = run.records
    failed = [r for r in records if r.error and r.error_type != "PeerLostError"] or [
        r for r in records if r.error
    ]
    ranks = list(rank_causes(run))
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
        site = first.error_site or site_of_training(first)
        said = message.split(". ")[0]
        return [
            *seed_causes_by_rank(records),
            cause_of(
                "data by process", "the program gives its processes different data", said, site
            ),
        ]
    if first.error_type == "DisagreementError":
        return ranks or [
            cause_of(
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


def notes_on_randomness(record: ProgramRecord) -> Iterator[RandomUse]:
    """Shuffles that two plain runs of the program would do in different orders."""
    seeds = any("seed" in use.what for use in record.random)
    for use in record.random:
        if use.what == "shuffle" and use.seed is None and not seeds:
            yield use
