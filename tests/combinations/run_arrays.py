"""Run the arrays: `nox -s combinations [-- ms-parallel] [-- --only KEY] [-- --sample SECONDS]`.

Each row trains, with a finite loss that equals the plain run's where settings must not change it,
or is refused before the first step: exit code 2 and one line. Anything else is a failure. Some rows
are killed with SIGKILL at their first checkpoint and resumed.
"""

import argparse
import json
import math
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "packages" / "ms-parallel" / "tests")]
from axes import COMMANDS, UNSET, axes_of, package_of  # noqa: E402
from inputs import MODELS, write_inputs  # noqa: E402
from pairwise import Array, Row  # noqa: E402
from processes import ProcessesFailedError, run_processes  # noqa: E402

LAUNCH = HERE / "launch.py"
REFUSED = HERE / "refused"
"""What is known to be refused, a file for each command."""
COVERAGE = HERE / "coverage.json"
"""Counts of the last whole run of each command."""
PAGE = ROOT / "docs" / "reference" / "refused-combinations.md"
TIMEOUT_S = 300.0
RESUMED_SHARE = 8
"""One of so many rows is also killed and resumed."""

NEUTRAL = {
    *("layout", "sharding", "schedule", "context_attention", "context_balance", "shares"),
    *("mixed_precision", "loss_scale", "audit_every", "recompute", "compile", "ops", "offload"),
    *("microbatch_size", "reproducible", "on_nonfinite", "on_spike", "slots", "merge"),
    *("evaluate_every", "checkpoint_every", "async_checkpoints", "record_every", "sample_prompt"),
    "save_dtype",
}
"""Keys that must not change the loss, beside rounding."""
BASE: dict[str, dict[str, Any]] = {
    "ms-parallel train": {
        "steps": 3,
        "batch_size": 4,
        "sequence_length": 32,
        "vocab_size": 320,
        "hold_out": 0.4,
        "device": "cpu",
        "evaluate_batches": 1,
        "log_every": 1,
        "timeout_s": 60,
        "learning_rate": 1e-3,
    },
    "offline": {"steps": 3, "batch_size": 4, "sequence_length": 64, "learning_rate": 1e-3},
    "online": {
        "steps": 2,
        "batch_size": 4,
        "max_new_tokens": 6,
        "reward_model": "launch:vowels",
        "learning_rate": 1e-3,
    },
    "ms-compress": {
        "rows": 16,
        "tuning.steps": 2,
        "tuning.batch_size": 4,
        "tuning.sequence_length": 32,
    },
}


@frozen(kw_only=True)
class Outcome:
    """How one run ended."""

    kind: str
    """`trained`, `refused` or `failed`."""
    line: str = ""
    """The refusal or the failure."""
    losses: tuple[float, ...] = ()
    skipped: bool = False
    """Whether an update was skipped for an overflow."""


def base_of(command: str, inputs: Path) -> dict[str, Any]:
    """The settings that every run of a command has."""
    name = command.split()[1]
    if command == "ms-parallel train":
        return BASE[command]
    if package_of(command) == "ms-compress":
        base = dict(BASE["ms-compress"])
        return base | ({"pattern": "2:4"} if name == "prune" else {})
    if name in ("sft", "reward", "dpo"):
        return BASE["offline"] | {"dataset": str(inputs / ("copy" if name == "sft" else "pairs"))}
    files = {"dataset": inputs / "prompts.jsonl", "tokenizer": inputs / "tokenizer.json"}
    group = {} if name == "ppo" else {"group_size": 2}
    return BASE["online"] | group | {key: str(path) for key, path in files.items()}


def settings_of(command: str, row: Row, inputs: Path) -> dict[str, Any]:
    """The run file of a row."""
    axes, found = axes_of(command), base_of(command, inputs)
    for axis, index in row.items():
        value = axes[axis][index]
        if value is UNSET:
            continue
        if isinstance(value, str) and value.startswith("@"):
            value = str(inputs / path_of(command, value[1:]))
        if axis == "model" and value in MODELS:
            found = found | {"model_config": MODELS[value]}
        found = found | {axis: value}
    return found


