"""Run the arrays: `nox -s combinations [-- ms-parallel] [-- --only KEY] [-- --sample SECONDS]`.

Each row either trains, with a finite loss that equals the baseline's if its settings must not
change the loss, or is refused before the first step with exit code 2 and one line. Anything else is
a failure, and its pairs stay uncovered. Some rows are killed with SIGKILL at their first checkpoint
and resumed.

A full array saves its progress after each row: the same command resumes it with the uncovered
pairs.
"""

import argparse
import itertools
import json
import math
import random
import re
import shutil
import socket
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
from refused_page import toml, write_page  # noqa: E402

LAUNCH = HERE / "launch.py"
REFUSED = HERE / "refused"
"""Known refusals, one file per command."""
COVERAGE = HERE / "coverage.json"
"""Counts of the last full run of each command."""
PROGRESS = ROOT / ".nox" / "combinations"
"""Progress of unfinished full arrays, one file per command."""
PAGE = ROOT / "docs" / "reference" / "refused-combinations.md"
TIMEOUT_S = 900.0  # compile=true takes minutes on a busy machine
RESUME_INTERVAL = 8
"""Every eighth row is also killed and resumed."""
WORKERS = 2
"""Number of rows that run concurrently."""
CONFIRMATIONS = {1: 6}
"""Number of other rows that must also refuse a combination, by its number of values."""
SAMPLED_REFUSALS = 2
"""Number of known refusals per command that a sample checks."""

EXACT_BOUNDS = (2e-5, 2e-3)
"""Relative bounds of the first and the last loss in float32."""
NEUTRAL = {
    *("layout", "sharding", "schedule", "context_attention", "context_balance", "shares"),
    *("mixed_precision", "float8", "loss_scale", "audit_every", "recompute", "compile", "ops"),
    "offload",
    *("microbatch_size", "reproducible", "on_nonfinite", "on_spike", "max_num_seqs", "merge"),
    *("eval_every", "checkpoint_every", "async_checkpoints", "record_every", "sample_prompt"),
    "save_dtype",
}
"""Keys that must not change the loss, except for rounding."""
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
    """Outcome of one run."""

    kind: str
    """`trained`, `refused` or `failed`."""
    line: str = ""
    """Message of the refusal or failure."""
    losses: tuple[float, ...] = ()
    skipped: bool = False
    """Whether an update was skipped after an overflow."""

    def like(self, other: "Outcome") -> bool:
        """Whether two runs ended for the same reason."""
        return self.kind == other.kind and shape(self.line) == shape(other.line)


def base_of(command: str, inputs: Path) -> dict[str, Any]:
    """Settings of every run of a command."""
    name = command.split()[1]
    if command == "ms-parallel train":
        return BASE[command]
    if package_of(command) == "ms-compress":
        base = dict(BASE["ms-compress"])
        return base | ({"pattern": "2:4"} if name == "prune" else {})
    if name in ("sft", "reward", "dpo", "kto", "gkd"):
        dataset = "copy" if name in ("sft", "gkd") else "pairs"
        teacher = {"teacher_model": str(inputs / "llama"), "max_new_tokens": 6}
        return (
            BASE["offline"]
            | {"dataset": str(inputs / dataset)}
            | (teacher if name == "gkd" else {})
        )
    files = {"dataset": inputs / "prompts.jsonl", "tokenizer": inputs / "tokenizer.json"}
    group = {} if name == "ppo" else {"num_generations": 2}
    return BASE["online"] | group | {key: str(path) for key, path in files.items()}


def run_settings(command: str, row: Row, inputs: Path) -> dict[str, Any]:
    """Settings of a row."""
    axes, settings = axes_of(command), base_of(command, inputs)
    for axis, index in row.items():
        value = axes[axis][index]
        if value is UNSET:
            continue
        if isinstance(value, str) and value.startswith("@"):
            value = str(inputs / path_of(command, value[1:]))
        if axis == "model" and value in MODELS:
            settings = settings | {"model_config": MODELS[value]}
        settings = settings | {axis: value}
    if "autoround" in str(settings.get("method")):
        settings = settings | {"iters": 2}  # other methods refuse it
    if command == "ms-parallel train":  # settings of raw text are refused where they have no effect
        is_folder = (Path(settings["model"]) / "tokenizer.json").is_file()
        if "tokenizer" in settings or is_folder:
            settings.pop("vocab_size", None)
        if (Path(settings["dataset"]) / "index.json").is_file():
            for name in ("vocab_size", "held_out_fraction"):
                settings.pop(name, None)
    return settings


