"""Run the arrays: `nox -s combinations [-- ms-parallel] [-- --only KEY] [-- --sample SECONDS]`.

Each row trains, with a finite loss that equals the plain run's where settings must not change it,
or is refused before the first step: exit code 2 and one line. Anything else is a failure, and its
pairs stay uncovered. Some rows are killed with SIGKILL at their first checkpoint and resumed.

A full array saves its progress after each row: the same command resumes it, and only tries pairs
that are not covered yet.
"""

import argparse
import itertools
import json
import math
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "packages" / "ms-parallel" / "tests")]
from axes import COMMANDS, UNSET, axes_of, package_of  # noqa: E402
from inputs import MODELS, write_inputs  # noqa: E402
from pairwise import Array, Pair, Row  # noqa: E402
from processes import ProcessesFailedError, run_processes  # noqa: E402

LAUNCH = HERE / "launch.py"
REFUSED = HERE / "refused"
"""What is known to be refused, a file for each command."""
COVERAGE = HERE / "coverage.json"
"""Counts of the last whole run of each command."""
PROGRESS = ROOT / ".nox" / "combinations"
"""Progress of full arrays that have not ended, a file for each command."""
PAGE = ROOT / "docs" / "reference" / "refused-combinations.md"
TIMEOUT_S = 900.0  # compile=true takes minutes where other jobs keep the cores busy
RESUMED_SHARE = 8
"""Every eighth row is also killed and resumed."""
WORKERS = 2
"""Rows that run at once."""
CONFIRMATIONS = {1: 6}
"""Number of other rows in which a combination of this many values must be refused as well."""
SAMPLED_REFUSALS = 2
"""Known refusals of each command that a sample compares."""