def path_of(command: str, name: str) -> str:
    """The file or folder of a `@name`."""
    if package_of(command) == "ms-compress" and name in MODELS:
        return f"compress_{name}"
    names = {"tokenizer": "text_tokenizer.json", "tokens": "tokens.json"}
    return names.get(name, name)


def toml(value: Any) -> str:
    """A value as TOML writes it, tables inline."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)


class Runner:
    """Runs rows of one command and remembers plain runs.

    Args:
        command: package and subcommand.
        inputs: folder of models and data.
        folder: for run files and output.
    """

    def __init__(self, command: str, inputs: Path, folder: Path) -> None:
        self.command, self.inputs, self.folder = command, inputs, folder
        self.axes = axes_of(command)
        self.count = 0
        self.plain: dict[str, Outcome] = {}

    def outcome(self, row: Row, *, steps: int | None = None, resumed: bool = False) -> Outcome:
        """Run a row, from its beginning, and again after SIGKILL if `resumed`."""
        self.count += 1
        place = self.folder / f"{self.count}"
        settings = settings_of(self.command, row, self.inputs)
        layout = settings.get("layout") or {}
        # Replicas and expert ranks are among the data ranks.
        world = math.prod(n for axis, n in layout.items() if axis not in ("replicate", "expert"))
        out, log = place / "out", place / "log"
        if resumed:
            settings |= {"checkpoint_every": 1}
        settings |= {"output_dir": str(out)}
        place.mkdir()
        lines = (f"{key} = {toml(value)}" for key, value in settings.items())
        (place / "run.toml").write_text("\n".join(lines) + "\n")
        job = {"command": self.command, "run_file": str(place / "run.toml"), "log": str(log)}
        events = out / "events.jsonl"
        try:
            if resumed:
                run_processes(
                    world,
                    LAUNCH,
                    "perform",
                    check=False,
                    timeout_s=TIMEOUT_S,
                    kill_at=str(events),
                    **job,
                )
            codes = run_processes(world, LAUNCH, "perform", timeout_s=TIMEOUT_S, **job)
        except ProcessesFailedError as error:
            return Outcome(kind="failed", line=" ".join(str(error).split())[-400:])
        errors = [(place / f"log.{rank}.err").read_text(errors="replace") for rank in range(world)]
        found = judged(self.command, codes, errors, events)
        shutil.rmtree(place)
        return found

    def check(self, row: Row) -> Outcome:
        """Run a row and compare its losses with the plain run's."""
        found = self.outcome(row)
        if found.kind != "trained" or package_of(self.command) == "ms-compress":
            return found
        neutral = {axis: 0 for axis in row if axis in NEUTRAL}
        plain_row = {**row, **neutral}
        key = json.dumps(plain_row, sort_keys=True)
        if plain_row != row:
            if key not in self.plain:
                self.plain[key] = self.outcome(plain_row)
            plain = self.plain[key]
            if plain.kind == "failed":
                return Outcome(kind="failed", line=f"the plain run: {plain.line}")
            if plain.kind == "trained":
                difference = compared(self.value(row, "mixed_precision"), found, plain, self.online)
                if difference:
                    return Outcome(kind="failed", line=difference)
        return found

    @property
    def online(self) -> bool:
        """Whether responses are drawn from the model, so that one rounding may change them."""
        return self.command.split()[1] in ("ppo", "grpo", "rloo")

    def value(self, row: Row, axis: str) -> Any:
        """The value of an axis in a row; its plain one where the row has none."""
        return self.axes[axis][row.get(axis, 0)] if axis in self.axes else UNSET

    def cause(self, row: Row, refused: Outcome) -> list[tuple[str, int]]:
        """Find the few values of a refused row that are refused by themselves, the rest plain.

        Those of the keys that the line names are tried first. A value that is a part of the cause
        although the plain one is refused as well, as where a setting needs another one, is found by
        trying all values of its key.
        """

        def same(trial: Row) -> bool:
            found = self.outcome(trial)
            return found.kind == "refused" and shape(found.line) == shape(refused.line)

        plain = dict.fromkeys(row, 0)
        active = [axis for axis in row if row[axis]]
        named = [axis for axis in active if axis in refused.line]
        kept = active
        for few in (named, [*{*named, "layout"} & {*active}]):
            if same(plain | {axis: row[axis] for axis in few}):
                kept = few
                break
        before: list[str] = []
        while before != kept:
            before = kept
            for axis in before:
                less = [each for each in kept if each != axis]
                if same(plain | {each: row[each] for each in less}):
                    kept = less
        items = [(axis, row[axis]) for axis in kept]
        others = [axis for axis in row if axis not in kept and axis in refused.line]
        for axis in others:
            trial = plain | dict(items)
            if not all(same(trial | {axis: i}) for i in range(1, len(self.axes[axis]))):
                items.append((axis, row[axis]))
        return items


