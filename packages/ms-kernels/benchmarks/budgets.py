"""What each kernel takes of a chip, beside the golden files; no chip is needed.

python benchmarks/budgets.py [--update] [--target sm_90] ...   # exit code 1 where one differs

A golden file holds for one version of Triton; another makes other code.
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
"""What a chip's golden file holds; bfloat16 alone where nothing stands here."""


def kept(target: str) -> tuple[str, ...]:
    """Return the dtypes whose kernels a chip's golden file holds."""
    return DTYPES.get(target, ("bf16",))


def measured(target: str) -> dict[str, list[int]]:
    """Compile the kernels of a chip's dtypes; return their facts in the order of `FIELDS`."""
    chip = target_named(target)
    found = {}
    for entry in entries(target):
        if entry.dtype not in kept(target):
            continue
        made = compile_entry(entry, chip)
        faults = lint(made.ttir, entry.greatest())
        if faults:
            raise SystemExit(f"{entry.name}: {faults[0]}")
        found[entry.name] = [getattr(made.resources, name) for name in FIELDS]
    return found


def golden(target: str) -> dict:
    """Return a golden file's content, or an empty one."""
    path = GOLDEN / f"{target}.json"
    return json.loads(path.read_text()) if path.exists() else {"triton": "", "kernels": {}}


def write(target: str, kernels: dict[str, list[int]]) -> None:
    """Write a golden file, a line for each kernel, so that a change shows in review."""
    lines = [
        f"  {json.dumps(name)}: {json.dumps(facts)}" for name, facts in sorted(kernels.items())
    ]
    head = f'{{"triton": "{compiler_version()}",\n "fields": {json.dumps(list(FIELDS))},\n'
    GOLDEN.mkdir(exist_ok=True)
    text = head + ' "kernels": {\n' + ",\n".join(lines) + "\n}}\n"
    (GOLDEN / f"{target}.json").write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="write the golden files anew")
    parser.add_argument("--target", action="append", help="only this chip; may be repeated")
    options = parser.parse_args()
    chips = [each.name for each in TARGETS.values() if each.backend != "cpu"]
    differing = 0
    try:
        for target in options.target or chips:
            now = measured(target)
            if options.update:
                write(target, now)
            before = golden(target)
            for name in sorted({*now, *before["kernels"]}):
                was, is_ = before["kernels"].get(name), now.get(name)
                if was != is_:
                    differing += 1
                    print(f"{target} {name}: {was} is now {is_} ({', '.join(FIELDS)})")
            spilling = [name for name, facts in now.items() if facts[1]]
            print(f"{target}: {len(now)} kernels, spilling: {', '.join(spilling) or 'none'}")
    except KernelError as error:
        print(f"budgets.py: {error}", file=sys.stderr)
        return 2
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