NEUTRAL = {
    *("layout", "sharding", "schedule", "context_attention", "context_balance", "shares"),
    *("mixed_precision", "loss_scale", "audit_every", "recompute", "compile", "ops", "offload"),
    *("microbatch_size", "reproducible", "on_nonfinite", "on_spike", "max_num_seqs", "merge"),
    *("eval_every", "checkpoint_every", "async_checkpoints", "record_every", "sample_prompt"),
    "save_dtype",
}
"""Keys that must not change the loss, beside rounding."""
BASE: dict[str, dict[str, Any]] = {
    "ms-parallel train": {
        "steps": 3,
        "batch_size": 4,
        "sequence_length": 32,
        "vocab_size": 320,
        "held_out_fraction": 0.4,
        "device": "cpu",
        "eval_batches": 1,
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

    def like(self, other: "Outcome") -> bool:
        """Return whether two runs ended for the same reason."""
        return self.kind == other.kind and shape(self.line) == shape(other.line)


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
    group = {} if name == "ppo" else {"num_generations": 2}
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
    if package_of(command) == "ms-compress" and name in (*MODELS, "pruned_llama"):
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
        self.numbers = itertools.count(1)
        self.count = 0
        self.plain: dict[str, Outcome] = {}

    def outcome(self, row: Row, *, resumed: bool = False) -> Outcome:
        """Run a row, from its beginning, and again after SIGKILL if `resumed`."""
        number = next(self.numbers)
        self.count = max(self.count, number)
        place = self.folder / f"{number}"
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

    def resume(self, row: Row, whole: Outcome) -> Outcome:
        """Run a row that is killed and resumed; compare its last loss with the whole run's."""
        again = self.outcome(row, resumed=True)
        steady = again.losses and math.isclose(again.losses[-1], whole.losses[-1], rel_tol=1e-6)
        if again.kind == "trained" and (steady or whole.skipped):
            return whole
        return Outcome(kind="failed", line=f"resumed after SIGKILL: {again}, not {whole}")

    def examine(self, row: Row, *, resumed: bool, causes: bool) -> tuple[Outcome, Pair]:
        """Run a row, and find the values that its refusal or failure comes from."""
        found = self.check(row)
        if found.kind == "trained" and resumed and package_of(self.command) != "ms-compress":
            found = self.resume(row, found)
        if found.kind == "trained" or not causes:
            return found, ()
        return found, self.cause(row, found)

    def cause(self, row: Row, ended: Outcome) -> Pair:
        """Find the few values of a row that end it in the same way by themselves, the rest plain.

        Values of keys that the line names are tried first. A plain value is part of the cause where
        another value of its key lets the run train, as where one setting needs another.
        """
        plain = dict.fromkeys(row, 0)
        outcomes: dict[str, Outcome] = {json.dumps(row, sort_keys=True): ended}

        def outcome(items: Mapping[str, int]) -> Outcome:
            trial = plain | items
            key = json.dumps(trial, sort_keys=True)
            if key not in outcomes:
                run = self.outcome if ended.kind == "refused" else self.check
                outcomes[key] = run(trial)
            return outcomes[key]

        pinned: dict[str, int] = {}

        def same(items: Mapping[str, int]) -> bool:
            return outcome(pinned | items).like(ended)

        active = {axis: i for axis, i in row.items() if i}
        named = {axis: i for axis, i in active.items() if self.names(ended.line, axis, i)}
        common = {axis: active[axis] for axis in ("layout", "model") if axis in active}
        while True:
            choices = (named, common | named, active)
            start = next(few for few in choices if few == active or same(few))
            free = [axis for axis in start if axis not in pinned]
            axes = minimal(free, lambda few: same({axis: row[axis] for axis in few}))
            items = pinned | {axis: row[axis] for axis in axes}
            # A plain value that the row does not have may refuse these values as well: the cause
            # must do so with the row's own.
            escapes = (
                axis
                for axis in active
                if axis not in items
                and (axis == "model" or self.names(ended.line, axis, 0))
                and not same(items | {axis: row[axis]})
            )
            escape = next(escapes, None)
            if escape is None:
                break
            pinned[escape] = row[escape]
        for axis, values in self.axes.items():
            if axis in items or not (axis == "model" or self.names(ended.line, axis, 0)):
                continue
            others = [i for i in range(len(values)) if i != row[axis]]
            if any(outcome(items | {axis: i}).kind == "trained" for i in others):
                items |= {axis: row[axis] if same(items | {axis: row[axis]}) else 0}
        return tuple(sorted(items.items()))

    def names(self, line: str, axis: str, index: int) -> bool:
        """Return whether a line names a key or its value."""
        value = self.axes[axis][index]
        words = [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else [str(value)]
        return axis in line or any(len(word) > 2 and word in line for word in words)

    def narrowed(self, items: Pair, row: Row) -> Pair:
        """Find which plain values belong to a refusal that `row`, with other values, escapes."""
        plain = dict.fromkeys(row, 0) | dict(items)
        others = [axis for axis in row if row[axis] != plain[axis]]

        def escapes(few: Sequence[str]) -> bool:  # another refusal would be no escape
            return self.outcome(plain | {axis: row[axis] for axis in few}).kind == "trained"

        return tuple(sorted([*items, *((axis, 0) for axis in minimal(others, escapes))]))


def minimal(items: list[str], holds: Callable[[Sequence[str]], bool]) -> list[str]:
    """Shrink a list for which `holds` is true until no item can be left out.

    Halves are tried first: ddmin (Zeller and Hildebrandt 2002, IEEE TSE 28(2)).
    """
    parts = 2
    while len(items) > 1:
        size = -(-len(items) // parts)
        chunks = [items[at : at + size] for at in range(0, len(items), size)]
        rests = [[each for each in items if each not in chunk] for chunk in chunks]
        smaller = next(
            (few for few in (*chunks, *rests) if len(few) < len(items) and holds(few)), None
        )
        if smaller is not None:
            items, parts = smaller, 2
        elif size > 1:
            parts *= 2
        else:
            break
    return [] if len(items) == 1 and holds([]) else items


def shape(line: str) -> str:
    """A refusal without its numbers and quoted values, to compare causes."""
    return "".join(c for c in line.partition(";")[0] if not c.isdigit())[:80]


def judged(command: str, codes: list[int], errors: list[str], events: Path) -> Outcome:
    """Judge a run by its exit codes, what it printed, and its events."""
    from launch import read_events

    happened = read_events(events)
    steps = [each for each in happened if each.get("kind") == "step"]
    begin = f"{package_of(command)}: "
    lines = [line for each in errors for line in each.splitlines()]
    told = [line.removeprefix(begin) for line in lines if line.startswith(begin)]
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


@frozen(kw_only=True)
class Progress:
    """What has been learned of a command's array.

    Args:
        rows: rows that trained.
        refused: reason of each refused combination.
        confirmed: combinations that are refused in other rows as well.
        runs: processes or groups of processes that ran.
        seconds: of all runs.
    """

    rows: tuple[Row, ...] = ()
    refused: Mapping[Pair, str] = {}
    confirmed: frozenset[Pair] = frozenset()
    runs: int = 0
    seconds: float = 0.0


def read_progress(command: str, path: Path) -> Progress:
    """Read saved progress; rows of other axes or values are left out."""
    if not path.exists():
        return Progress()
    saved, axes = json.loads(path.read_text()), axes_of(command)
    if saved["axes"] != json.loads(json.dumps(axes)):
        return Progress()
    refused = indexed(axes, saved["refused"])
    confirmed = indexed(axes, saved["confirmed"])
    return Progress(
        rows=tuple(saved["rows"]),
        refused=refused,
        confirmed=frozenset(confirmed),
        runs=saved["runs"],
        seconds=saved["seconds"],
    )


def write_progress(command: str, path: Path, progress: Progress) -> None:
    """Save progress, all of it or none."""
    axes = axes_of(command)
    confirmed = dict.fromkeys(progress.confirmed, "")
    saved = {
        "axes": axes,
        "rows": progress.rows,
        "refused": listed(axes, progress.refused),
        "confirmed": listed(axes, confirmed),
        "runs": progress.runs,
        "seconds": progress.seconds,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(saved))
    path.with_suffix(".new").replace(path)


def indexed(axes: Mapping[str, list[Any]], known: Iterable[Mapping[str, Any]]) -> dict[Pair, str]:
    """Read refused combinations of a file; those of values that are gone are left out."""
    found = {}
    for each in known:
        if all(value in axes.get(axis, ()) for axis, value in each["values"]):
            items = sorted((axis, axes[axis].index(value)) for axis, value in each["values"])
            found[tuple(items)] = each["reason"]
    return found


class ArrayRun:
    """Runs rows of one command until every pair is covered or the time is over.

    Args:
        command: package and subcommand.
        inputs: folder of models and data.
        folder: for run files and output.
        before: saved progress.
        seed: random seed of the array.
        only: key whose pairs are covered; None for all.
        budget_s: time for rows.
        save: called with the progress after each row.
    """

    def __init__(
        self,
        command: str,
        inputs: Path,
        folder: Path,
        before: Progress,
        *,
        seed: int = 0,
        only: str | None = None,
        budget_s: float = math.inf,
        save: Callable[[Progress], None] = lambda _: None,
    ) -> None:
        self.command, self.inputs, self.save, self.before = command, inputs, save, before
        self.axes, self.began, self.budget_s = axes_of(command), time.monotonic(), budget_s
        self.seed = seed
        self.runner = Runner(command, inputs, folder)
        self.reasons = dict(before.refused)
        self.confirmed = set(before.confirmed)
        self.rows = list(before.rows)
        self.count = 0
        self.failures: list[dict[str, str]] = []
        sizes = {axis: len(values) for axis, values in self.axes.items()}
        self.array = Array(sizes, self.reasons, seed)
        for row in self.rows:
            self.array.train(row)
        if self.is_sample and "compile" in self.axes:
            # Compiling takes longer than all of the sample.
            self.array.refuse([("compile", self.axes["compile"].index(True))])
        if only is not None:
            self.array.open = {pair for pair in self.array.open if only in dict(pair)}
        self.total = self.array.total if only is None else set(self.array.open)

    @property
    def is_sample(self) -> bool:
        """Whether only some rows run."""
        return self.budget_s < math.inf

    @property
    def in_time(self) -> bool:
        """Whether another row may start."""
        return time.monotonic() - self.began < self.budget_s

    @property
    def progress(self) -> Progress:
        """What is known now."""
        return evolve(
            self.before,
            rows=tuple(self.rows),
            refused=self.reasons,
            confirmed=frozenset(self.confirmed & set(self.reasons)),
            runs=self.before.runs + self.runner.count,
            seconds=self.before.seconds + time.monotonic() - self.began,
        )

    def run(self) -> dict[str, Any]:
        """Compare known refusals, cover the pairs, and confirm refusals in other rows."""
        with ThreadPoolExecutor(WORKERS) as pool:
            if self.is_sample:
                known = random.Random(self.seed).sample(
                    sorted(self.reasons), min(SAMPLED_REFUSALS, len(self.reasons))
                )
            elif self.rows:  # resumed: they were compared when it began
                known = []
            else:
                known = sorted(self.reasons)
            self.compare_known(pool, known)
            self.cover(pool)
            while not self.is_sample and self.confirm(pool):
                self.cover(pool)
        uncovered = self.array.uncovered() & self.total
        return {
            "command": self.command,
            "runs": self.progress.runs,
            "rows": len(self.rows),
            "pairs": len(self.total),
            "covered": len(self.total) - len(uncovered),
            "trained": len(self.array.trained & self.total),
            "refused": listed(self.axes, self.reasons),
            "failures": self.failures,
            "seconds": round(self.progress.seconds),
        }

    def compare_known(self, pool: ThreadPoolExecutor, known: Sequence[Pair]) -> None:
        """Run known refusals by themselves; each must still be refused, with the recorded line."""
        plain = dict.fromkeys(self.axes, 0)
        for items, found in zip(
            known,
            pool.map(self.runner.outcome, [plain | dict(items) for items in known]),
            strict=True,
        ):
            line = without_paths(found.line, self.inputs)
            hidden = not self.array.allowed(plain | dict(items), but=items)
            if self.is_sample:
                if found.kind != "refused" or line != self.reasons[items]:
                    self.fail(items, f"recorded as {self.reasons[items]!r}, and {found}")
            elif found.kind == "refused" and not hidden:
                if line != self.reasons[items]:
                    self.say(f"  reworded: {self.words(items)}: {line}")
                self.reasons[items] = line
            else:  # it trains, or the plain values are refused for another reason
                del self.reasons[items]
                self.array.allow(items)

    def cover(self, pool: ThreadPoolExecutor) -> None:
        """Run rows until no pair is open."""
        running: dict[Future[tuple[Outcome, Pair]], Row] = {}
        while True:
            while self.in_time and len(running) < WORKERS and (row := self.array.next()):
                self.count += 1
                resumed = (self.count + self.seed) % RESUMED_SHARE == 0
                job = pool.submit(
                    self.runner.examine, row, resumed=resumed, causes=not self.is_sample
                )
                running[job] = row
            if not running:
                return
            for job in wait(running, return_when=FIRST_COMPLETED).done:
                row = running.pop(job)
                self.array.release(row)
                self.learn(row, *job.result())
                self.save(self.progress)
                self.say_progress()

    def learn(self, row: Row, found: Outcome, items: Pair) -> None:
        """Count the pairs of a row that trained, or exclude what was refused or fails."""
        if found.kind == "trained":
            self.array.train(row)
            self.rows.append(row)
        elif found.kind == "failed":
            self.fail(items or tuple(sorted(row.items())), found.line)
        elif items:
            self.reasons[items] = without_paths(found.line, self.inputs)
            self.array.refuse(items)
            self.say(f"  refused: {self.words(items)}: {self.reasons[items]}")
        else:  # in a sample, whose causes nobody searches: the row does not come again
            self.array.refuse(row.items())

    def fail(self, items: Pair, why: str) -> None:
        """Record a failure; no further row holds the combination."""
        self.array.failed.add(items)
        self.failures.append({"row": self.words(items), "why": why})
        self.say(f"  FAILED: {self.words(items)}\n    {why}")

    def confirm(self, pool: ThreadPoolExecutor) -> bool:
        """Try refused combinations in other rows; return whether one depends on a plain value."""
        known = [items for items in sorted(self.reasons) if items not in self.confirmed]
        changed = False
        for items in known:
            count = CONFIRMATIONS.get(len(items), 2)
            rows = [row for _ in range(count) if (row := self.array.beside(items))]
            for row, found in zip(rows, pool.map(self.runner.outcome, rows), strict=True):
                if found.kind == "failed":
                    self.fail(tuple(sorted(row.items())), found.line)
                if found.kind == "trained" and items in self.reasons:
                    self.array.allow(items)
                    narrow = self.runner.narrowed(items, row)
                    self.reasons[narrow] = self.reasons.pop(items)
                    self.array.refuse(narrow)
                    self.say(f"  refused only with more: {self.words(narrow)}")
                    changed = True
            self.confirmed.add(items)
            self.save(self.progress)
        return changed

    def words(self, items: Pair) -> str:
        """A combination in words, without the plain values of a row."""
        few = [item for item in items if item[1]] if len(items) == len(self.axes) else items
        return labelled(self.axes, few)

    def say(self, line: str) -> None:
        """Print a line at once."""
        print(line, flush=True)

    def say_progress(self) -> None:
        """Print how much is covered."""
        share = 1 - len(self.array.open & self.total) / max(1, len(self.total))
        progress = self.progress
        self.say(
            f"{self.command}: {share:4.0%} of {len(self.total)} pairs, {len(self.rows)} rows,"
            f" {progress.runs} runs, {progress.seconds:.0f} s"
        )


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


def record(command: str, result: Mapping[str, Any]) -> None:
    """Write the counts, the refused combinations and the page."""
    write_refused(command, result["refused"])
    counts = {key: result[key] for key in ("runs", "rows", "pairs", "covered", "seconds")}
    counts["failed"] = len(result["failures"])
    coverage = read_coverage() | {command: counts}
    COVERAGE.write_text(json.dumps(coverage, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(write_page({each: read_refused(each) for each in COMMANDS}, coverage))


def main() -> int:
    """Run the arrays that are asked for, print a table, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="*", help="packages or commands; all by default")
    parser.add_argument("--only", help="cover the pairs of this key alone")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the arrays")
    parser.add_argument("--sample", type=float, default=math.inf, help="seconds in all")
    parser.add_argument("--fresh", action="store_true", help="forget known refusals and progress")
    options = parser.parse_args()
    wanted = [
        each
        for each in COMMANDS
        if not options.commands or each in options.commands or package_of(each) in options.commands
    ]
    full = options.only is None and options.sample == math.inf
    if not full:
        random.Random(options.seed).shuffle(wanted)
    results = []
    with tempfile.TemporaryDirectory() as name:
        inputs = write_inputs(Path(name) / "inputs")
        began = time.monotonic()
        for at, command in enumerate(wanted):
            left = options.sample - (time.monotonic() - began)
            if left <= 0:
                break
            path = PROGRESS / f"{command.replace(' ', '-')}.json"
            if full and options.fresh:
                path.unlink(missing_ok=True)
            before = read_progress(command, path) if full else Progress()
            if not before.rows and not options.fresh:
                before = Progress(refused=indexed(axes_of(command), read_refused(command)))
            folder = Path(name) / str(at)
            folder.mkdir()
            result = ArrayRun(
                command,
                inputs,
                folder,
                before,
                seed=options.seed,
                only=options.only,
                budget_s=left / (len(wanted) - at),
                save=partial(write_progress, command, path) if full else lambda _: None,
            ).run()
            results.append(result)
            if full:
                record(command, result)
                if not result["failures"]:
                    path.unlink(missing_ok=True)
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
