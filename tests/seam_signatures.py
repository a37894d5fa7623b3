"""Freeze the seams between packages: members and signatures, with their owner's version.

`python tests/seam_signatures.py` rewrites tests/seams.toml. It fails if a seam changed since a
released version and the owner's minor version was not raised: see docs/versions.md.
"""

import importlib
import inspect
import json
import re
import sys
import tomllib
from typing import Any

from packages import ROOT, module_of, project_of

FILE = ROOT / "tests" / "seams.toml"
SEAMS = {
    "place": ("ms-data", "ms_data.streams.share:StreamPlace"),
    "reader": ("ms-data", "ms_data.corpus.reader:Reader"),
    "operators": ("ms-parallel", "ms_parallel.operators.protocol:Ops"),
    "training stream": ("ms-parallel", "ms_parallel.training.checkpoints:Stream"),
    "training events": ("ms-parallel", "ms_parallel.events:OnEvent"),
    "loss": ("ms-parallel", "ms_parallel.engine.loss:Loss"),
    "engine": ("ms-align", "ms_align.engines.protocol:Engine"),
    "step_report": ("ms-align", "ms_align.engines.protocol:StepReport"),
    "adapters": ("ms-align", "ms_align.engines.protocol:Adapters"),
    "generator": ("ms-align", "ms_align.generation.responses:Generator"),
    "reward": ("ms-align", "ms_align.rewards.scoring:Reward"),
    "tuning stream": ("ms-align", "ms_align.streams.protocol:Stream"),
    "tuning events": ("ms-align", "ms_align.events:OnEvent"),
}
"""Owner and location of each seam's Protocol."""


def members_of(location: str) -> list[str]:
    """Members of a Protocol with their signatures or types, sorted by name."""
    module, _, name = location.partition(":")
    protocol = getattr(importlib.import_module(module), name)
    members: dict[str, str] = {}
    for base in reversed(protocol.__mro__):
        if base.__module__ in ("typing", "builtins", "collections.abc"):
            continue
        for member, annotation in inspect.get_annotations(base).items():
            members[member] = f"{member}: {short_name(annotation)}"
        for member, value in vars(base).items():
            if isinstance(value, property) and value.fget is not None:
                returned = inspect.get_annotations(value.fget).get("return", "")
                members[member] = f"{member}: {short_name(returned)}"
            elif inspect.isfunction(value) and not is_private(member):
                members[member] = f"{member}{signature_of(value)}"
    return [members[member] for member in sorted(members) if not is_private(member)]


def is_private(member: str) -> bool:
    """Whether a member is private; special methods of protocols are not."""
    special = {"__call__", "__iter__", "__next__", "__len__"}
    return member.startswith("_") and member not in special


def signature_of(function: Any) -> str:
    """Format a signature independently of Python's version and of imports."""
    signature = inspect.signature(function)
    parts, star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        default = "" if parameter.default is parameter.empty else " = ..."
        annotation = (
            ""
            if parameter.annotation is parameter.empty
            else f": {short_name(parameter.annotation)}"
        )
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(
            parameter.kind, ""
        )
        parts.append(f"{prefix}{parameter.name}{annotation}{default}")
    return f"({', '.join(parts)}) -> {short_name(signature.return_annotation)}"


def short_name(annotation: Any) -> str:
    """Format a type with unqualified names."""
    if annotation is None:
        return "None"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def version_of(package: str) -> tuple[int, int]:
    """Major and minor version of a package."""
    first, second = str(project_of(package)["version"]).split(".")[:2]
    return int(first), int(second)


def is_released(package: str, version: tuple[int, int]) -> bool:
    """Whether a package's changelog has a release of this version."""
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    return bool(re.search(rf"^## {version[0]}\.{version[1]}\.", text, re.MULTILINE))


def frozen() -> dict[str, Any]:
    """Content of tests/seams.toml."""
    return tomllib.loads(FILE.read_text()) if FILE.exists() else {}


def version_error(
    seam: str, frozen_seam: dict[str, Any], members: list[str], *, released: bool
) -> str:
    """Reason why a seam cannot be frozen; empty if it can."""
    package, _ = SEAMS[seam]
    if (
        frozen_seam["members"] == members
        or not released
        or version_of(package) > tuple(frozen_seam["version"])
    ):
        return ""
    numbers = ".".join(map(str, frozen_seam["version"]))
    return f"the seam {seam!r} changed since {package} {numbers} was released; raise its version"


def main() -> int:
    """Write the file; return 1 if a version must be raised first."""
    frozen_seams, lines = frozen(), ["# Members of the seams, by tests/seam_signatures.py."]
    for seam, (package, location) in SEAMS.items():
        importlib.import_module(module_of(package))
        members, frozen_seam = members_of(location), frozen_seams.get(seam)
        released = frozen_seam is not None and is_released(package, tuple(frozen_seam["version"]))
        error = (
            version_error(seam, frozen_seam, members, released=released)
            if frozen_seam is not None
            else ""
        )
        if error:
            sys.stderr.write(f"{error}\n")
            return 1
        version = (
            list(frozen_seam["version"])
            if frozen_seam and frozen_seam["members"] == members
            else [*version_of(package)]
        )
        lines += ["", f"[{json.dumps(seam)}]", f"owner = {json.dumps(package)}"]
        lines += [f"version = {version}", "members = ["]
        lines += [f"    {json.dumps(member, ensure_ascii=False)}," for member in members] + ["]"]
    FILE.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