def path_of(command: str, name: str) -> str:
    """File or folder of a `@name`."""
    if package_of(command) == "ms-compress" and name in (*MODELS, "pruned_llama"):
        return f"compress_{name}"
    names = {"tokenizer": "text_tokenizer.json", "tokens": "tokens.json"}
    return names.get(name, name)


class Runner:
    """Runs rows of one command and caches the outcomes of baseline runs.

    Args:
        command: package and subcommand.
        inputs: folder of models and data.
        folder: folder for run files and output.
    """

    def __init__(self, command: str, inputs: Path, folder: Path) -> None:
        self.command, self.inputs, self.folder = command, inputs, folder
        self.axes = axes_of(command)
        self.numbers = itertools.count(1)
        self.count = 0
        self.plain: dict[str, Outcome] = {}

    def outcome(self, row: Row, *, resumed: bool = False) -> Outcome:
        """Run a row; if `resumed`, kill it at its first checkpoint and run it again."""
        number = next(self.numbers)
        self.count = max(self.count, number)
        run_folder = self.folder / f"{number}"
        settings = run_settings(self.command, row, self.inputs)
        layout = settings.get("layout") or {}
        # Replicas and expert ranks are among the data ranks.
        world = math.prod(n for axis, n in layout.items() if axis not in ("replicate", "expert"))
        out, log = run_folder / "out", run_folder / "log"
        if resumed:
            settings |= {"checkpoint_every": 1}
        settings |= {"output_dir": str(out)}
        server: dict[str, Any] = {}
        if settings.get("vllm"):
            server = {"served_model": settings["model"], "port": unused_port()}
            settings |= {"vllm": {"url": f"http://127.0.0.1:{server['port']}"}}
        run_folder.mkdir()
        lines = (f"{key} = {toml(value)}" for key, value in settings.items())
        (run_folder / "run.toml").write_text("\n".join(lines) + "\n")
        job = {"command": self.command, "run_file": str(run_folder / "run.toml"), "log": str(log)}
        job |= server
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
        errors = [
            (run_folder / f"log.{rank}.err").read_text(errors="replace") for rank in range(world)
        ]
        outcome = classify(self.command, codes, errors, events)
        shutil.rmtree(run_folder)
        return outcome

    def check(self, row: Row) -> Outcome:
        """Run a row and compare its losses with the baseline's."""
        outcome = self.outcome(row)
        if outcome.kind != "trained" or package_of(self.command) == "ms-compress":
            return outcome
        neutral = {axis: 0 for axis in row if axis in NEUTRAL}
        baseline_row = {**row, **neutral}
        key = json.dumps(baseline_row, sort_keys=True)
        if baseline_row != row:
            if key not in self.plain:
                self.plain[key] = self.outcome(baseline_row)
            baseline = self.plain[key]
            if baseline.kind == "failed":
                return Outcome(kind="failed", line=f"the baseline run: {baseline.line}")
            if baseline.kind == "trained":
                difference = loss_difference(
                    self.bounds(row), outcome, baseline, self.uses_rollouts
                )
                if difference:
                    return Outcome(kind="failed", line=difference)
        return outcome

    def bounds(self, row: Row) -> tuple[float, float]:
        """Relative bounds of the first and the last loss, by the coarsest rounding of a row.

        Another summation order changes the first loss by about 2^-24, and the third by up to 1e-3,
        because AdamW's first steps are nearly the signs of the gradients. bfloat16 has 8 bits:
        logits near 1 are within 2^-8 of float32's, and a loss near 5 within 1%; three steps later
        within 3%. float8 products have 4 bits, with independent errors that a sum averages.
        """
        if self.value(row, "float8") not in (UNSET, "none"):
            return 0.02, 0.05
        is_half = self.value(row, "mixed_precision") not in (UNSET, False)
        return (0.01, 0.03) if is_half else EXACT_BOUNDS

    @property
    def uses_rollouts(self) -> bool:
        """Whether the model generates responses, which rounding can change."""
        return self.command.split()[1] in ("ppo", "grpo", "rloo", "gkd")

    def value(self, row: Row, axis: str) -> Any:
        """Value of an axis in a row; the default if the row has none."""
        return self.axes[axis][row.get(axis, 0)] if axis in self.axes else UNSET

    def resume(self, row: Row, uninterrupted: Outcome) -> Outcome:
        """Kill and resume a row; compare its last loss with the uninterrupted run's."""
        resumed = self.outcome(row, resumed=True)
        equal = resumed.losses and math.isclose(
            resumed.losses[-1], uninterrupted.losses[-1], rel_tol=1e-6
        )
        if resumed.kind == "trained" and (equal or uninterrupted.skipped):
            return uninterrupted
        return Outcome(kind="failed", line=f"resumed after SIGKILL: {resumed}, not {uninterrupted}")

    def examine(self, row: Row, *, resumed: bool, causes: bool) -> tuple[Outcome, Pair]:
        """Run a row, and find the values that cause a refusal or failure."""
        outcome = self.check(row)
        if outcome.kind == "trained" and resumed and package_of(self.command) != "ms-compress":
            outcome = self.resume(row, outcome)
        if outcome.kind == "trained" or not causes:
            return outcome, ()
        return outcome, self.cause(row, outcome)

    def cause(self, row: Row, result: Outcome) -> Pair:
        """Find a minimal set of a row's values that causes the same outcome with default values.

        Keys named in the message are tried first. A default value is part of the cause if another
        value of its key lets the run train, for example when one setting requires another.
        """
        defaults = dict.fromkeys(row, 0)
        outcomes: dict[str, Outcome] = {json.dumps(row, sort_keys=True): result}

        def outcome(items: Mapping[str, int]) -> Outcome:
            trial = defaults | items
            key = json.dumps(trial, sort_keys=True)
            if key not in outcomes:
                run = self.outcome if result.kind == "refused" else self.check
                outcomes[key] = run(trial)
            return outcomes[key]

        pinned: dict[str, int] = {}

        def same(items: Mapping[str, int]) -> bool:
            return outcome(pinned | items).like(result)

        active = {axis: i for axis, i in row.items() if i}
        named = {axis: i for axis, i in active.items() if self.names(result.line, axis, i)}
        common = {axis: active[axis] for axis in ("layout", "model") if axis in active}
        while True:
            choices = (named, common | named, active)
            start = next(few for few in choices if few == active or same(few))
            free = [axis for axis in start if axis not in pinned]
            axes = minimal(free, lambda few: same({axis: row[axis] for axis in few}))
            items = pinned | {axis: row[axis] for axis in axes}
            # A default value that the row does not have may also refuse these values: the cause
            # must do so with the row's own value.
            escapes = (
                axis
                for axis in active
                if axis not in items
                and (axis == "model" or self.names(result.line, axis, 0))
                and not same(items | {axis: row[axis]})
            )
            escape = next(escapes, None)
            if escape is None:
                break
            pinned[escape] = row[escape]
        for axis, values in self.axes.items():
            if axis in items or not (axis == "model" or self.names(result.line, axis, 0)):
                continue
            alternatives = [i for i in range(len(values)) if i != row[axis]]
            if any(outcome(items | {axis: i}).kind == "trained" for i in alternatives):
                items |= {axis: row[axis] if same(items | {axis: row[axis]}) else 0}
        return tuple(sorted(items.items()))

    def names(self, line: str, axis: str, index: int) -> bool:
        """Whether a message names a key or its value."""
        value = self.axes[axis][index]
        words = [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else [str(value)]
        return axis in line or any(len(word) > 2 and word in line for word in words)

    def narrowed(self, items: Pair, row: Row) -> Pair:
        """Extend a refusal by the default values without which `row` trains."""
        defaults = dict.fromkeys(row, 0) | dict(items)
        others = [axis for axis in row if row[axis] != defaults[axis]]

        def escapes(few: Sequence[str]) -> bool:  # must train, not be refused for another reason
            return self.outcome(defaults | {axis: row[axis] for axis in few}).kind == "trained"

        return tuple(sorted([*items, *((axis, 0) for axis in minimal(others, escapes))]))


def unused_port() -> int:
    """Port that nothing listens to."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def minimal(items: list[str], holds: Callable[[Sequence[str]], bool]) -> list[str]:
    """Shrink a list for which `holds` is true until no item can be removed.

    Halves are tried first: ddmin (Zeller and Hildebrandt 2002, IEEE TSE 28(2)).
    """
    parts = 2
    while len(items) > 1:
        size = -(-len(items) // parts)
        chunks = [items[start : start + size] for start in range(0, len(items), size)]
        complements = [[item for item in items if item not in chunk] for chunk in chunks]
        smaller = next(
            (few for few in (*chunks, *complements) if len(few) < len(items) and holds(few)), None
        )
        if smaller is not None:
            items, parts = smaller, 2
        elif size > 1:
            parts *= 2
        else:
            break
    return [] if len(items) == 1 and holds([]) else items


def shape(line: str) -> str:
    """Message without numbers and remedy, to compare causes."""
    return "".join(c for c in line.partition(";")[0] if not c.isdigit())[:80]


def classify(command: str, codes: list[int], errors: list[str], events: Path) -> Outcome:
    """Classify a run by its exit codes, standard error and events."""
    from launch import read_events

    logged = read_events(events)
    steps = [event for event in logged if event.get("kind") == "step"]
    prefix = f"{package_of(command)}: "
    lines = [line for stderr in errors for line in stderr.splitlines()]
    messages = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    text = "\n".join(errors)
    if "Traceback" in text:
        return Outcome(kind="failed", line=" | ".join(text.strip().splitlines()[-3:])[-500:])
    if set(codes) == {2}:
        if len(messages) != 1:
            return Outcome(kind="failed", line=f"refused in {len(messages)} lines: {text[-300:]}")
        line = messages[0]
        if steps:
            return Outcome(kind="failed", line=f"refused after {len(steps)} steps: {line}")
        return Outcome(kind="refused", line=line)
    if set(codes) != {0}:
        return Outcome(kind="failed", line=f"exit codes {codes}: {text.strip()[-400:]}")
    losses = tuple(float(event["loss"]) for event in steps if event.get("loss") is not None)
    if any(not math.isfinite(loss) for loss in losses):
        return Outcome(kind="failed", line=f"losses {losses}")
    if not steps and package_of(command) != "ms-compress":
        return Outcome(kind="failed", line="exit code 0 without a step")
    skipped = any("skip" in str(event.get("kind")) or event.get("skipped") for event in logged)
    return Outcome(kind="trained", losses=losses, skipped=skipped)


def loss_difference(
    bounds: tuple[float, float], outcome: Outcome, baseline: Outcome, uses_rollouts: bool
) -> str:
    """Compare losses with the baseline's (float32, one process); "" if they agree."""
    first, last = bounds
    is_rounded = first > EXACT_BOUNDS[0]
    if (is_rounded and uses_rollouts) or not outcome.losses or not baseline.losses:
        return ""
    pairs = [(outcome.losses[0], baseline.losses[0], first)]
    if not (outcome.skipped or baseline.skipped or uses_rollouts):
        pairs.append((outcome.losses[-1], baseline.losses[-1], last))
    for actual, expected, bound in pairs:
        if abs(actual - expected) > bound * max(abs(expected), 0.1):
            return f"losses {outcome.losses}, but the baseline has {baseline.losses}"
    return ""


def without_paths(line: str, inputs: Path) -> str:
    """Message without the folders of one run."""
    return re.sub(r"^\S*run\.toml: ", "", line.replace(str(inputs), "DIR"))


def label(axes: Mapping[str, list[Any]], items: Any) -> str:
    """Readable form of a combination."""

    def word(value: Any) -> str:
        return "unset" if value is UNSET else toml(value).replace("@", "")

    return ", ".join(f"{axis} = {word(axes[axis][i])}" for axis, i in items)


def to_records(axes: Mapping[str, list[Any]], reasons: Mapping[Any, str]) -> list[dict[str, Any]]:
    """Convert refused combinations to records for a file."""
    return [
        {"values": [[a, axes[a][i]] for a, i in items], "reason": reason}
        for items, reason in sorted(reasons.items())
    ]


@frozen(kw_only=True)
class Progress:
    """Results so far for a command's array.

    Args:
        rows: rows that trained.
        refused: reason of each refused combination.
        confirmed: combinations that other rows refuse too.
        runs: number of launches.
        seconds: total run time.
    """

    rows: tuple[Row, ...] = ()
    refused: Mapping[Pair, str] = {}
    confirmed: frozenset[Pair] = frozenset()
    runs: int = 0
    seconds: float = 0.0


def read_progress(command: str, path: Path) -> Progress:
    """Read saved progress; empty if the axes or values have changed."""
    if not path.exists():
        return Progress()
    saved, axes = json.loads(path.read_text()), axes_of(command)
    if saved["axes"] != json.loads(json.dumps(axes)):
        return Progress()
    refused = from_records(axes, saved["refused"])
    confirmed = from_records(axes, saved["confirmed"])
    return Progress(
        rows=tuple(saved["rows"]),
        refused=refused,
        confirmed=frozenset(confirmed),
        runs=saved["runs"],
        seconds=saved["seconds"],
    )


def write_progress(command: str, path: Path, progress: Progress) -> None:
    """Save progress atomically."""
    axes = axes_of(command)
    confirmed = dict.fromkeys(progress.confirmed, "")
    saved = {
        "axes": axes,
        "rows": progress.rows,
        "refused": to_records(axes, progress.refused),
        "confirmed": to_records(axes, confirmed),
        "runs": progress.runs,
        "seconds": progress.seconds,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(saved))
    path.with_suffix(".new").replace(path)


def from_records(
    axes: Mapping[str, list[Any]], records: Iterable[Mapping[str, Any]]
) -> dict[Pair, str]:
    """Convert records of a file to combinations; skip values that no longer exist."""
    reasons = {}
    for record in records:
        if all(value in axes.get(axis, ()) for axis, value in record["values"]):
            items = sorted((axis, axes[axis].index(value)) for axis, value in record["values"])
            reasons[tuple(items)] = record["reason"]
    return reasons


class ArrayRun:
    """Runs rows of one command until every pair is covered or the time budget is used.

    Args:
        command: package and subcommand.
        inputs: folder of models and data.
        folder: folder for run files and output.
        before: saved progress.
        seed: random seed of the array.
        only: cover only the pairs of this key; None for all.
        budget_s: seconds in which rows may start.
        save: callback for the progress after each row.
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
        self.axes, self.start_time, self.budget_s = axes_of(command), time.monotonic(), budget_s
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
            # Compiling takes longer than the sample.
            self.array.refuse([("compile", self.axes["compile"].index(True))])
        if only is not None:
            self.array.open = {pair for pair in self.array.open if only in dict(pair)}
        self.total = self.array.total if only is None else set(self.array.open)

    @property
    def is_sample(self) -> bool:
        """Whether only a sample of rows runs."""
        return self.budget_s < math.inf

    @property
    def in_time(self) -> bool:
        """Whether another row may start."""
        return time.monotonic() - self.start_time < self.budget_s

    @property
    def progress(self) -> Progress:
        """Progress including this run."""
        return evolve(
            self.before,
            rows=tuple(self.rows),
            refused=self.reasons,
            confirmed=frozenset(self.confirmed & set(self.reasons)),
            runs=self.before.runs + self.runner.count,
            seconds=self.before.seconds + time.monotonic() - self.start_time,
        )

    def run(self) -> dict[str, Any]:
        """Check known refusals, cover the pairs, and confirm refusals in other rows."""
        with ThreadPoolExecutor(WORKERS) as pool:
            if self.is_sample:
                combinations = random.Random(self.seed).sample(
                    sorted(self.reasons), min(SAMPLED_REFUSALS, len(self.reasons))
                )
            elif self.rows:  # resumed: the first run checked them
                combinations = []
            else:
                combinations = sorted(self.reasons)
            self.check_known(pool, combinations)
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
            "refused": to_records(self.axes, self.reasons),
            "failures": self.failures,
            "seconds": round(self.progress.seconds),
        }

    def check_known(self, pool: ThreadPoolExecutor, combinations: Sequence[Pair]) -> None:
        """Run known refusals with default values; each must still give the recorded message."""
        defaults = dict.fromkeys(self.axes, 0)
        for items, outcome in zip(
            combinations,
            pool.map(self.runner.outcome, [defaults | dict(items) for items in combinations]),
            strict=True,
        ):
            line = without_paths(outcome.line, self.inputs)
            hidden = not self.array.allowed(defaults | dict(items), ignored=items)
            if self.is_sample:
                if outcome.kind != "refused" or line != self.reasons[items]:
                    self.fail(items, f"recorded as {self.reasons[items]!r}, but got {outcome}")
            elif outcome.kind == "refused" and not hidden:
                if line != self.reasons[items]:
                    self.say(f"  reworded: {self.words(items)}: {line}")
                self.reasons[items] = line
            else:  # it trains, or the default values are refused for another reason
                del self.reasons[items]
                self.array.allow(items)

    def cover(self, pool: ThreadPoolExecutor) -> None:
        """Run rows until all pairs are covered."""
        running: dict[Future[tuple[Outcome, Pair]], Row] = {}
        while True:
            while self.in_time and len(running) < WORKERS and (row := self.array.next()):
                self.count += 1
                resumed = (self.count + self.seed) % RESUME_INTERVAL == 0
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

    def learn(self, row: Row, outcome: Outcome, items: Pair) -> None:
        """Count the pairs of a row that trained, or exclude a refused or failing combination."""
        if outcome.kind == "trained":
            self.array.train(row)
            self.rows.append(row)
        elif outcome.kind == "failed":
            self.fail(items or tuple(sorted(row.items())), outcome.line)
        elif items:
            self.reasons[items] = without_paths(outcome.line, self.inputs)
            self.array.refuse(items)
            self.say(f"  refused: {self.words(items)}: {self.reasons[items]}")
        else:  # samples do not search for causes: exclude only this row
            self.array.refuse(row.items())

    def fail(self, items: Pair, reason: str) -> None:
        """Record a failure; later rows do not contain the combination."""
        self.array.failed.add(items)
        self.failures.append({"row": self.words(items), "why": reason})
        self.say(f"  FAILED: {self.words(items)}\n    {reason}")

    def confirm(self, pool: ThreadPoolExecutor) -> bool:
        """Try refused combinations in other rows; return whether one needs a default value."""
        unconfirmed = [items for items in sorted(self.reasons) if items not in self.confirmed]
        changed = False
        for items in unconfirmed:
            count = CONFIRMATIONS.get(len(items), 2)
            rows = [row for _ in range(count) if (row := self.array.row_with(items))]
            for row, outcome in zip(rows, pool.map(self.runner.outcome, rows), strict=True):
                if outcome.kind == "failed":
                    self.fail(tuple(sorted(row.items())), outcome.line)
                if outcome.kind == "trained" and items in self.reasons:
                    self.array.allow(items)
                    narrow = self.runner.narrowed(items, row)
                    self.reasons[narrow] = self.reasons.pop(items)
                    self.array.refuse(narrow)
                    self.say(f"  refused only with: {self.words(narrow)}")
                    changed = True
            self.confirmed.add(items)
            self.save(self.progress)
        return changed

    def words(self, items: Pair) -> str:
        """Readable form of a combination, or of a full row without its default values."""
        shown = [item for item in items if item[1]] if len(items) == len(self.axes) else items
        return label(self.axes, shown)

    def say(self, line: str) -> None:
        """Print a line immediately."""
        print(line, flush=True)

    def say_progress(self) -> None:
        """Print the coverage so far."""
        covered = 1 - len(self.array.open & self.total) / max(1, len(self.total))
        progress = self.progress
        self.say(
            f"{self.command}: {covered:4.0%} of {len(self.total)} pairs, {len(self.rows)} rows,"
            f" {progress.runs} runs, {progress.seconds:.0f} s"
        )


def refused_file(command: str) -> Path:
    """File with a command's refused combinations."""
    return REFUSED / f"{command.replace(' ', '-')}.json"


def read_refused(command: str) -> list[dict[str, Any]]:
    """Known refused combinations of a command."""
    file = refused_file(command)
    return json.loads(file.read_text()) if file.exists() else []


def read_coverage() -> dict[str, dict[str, int]]:
    """Counts of the last full run of each command."""
    return json.loads(COVERAGE.read_text()) if COVERAGE.exists() else {}


def write_refused(command: str, refused: list[dict[str, Any]]) -> None:
    """Save refused combinations for later runs and for the page."""
    REFUSED.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(record) for record in refused)
    refused_file(command).write_text(f"[\n{lines}\n]\n")


