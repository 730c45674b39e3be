"""What is installed, and what does not fit together."""

import importlib.metadata
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from unisono.backends import FRAMEWORKS
from unisono.doctor.results import Result, broken, failed, not_checked, works
from unisono.imports import newest_tested

if TYPE_CHECKING:
    from unisono.doctor.examination import Examination

_PACKAGES = {
    "keras": ("keras",),
    "jax": ("jax",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
    "torch": ("torch",),
}
_ROOTS = ("unisono", "keras", "jax", "jaxlib", "tensorflow", "tensorflow-cpu", "torch", "numpy")
# Those of frameworks, and those that two frameworks share and may want in different versions.
_FAMILIES = re.compile(r"(jax|nvidia|tensorflow|torch|triton)([-_.].*)?|ml[-_]dtypes")


def package_versions() -> dict[str, str]:
    """The packages that matter here, with their versions."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = str(distribution.metadata["Name"] or "").lower()
        if name in _ROOTS or _FAMILIES.fullmatch(name):
            found.setdefault(name, distribution.version)
    return dict(sorted(found.items()))


def check_versions(examination: "Examination") -> Iterator[Result]:
    """Keras and the backends are of versions that unisono is known to work with."""
    installed = {name: _version(*packages) for name, packages in _PACKAGES.items()}
    if examination.main not in FRAMEWORKS:
        yield broken(
            "backend",
            f"Keras is set to the backend {examination.main!r}, which cannot train",
            f"Set KERAS_BACKEND to one of {', '.join(FRAMEWORKS)}.",
        )
    elif examination.main not in examination.backends:
        others = examination.backends
        line = f"pip install {examination.main}"
        yield broken(
            "backend",
            f"Keras is set to {examination.main}, which is not installed",
            f"Set KERAS_BACKEND={others[0]}, or: {line}" if others else line,
        )
    wrong = list(_wrong_versions(installed))
    yield from wrong
    if not wrong:
        shown = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
        yield works("versions", f"{shown}: all known to work", versions=installed)


def _wrong_versions(installed: dict[str, str | None]) -> Iterator[Result]:
    for name, version in installed.items():
        if version is None:
            continue
        major, minor = newest_tested(name)
        lowest = _lowest(name)
        bound = f'"{name}>={lowest[0]}.{lowest[1]},<{major}.{minor + 1}"'
        fix = f"pip install {bound}"
        if _numbers(version) > (major, minor):
            yield broken(
                f"{name} {version}",
                f"newer than {name} {major}.{minor}, the newest that unisono was tested with",
                f"{fix}, or a newer unisono, or UNISONO_ANY_VERSION=1 to try it",
            )
        elif _numbers(version) < lowest:
            yield broken(
                f"{name} {version}",
                f"older than {lowest[0]}.{lowest[1]}, the oldest that works",
                fix,
            )


def check_requirements(examination: "Examination") -> Iterator[Result]:
    """What frameworks require of each other, and of the CUDA libraries, is what is installed."""
    try:
        from packaging.requirements import InvalidRequirement, Requirement
    except ImportError:
        yield not_checked(
            "requirements", "the package packaging is missing", "pip install packaging"
        )
        return
    versions = package_versions()
    wrong = []
    for package in versions:
        for text in importlib.metadata.requires(package) or ():
            try:
                wanted = Requirement(text)
            except InvalidRequirement:
                continue
            # Without its own extras: which of them were installed is not recorded.
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            found = _version(wanted.name)
            if found is None:
                wrong.append((package, str(wanted.name), "missing", str(wanted.specifier)))
            elif not wanted.specifier.contains(found, prereleases=True):
                wrong.append((package, str(wanted.name), found, str(wanted.specifier)))
    wrong += _plugin_mismatches(versions)
    for package, name, found, specifier in wrong:
        yield broken(
            f"{package} {versions[package]}",
            f"wants {name}{specifier}; found {found}",
            f'pip install "{name}{specifier}"',
        )
    for both in (("tensorflow", "tensorflow-cpu"), ("jax-cuda12-plugin", "jax-cuda13-plugin")):
        if all(name in versions for name in both):
            wrong.append((*both, "", ""))
            yield broken(
                f"{both[0]} and {both[1]}",
                "are both installed and overwrite or shadow each other",
                f"pip uninstall {both[0]} {both[1]}, then install the one that you want",
            )
    if not wrong:
        yield works(
            "requirements",
            f"{len(versions)} packages of Keras, the backends and CUDA fit together",
        )


def _plugin_mismatches(versions: dict[str, str]) -> list[tuple[str, str, str, str]]:
    """JAX's plugins, which must be of jaxlib's own version, though no requirement says so."""
    jaxlib = versions.get("jaxlib", "")
    return [
        ("jaxlib", name, version, f"=={jaxlib}")
        for name, version in versions.items()
        if re.fullmatch(r"jax-(cuda|rocm)\d+-(plugin|pjrt)", name) and version != jaxlib
    ]


def check_backends(examination: "Examination") -> Iterator[Result]:
    """Each backend can be imported, with Keras on top of it."""
    if not examination.backends:
        yield broken(
            "backends",
            "none of JAX, TensorFlow and torch is installed",
            'pip install "unisono[jax]"',
        )
    for backend in examination.backends:
        answer = examination.facts(backend)
        if build := answer.of("build"):
            facts = build[0]
            version = facts["version"]
            kind = f"CUDA {facts['cuda']}" if facts["cuda"] else "CPU build"
            kind = f"ROCm {facts['rocm']}" if facts["rocm"] else kind
        if not build or not answer.of("devices"):
            stage = "is imported" if not build else "starts with Keras"
            fix = f"Reinstall it: pip install --force-reinstall {backend}"
            yield failed(backend, answer, f"the process in which it {stage}", fix)
        else:
            seconds = f"{answer.seconds:.1f} s with a first computation"
            yield works(backend, f"{version} ({kind}) starts, {seconds}", **facts)


def _version(*packages: str) -> str | None:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _lowest(name: str) -> tuple[int, int]:
    """The oldest version by unisono's own requirements."""
    try:
        wanted = importlib.metadata.requires("unisono") or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    for text in wanted:
        found = re.match(rf"{name}\s*>=\s*([\d.]+)", text)
        if found:
            return _numbers(found[1])
    return (0, 0)