def shape(line: str) -> str:
    """A refusal without its numbers and quoted values, to compare causes."""
    return "".join(c for c in line.partition(";")[0] if not c.isdigit())[:80]


def judged(command: str, codes: list[int], errors: list[str], events: Path) -> Outcome:
    """Judge a run by its exit codes, what it printed, and its events."""
    from launch import read_events

    happened = read_events(events)
    steps = [each for each in happened if each.get("kind") == "step"]
    begin = re.compile(rf"{package_of(command)}(?: \(process \d+\))?: ")  # a line per process
    lines = [line for each in errors for line in each.splitlines()]
    told = sorted({begin.sub("", line) for line in lines if begin.match(line)})
    text = "\n".join(errors)
    if "Traceback" in text:
        return Outcome(kind="failed", line=" | ".join(text.strip().splitlines()[-3:])[-500:])
    if set(codes) == {2}:
        if len(told) != 1:
            return Outcome(kind="failed", line=f"refused in {len(told)} lines: {text[-300:]}")
        line = told[0]
        if steps:
            return Outcome(kind="failed", line=f"refused after {len(steps)} steps: {line}")
        return Outcome(kind="refused", line=line)
    if set(codes) != {0}:
        return Outcome(kind="failed", line=f"exit codes {codes}: {text.strip()[-400:]}")
    losses = tuple(float(each["loss"]) for each in steps if each.get("loss") is not None)
    if any(not math.isfinite(loss) for loss in losses):
        return Outcome(kind="failed", line=f"losses {losses}")
    if not steps and package_of(command) != "ms-compress":
        return Outcome(kind="failed", line="exit code 0 without a step")
    skipped = any("skip" in str(each.get("kind")) or each.get("skipped") for each in happened)
    return Outcome(kind="trained", losses=losses, skipped=skipped)


def compared(precision: Any, found: Outcome, plain: Outcome, online: bool) -> str:
    """Compare losses with the plain run's, in float32 and on one process; "" where they agree.

    Sums in another order move the first loss by some 2^-24 and AdamW's first steps, which are
    nearly signs of gradients, the third by up to 1e-3. bfloat16 has 8 bits: logits near 1 are
    within 2^-8 of float32's, and a loss near 5 within 1%; three steps later within 3%.
    """
    half = bool(precision)
    if (half and online) or not found.losses or not plain.losses:
        return ""
    first, last = (0.01, 0.03) if half else (2e-5, 2e-3)
    pairs = [(found.losses[0], plain.losses[0], first)]
    if not (found.skipped or plain.skipped or online):
        pairs.append((found.losses[-1], plain.losses[-1], last))
    for ours, theirs, bound in pairs:
        if abs(ours - theirs) > bound * max(abs(theirs), 0.1):
            return f"losses {found.losses}, and of the plain run {plain.losses}"
    return ""


def without_paths(line: str, inputs: Path) -> str:
    """A refusal without the folders of one run."""
    return re.sub(r"^\S*run\.toml: ", "", line.replace(str(inputs), "DIR"))


def labelled(axes: Mapping[str, list[Any]], items: Any) -> str:
    """A combination in words."""

    def word(value: Any) -> str:
        return "unset" if value is UNSET else toml(value).replace("@", "")

    return ", ".join(f"{axis} = {word(axes[axis][i])}" for axis, i in items)