def record(command: str, result: Mapping[str, Any]) -> None:
    """Write the counts, the refused combinations and the page."""
    write_refused(command, result["refused"])
    counts = {key: result[key] for key in ("runs", "rows", "pairs", "covered", "seconds")}
    counts["failed"] = len(result["failures"])
    coverage = read_coverage() | {command: counts}
    COVERAGE.write_text(json.dumps(coverage, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(write_page({name: read_refused(name) for name in COMMANDS}, coverage))


def main() -> int:
    """Run the selected arrays, print a table, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", nargs="*", help="packages or commands; default: all")
    parser.add_argument("--only", help="cover only the pairs of this key")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the arrays")
    parser.add_argument("--sample", type=float, default=math.inf, help="total seconds")
    parser.add_argument("--fresh", action="store_true", help="forget known refusals and progress")
    options = parser.parse_args()
    commands = [
        command
        for command in COMMANDS
        if not options.commands
        or command in options.commands
        or package_of(command) in options.commands
    ]
    full = options.only is None and options.sample == math.inf
    if not full:
        random.Random(options.seed).shuffle(commands)
    results = []
    with tempfile.TemporaryDirectory() as name:
        inputs = write_inputs(Path(name) / "inputs")
        start_time = time.monotonic()
        for number, command in enumerate(commands):
            remaining_s = options.sample - (time.monotonic() - start_time)
            if remaining_s <= 0:
                break
            path = PROGRESS / f"{command.replace(' ', '-')}.json"
            if full and options.fresh:
                path.unlink(missing_ok=True)
            before = read_progress(command, path) if full else Progress()
            if not before.rows and not options.fresh:
                before = Progress(refused=from_records(axes_of(command), read_refused(command)))
            folder = Path(name) / str(number)
            folder.mkdir()
            result = ArrayRun(
                command,
                inputs,
                folder,
                before,
                seed=options.seed,
                only=options.only,
                budget_s=remaining_s / (len(commands) - number),
                save=partial(write_progress, command, path) if full else lambda _: None,
            ).run()
            results.append(result)
            if full:
                record(command, result)
                if not result["failures"]:
                    path.unlink(missing_ok=True)
    names = ("runs", "pairs", "covered", "refused", "failed", "s")
    print(f"\n{'command':20}", *(f"{name:>8}" for name in names))
    for result in results:
        covered = f"{result['covered'] / max(1, result['pairs']):.0%}"
        counts = (len(result["refused"]), len(result["failures"]), result["seconds"])
        cells = (result["runs"], result["pairs"], covered, *counts)
        print(f"{result['command']:20}", *(f"{cell:>8}" for cell in cells))
    return int(any(result["failures"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
