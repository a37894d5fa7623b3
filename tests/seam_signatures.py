"""Freeze the seams between packages: members and signatures, beside their owner's version.

`python tests/seam_signatures.py` writes tests/seams.toml anew. It refuses where a seam changed
since a version that was released, until the owner's second number is raised: see docs/versions.md.
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
"""Each seam's owner, and where its Protocol stands."""


def members_of(place: str) -> list[str]:
    """Write a Protocol's members, each with its signature or type, in order of name."""
    module, _, name = place.partition(":")
    kind = getattr(importlib.import_module(module), name)
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if each.__module__ in ("typing", "builtins", "collections.abc"):
            continue
        for member, given in inspect.get_annotations(each).items():
            found[member] = f"{member}: {shown(given)}"
        for member, value in vars(each).items():
            if isinstance(value, property) and value.fget is not None:
                returned = inspect.get_annotations(value.fget).get("return", "")
                found[member] = f"{member}: {shown(returned)}"
            elif inspect.isfunction(value) and not is_private(member):
                found[member] = f"{member}{signature_of(value)}"
    return [found[member] for member in sorted(found) if not is_private(member)]


def is_private(member: str) -> bool:
    """Whether a name is Python's or nobody's business."""
    spoken = {"__call__", "__iter__", "__next__", "__len__"}
    return member.startswith("_") and member not in spoken


def signature_of(function: Any) -> str:
    """Write a signature so that neither Python's version nor imports change it."""
    signature = inspect.signature(function)
    parts, star = [], False
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        star = star or each.kind is each.VAR_POSITIONAL
        default = "" if each.default is each.empty else " = ..."
        given = "" if each.annotation is each.empty else f": {shown(each.annotation)}"
        mark = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        parts.append(f"{mark}{each.name}{given}{default}")
    return f"({', '.join(parts)}) -> {shown(signature.return_annotation)}"


def shown(annotation: Any) -> str:
    """Write a type by the last parts of its names."""
    if annotation is None:
        return "None"
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def version_of(package: str) -> tuple[int, int]:
    """The first two numbers of a package's version."""
    first, second = str(project_of(package)["version"]).split(".")[:2]
    return int(first), int(second)


def is_released(package: str, version: tuple[int, int]) -> bool:
    """Whether a package's changelog holds a release of these numbers."""
    text = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
    return bool(re.search(rf"^## {version[0]}\.{version[1]}\.", text, re.MULTILINE))


def frozen() -> dict[str, Any]:
    """What tests/seams.toml holds."""
    return tomllib.loads(FILE.read_text()) if FILE.exists() else {}


def complaint(seam: str, was: dict[str, Any], now: list[str], *, released: bool) -> str:
    """Say why a seam cannot be frozen as it is; empty where it can."""
    package, _ = SEAMS[seam]
    if was["members"] == now or not released or version_of(package) > tuple(was["version"]):
        return ""
    numbers = ".".join(map(str, was["version"]))
    return f"the seam {seam!r} changed since {package} {numbers} was released; raise its version"


def main() -> int:
    """Write the file; exit with 1 where a version has to be raised first."""
    known, lines = frozen(), ["# Members of the seams, by tests/seam_signatures.py."]
    for seam, (package, place) in SEAMS.items():
        importlib.import_module(module_of(package))
        now, was = members_of(place), known.get(seam)
        released = was is not None and is_released(package, tuple(was["version"]))
        why = complaint(seam, was, now, released=released) if was is not None else ""
        if why:
            sys.stderr.write(f"{why}\n")
            return 1
        version = list(was["version"]) if was and was["members"] == now else [*version_of(package)]
        lines += ["", f"[{json.dumps(seam)}]", f"owner = {json.dumps(package)}"]
        lines += [f"version = {version}", "members = ["]
        lines += [f"    {json.dumps(member, ensure_ascii=False)}," for member in now] + ["]"]
    FILE.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