def listed(axes: Mapping[str, list[Any]], reasons: Mapping[Any, str]) -> list[dict[str, Any]]:
    """Refused combinations by their values, for a file."""
    return [
        {"values": [[a, axes[a][i]] for a, i in items], "reason": reason}
        for items, reason in sorted(reasons.items())
    ]


def run_array(
    command: str,
    inputs: Path,
    *,
    only: str | None = None,
    budget_s: float = math.inf,
    seed: int = 0,
    known: list[dict[str, Any]] | None = None,
    resume_share: int = RESUMED_SHARE,
    save: Callable[[str, list[dict[str, Any]]], None] = lambda *_: None,
) -> dict[str, Any]:
    """Run rows until every pair is covered or refused, or the time is over."""
    axes, began = axes_of(command), time.monotonic()
    reasons: dict[Any, str] = {}
    for each in known or ():
        items = tuple(
            sorted((a, axes[a].index(v)) for a, v in each["values"] if v in axes.get(a, ()))
        )
        if len(items) == len(each["values"]):
            reasons[items] = each["reason"]
    array = Array({axis: len(values) for axis, values in axes.items()}, reasons, seed)
    if only is not None:
        array.open = {pair for pair in array.open if only in dict(pair)}
    total, failures, runs = len(array.open), [], 0
    with tempfile.TemporaryDirectory() as name:
        runner = Runner(command, inputs, Path(name))
        for items in sorted(reasons) if budget_s == math.inf else ():
            found = runner.outcome(dict.fromkeys(axes, 0) | dict(items))
            if found.kind != "refused":  # not any more, or only beside other settings: find out
                del reasons[items]
                array.allow(items)
            else:
                reasons[items] = without_paths(found.line, inputs)
                save(command, listed(axes, reasons))
        while time.monotonic() - began < budget_s and (row := array.next()) is not None:
            runs += 1
            found = runner.check(row)
            if found.kind == "refused":
                items = tuple(sorted(runner.cause(row, found)))
                reasons[items] = without_paths(found.line, inputs)
                array.refuse(items)
                save(command, listed(axes, reasons))
                print(f"  refused: {labelled(axes, items)}: {reasons[items]}", flush=True)
            else:
                array.train(row)
                if found.kind == "failed":
                    words = labelled(axes, [item for item in row.items() if item[1]])
                    failures.append({"row": words, "why": found.line})
                    print(f"  FAILED: {words}\n    {found.line}", flush=True)
                elif runs % resume_share == 0 and package_of(command) != "ms-compress":
                    again = runner.outcome(row, resumed=True)
                    steady = again.losses and math.isclose(
                        again.losses[-1], found.losses[-1], rel_tol=1e-6
                    )
                    if again.kind != "trained" or not (steady or found.skipped):
                        words = labelled(axes, [item for item in row.items() if item[1]])
                        failures.append({"row": words, "why": f"resumed: {again}, not {found}"})
                        print(
                            f"  FAILED after SIGKILL: {words}\n    {again}\n    {found}", flush=True
                        )
            spent = time.monotonic() - began
            share = 1 - len(array.open) / max(1, total)
            left = spent * (1 / max(share, 0.02) - 1)
            print(
                f"{command}: {share:4.0%} of {total} pairs, {runs} rows, {spent:.0f} s,"
                f" about {left:.0f} s left",
                flush=True,
            )
        processes = runner.count
    done = total - len(array.open)
    refused = listed(axes, reasons)
    return {
        "command": command,
        "runs": processes,
        "rows": runs,
        "pairs": total,
        "covered": done,
        "trained": len(array.trained),
        "impossible": len(array.impossible),
        "refused": refused,
        "failures": failures,
        "seconds": round(time.monotonic() - began),
    }


def refused_file(command: str) -> Path:
    """Where the refused combinations of a command are kept."""
    return REFUSED / f"{command.replace(' ', '-')}.json"


