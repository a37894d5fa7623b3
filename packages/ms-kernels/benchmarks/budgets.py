"""Compare each kernel's resources on a chip with the golden files; no chip is needed.

python benchmarks/budgets.py [--update] [--target sm_90] ...   # exit code 1 on a difference

A golden file is valid for one version of Triton, as others generate different code.
"""

import argparse
import json
import sys
from pathlib import Path

from ms_kernels.aot.compiling import Resources, compile_entry, compiler_version
from ms_kernels.aot.gpu_library import entries
from ms_kernels.aot.lint import lint
from ms_kernels.aot.targets import TARGETS, target_named
from ms_kernels.errors import KernelError

GOLDEN = Path(__file__).parent / "budgets"
FIELDS = tuple(Resources.__annotations__)
DTYPES = {"sm_90": ("bf16", "fp16", "fp32")}
"""Dtypes in a chip's golden file; bfloat16 only for chips not listed."""


def golden_dtypes(target: str) -> tuple[str, ...]:
    """Return the dtypes whose kernels are in a chip's golden file."""
    return DTYPES.get(target, ("bf16",))


def compile_kernels(target: str) -> dict[str, list[int]]:
    """Compile the kernels of a chip's dtypes; return their resources in the order of `FIELDS`."""
    chip = target_named(target)
    resources = {}
    for entry in entries(target):
        if entry.dtype not in golden_dtypes(target):
            continue
        compiled = compile_entry(entry, chip)
        faults = lint(compiled.ttir, entry.argument_limits())
        if faults:
            raise SystemExit(f"{entry.name}: {faults[0]}")
        resources[entry.name] = [getattr(compiled.resources, name) for name in FIELDS]
    return resources


def golden(target: str) -> dict:
    """Return a golden file's content, or an empty one."""
    path = GOLDEN / f"{target}.json"
    return json.loads(path.read_text()) if path.exists() else {"triton": "", "kernels": {}}


def write(target: str, kernels: dict[str, list[int]]) -> None:
    """Write a golden file with one line per kernel, so that changes are easy to review."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(facts)}" for name, facts in sorted(kernels.items())
    ]
    head = f'{{"triton": "{compiler_version()}",\n "fields": {json.dumps(list(FIELDS))},\n'
    GOLDEN.mkdir(exist_ok=True)
    text = head + ' "kernels": {\n' + ",\n".join(lines) + "\n}}\n"
    (GOLDEN / f"{target}.json").write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="rewrite the golden files")
    parser.add_argument("--target", action="append", help="only this chip; may be repeated")
    options = parser.parse_args()
    chips = [item.name for item in TARGETS.values() if item.backend != "cpu"]
    differing = 0
    try:
        for target in options.target or chips:
            current = compile_kernels(target)
            if options.update:
                write(target, current)
            expected = golden(target)
            for name in sorted({*current, *expected["kernels"]}):
                old, new = expected["kernels"].get(name), current.get(name)
                if old != new:
                    differing += 1
                    print(f"{target} {name}: {old} is now {new} ({', '.join(FIELDS)})")
            spilling = [name for name, facts in current.items() if facts[1]]
            print(f"{target}: {len(current)} kernels, spilling: {', '.join(spilling) or 'none'}")
    except KernelError as error:
        print(f"budgets.py: {error}", file=sys.stderr)
        return 2
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