def read_refused(command: str) -> list[dict[str, Any]]:
    """The combinations of a command that are known to be refused."""
    file = refused_file(command)
    return json.loads(file.read_text()) if file.exists() else []


def read_coverage() -> dict[str, dict[str, int]]:
    """Counts of the last whole run of each command."""
    return json.loads(COVERAGE.read_text()) if COVERAGE.exists() else {}


def write_refused(command: str, refused: list[dict[str, Any]]) -> None:
    """Keep what was refused for the next runs and for the page."""
    REFUSED.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(each) for each in refused)
    refused_file(command).write_text(f"[\n{lines}\n]\n")


def write_page(
    results: Mapping[str, list[dict[str, Any]]], coverage: Mapping[str, dict[str, int]]
) -> str:
    """The page of refused combinations, and of how many pairs the last whole run covered."""
    lines = [
        "# Refused combinations",
        "",
        "`nox -s combinations` tries every pair of values of the keys of a run file. A pair trains,"
        " or it is refused before the first step with exit code 2 and one line, shown here.",
    ]
    for command, refused in results.items():
        lines += ["", f"## {command}", ""]
        if command in coverage:
            counts = coverage[command]
            lines += [
                f"{counts['covered']} of {counts['pairs']} pairs covered in {counts['runs']} runs,"
                f" {counts['failed']} failures.",
                "",
            ]
        else:
            lines += ["Not run in full yet.", ""]
        if not refused:
            lines.append("None.")
            continue
        lines += ["| settings | reason |", "|---|---|"]
        for each in refused:
            words = ", ".join(
                f"`{axis} = {'unset' if value is UNSET else toml(value).replace('@', '')}`"
                for axis, value in each["values"]
            )
            reason = each["reason"].replace("|", "\\|").replace("<", "&lt;")
            lines.append(f"| {words} | {reason} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the arrays that are asked for, print a table, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="*", help="packages or commands; all by default")
    parser.add_argument("--only", help="cover the pairs of this key alone")
    parser.add_argument("--seed", type=int, default=0, help="of the array")
    parser.add_argument("--sample", type=float, default=math.inf, help="seconds in all")
    parser.add_argument("--fresh", action="store_true", help="forget what is known to be refused")
    options = parser.parse_args()
    wanted = [
        each
        for each in COMMANDS
        if not options.commands or each in options.commands or package_of(each) in options.commands
    ]
    if options.sample < math.inf:
        random.Random(options.seed).shuffle(wanted)
    results = []
    with tempfile.TemporaryDirectory() as name:
        inputs = write_inputs(Path(name) / "inputs")
        began = time.monotonic()
        for at, command in enumerate(wanted):
            left = options.sample - (time.monotonic() - began)
            budget = left / (len(wanted) - at)
            before = [] if options.fresh else read_refused(command)
            whole = options.only is None and options.sample == math.inf
            found = run_array(
                command,
                inputs,
                only=options.only,
                budget_s=budget,
                seed=options.seed,
                known=before,
                **({"save": write_refused} if whole else {}),
            )
            results.append(found)
            if whole:
                write_refused(command, found["refused"])
                counts = {key: found[key] for key in ("runs", "pairs", "covered", "seconds")}
                coverage = read_coverage() | {command: counts | {"failed": len(found["failures"])}}
                COVERAGE.write_text(json.dumps(coverage, indent=1, sort_keys=True) + "\n")
                PAGE.write_text(
                    write_page({each: read_refused(each) for each in COMMANDS}, coverage)
                )
    names = ("runs", "pairs", "covered", "refused", "failed", "s")
    print(f"\n{'command':20}", *(f"{name:>8}" for name in names))
    for each in results:
        covered = f"{each['covered'] / max(1, each['pairs']):.0%}"
        counts = (len(each["refused"]), len(each["failures"]), each["seconds"])
        cells = (each["runs"], each["pairs"], covered, *counts)
        print(f"{each['command']:20}", *(f"{cell:>8}" for cell in cells))
    return int(any(each["failures"] for each in results))


if __name__ == "__main__":
    sys.exit(main())
