"""Draws the road as one page, from what its stages recorded; the page needs no network.

Run it in the road's folder: python .../examples/road/page.py . --out road.html
"""

import argparse
import json
import os
import platform
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from chart import Line, curves
from stages import TASKS

STYLE = Path(__file__).with_name("page.css")
LAID_OUT = ("pretrain", "sft", "reward", "ppo")
"""Stages with events."""
Cells = Sequence[Sequence[str]]


def read_json(path: Path) -> Any:
    """A JSON document; None where there is none, as of a stage that was skipped."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def read_events(path: Path) -> list[dict[str, Any]]:
    """Events of a run, without lines that a crash cut short."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def series(events: Iterable[dict[str, Any]], kind: str, y: str, x: str = "step") -> list[Any]:
    """Points of a number over another, as often as it was recorded; a step's last word counts."""
    rows = [event for event in events if event["kind"] == kind]
    found = {e[x]: e[y] for e in rows if isinstance(e.get(y), int | float) and x in e}
    return sorted(found.items())


def charts(events: dict[str, list[dict[str, Any]]]) -> str:
    """The curves of all trainings."""
    parts = (
        learned("Pre-training: loss a token", events["pretrain"], "loss", y_name="nats"),
        by_task("Instruction tuning: loss of each task", events["sft"], "loss", y_name="nats"),
        by_task(
            "Instruction tuning: how often each task is drawn",
            events["sft"],
            "probability",
            y_name="probability",
        ),
        learned("Reward model: pairs put in order", events["reward"], "accuracy", y_name="share"),
        *optimized(events["ppo"]),
    )
    return f'<div class="charts">{"".join(parts)}</div>'


def learned(title: str, events: Sequence[dict[str, Any]], field: str, *, y_name: str) -> str:
    """The curve of a number in training, and on what was held out."""
    lines = [
        Line(name="training", points=series(events, "step", field)),
        Line(name="held out", points=series(events, "evaluate", f"held_out_{field}"), marked=True),
    ]
    return curves(title, lines, x_name="updates", y_name=y_name)


def by_task(title: str, events: Sequence[dict[str, Any]], field: str, *, y_name: str) -> str:
    """A curve of a number for each task."""
    lines = [Line(name=task, points=series(events, "tasks", f"{field}.{task}")) for task in TASKS]
    return curves(title, lines, x_name="updates", y_name=y_name)


def optimized(events: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The curves of PPO: how many sums are right, and what the reward costs in distance."""
    right = series(events, "rollout", "reward.right", x="rollout")
    rewards = right or series(events, "rollout", "reward", x="rollout")
    updates = max((event["step"] for event in events if event["kind"] == "step"), default=1)
    each = updates / max((number for number, _ in rewards), default=1)
    held_out = series(events, "evaluate", "right")
    yield curves(
        "PPO: right sums, of fresh samples",
        [
            Line(name="rollouts", points=[(number * each, share) for number, share in rewards]),
            Line(name="held out", points=held_out, marked=True),
        ],
        x_name="updates",
        y_name="share",
    )
    costs = [(event["kl"], event["reward"]) for event in events if event["kind"] == "rollout"]
    yield curves(
        "PPO: reward against distance from where it began",
        [Line(name="rollouts", points=costs, marked=True, joined=False)],
        x_name="KL of a response, nats",
        y_name="reward",
    )


def planned(events: Sequence[dict[str, Any]]) -> str:
    """Which layout the pre-training was planned to have, and how near the prediction came."""
    plan = next((event for event in events if event["kind"] == "plan"), None)
    if plan is None:
        return ""
    times = [event["time_s"] for event in events if event["kind"] == "step"]
    steps = [after - before for before, after in pairwise(times)]
    took = f", and the median took {statistics.median(steps):.2f} s" if steps else ""
    return (
        f"<p>The planner chose the layout {escape(plan['layout'])} for the pre-training; it"
        f" predicted {plan['predicted_step_s']:.2f} s an update{took}.</p>"
    )


def table(head: Sequence[str], rows: Cells, *, texts: int = 1) -> str:
    """A table that scrolls by itself; the first `texts` columns are words, the others numbers."""
    classes = ["t"] * texts + ["n"] * (len(head) - texts)
    cells = [
        "".join(
            f'<td class="{c}">{escape(text)}</td>' for c, text in zip(classes, row, strict=True)
        )
        for row in rows
    ]
    heads = "".join(f'<th class="{c}">{escape(t)}</th>' for c, t in zip(classes, head, strict=True))
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="scroll"><table><tr>{heads}</tr>{body}</table></div>'


def stages_table(folder: Path) -> tuple[str, float]:
    """What each stage took; and all of them together, in seconds."""
    stamps = [
        (path.stem, read_json(path))
        for path in sorted((folder / "stages").glob("*.json"), key=lambda one: one.stat().st_mtime)
    ]
    rows = [
        [name, f"{s['wall_s']:.0f}", f"{s['processor_s']:.0f}", f"{s['load']:.1f}"]
        for name, s in stamps
        if s.get("made")
    ]
    total = sum(s["wall_s"] for _, s in stamps)
    return table(("stage", "wall, s", "processor, s", "load at its end"), rows), total


def exports_table(answers: Any, evaluation: Any, folder: Path) -> str:
    """Size, speed and quality of each way to run the model."""
    measured = {Path(one["folder"]).name: one for one in (evaluation or {}).get("results", [])}
    places = {
        "pre-trained": "pretrain/model",
        "tuned": "sft/model",
        "optimized by PPO": "ppo/model",
        "compressed-tensors": "deploy/ct",
        "ONNX": "deploy/onnx",
        "GGUF": "deploy/gguf",
    }
    rows = []
    for told in (answers or {}).get("told", []):
        place = folder / places[told["model"]]
        known = (
            measured.get(place.name, {}) if told["model"] not in ("pre-trained", "tuned") else {}
        )
        size = sum(path.stat().st_size for path in place.glob("model.*")) / 1e6
        rows.append(
            [
                told["model"],
                told["runtime"],
                f"{100 * told['right'] / told['asked']:.1f} %",
                f"{size:.2f}",
                number(known.get("perplexity"), "{:.3f}"),
                number(known.get("prefill_tokens_per_s"), "{:,.0f}"),
                number(known.get("decode_tokens_per_s"), "{:,.0f}"),
            ]
        )
    head = ("model", "runtime", "sums right", "MB", "perplexity", "prefill, tokens/s", "decode")
    return table(head, rows, texts=2)


def number(value: float | None, form: str) -> str:
    """A number for people, or a dash where it was not measured."""
    return "-" if value is None else form.format(value)


def samples(answers: Any) -> str:
    """What each model says to the same questions, before and after."""
    if not answers:
        return ""
    told = answers["told"]
    head = ["model", *answers["questions"]]
    rows = [["right", *answers["known"]], *([one["model"], *one["sums"]] for one in told)]
    parts = []
    for at, (code, known) in enumerate(
        zip(answers["functions"], answers["docstrings"], strict=True)
    ):
        lines = [("the library", known), *((one["model"], one["docstrings"][at]) for one in told)]
        said = [[model, re.sub(r"\s*\n\s*\n\s*", "\n\n", text)] for model, text in lines]
        parts.append(f"<pre>{escape(code)}</pre>{table(('model', 'docstring'), said, texts=2)}")
    described = "".join(f"<section>{part}</section>" for part in parts)
    return f'{table(head, rows, texts=len(head))}<div class="samples">{described}</div>'


def waiting(summary: Any) -> str:
    """The waiting ledger of the pre-training: which rank waited for which, and for what."""
    ledger = (summary or {}).get("ledger") or {}
    if not ledger.get("matched"):
        return '<p class="soft">no collective was recorded</p>'
    rows = [
        [f"rank {rank}", phase, f"{amount / 1e6:.1f}"] for rank, phase, amount in ledger["charged"]
    ]
    waited = ", ".join(f"rank {rank} {amount / 1e6:.1f} ms" for rank, amount in ledger["waited"])
    suspect = ledger.get("suspect")
    who = (
        f"Rank {suspect['rank']} in {escape(str(suspect['phase']))} caused most of it."
        if suspect and suspect.get("confidence", 0) >= 0.9
        else "No rank stands out."
    )
    return (
        f"<p>{ledger['matched']:,} collectives of the recorded steps; waited: {waited}. {who}"
        ' <a href="waiting.html">The whole profile</a></p>'
        + table(("caused by", "while in", "waiting, ms"), rows, texts=2)
    )


def sampled(events: Sequence[dict[str, Any]]) -> str:
    """How much more fresh samples of held-out prompts were right after PPO than before."""
    shares = [share for _, share in series(events, "evaluate", "right")]
    return f"{100 * shares[0]:.1f} to {100 * shares[-1]:.1f} %" if len(shares) > 1 else ""


def tiles(answers: Any, optimized: Sequence[dict[str, Any]], total_s: float) -> str:
    """The numbers that one looks for first."""
    told = {one["model"]: one for one in (answers or {}).get("told", [])}
    found = [
        (f"{100 * told[name]['right'] / told[name]['asked']:.1f} %", what)
        for name, what in (
            ("tuned", "of held-out sums are right after tuning"),
            ("optimized by PPO", "after PPO, the likeliest token each time"),
            ("ONNX", "after export, in onnxruntime"),
        )
        if name in told
    ]
    if raised := sampled(optimized):
        found.append((raised, "of fresh samples are right, before and after PPO"))
    found.append((f"{total_s / 60:.1f} min", "all stages together"))
    inner = "".join(f"<div><b>{value}</b><span>{what}</span></div>" for value, what in found)
    return f'<div class="tiles">{inner}</div>'


def render(folder: Path) -> str:
    """The page as HTML."""
    events = {name: read_events(folder / name / "events.jsonl") for name in LAID_OUT}
    answers = read_json(folder / "facts" / "answers.json")
    evaluation = read_json(folder / "facts" / "evaluate.json")
    stages, total_s = stages_table(folder)
    cores = len(os.sched_getaffinity(0))
    parts = [
        ("Trained", planned(events["pretrain"]) + charts(events)),
        ("Size, speed and quality", exports_table(answers, evaluation, folder)),
        ("Before and after", samples(answers)),
        ("Who waited for whom", waiting(read_json(folder / "facts" / "waiting.json"))),
        ("What each stage took", stages),
    ]
    body = "".join(f"<section><h2>{escape(head)}</h2>{part}</section>" for head, part in parts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>The road</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE.read_text('utf-8')}</style></head><body><header><h1>The road</h1>"
        "<p>From the source of Python's own library to a model that answers in three runtimes."
        f" Python {platform.python_version()}, {cores} cores, no accelerator, nothing downloaded."
        f"</p></header><main>{tiles(answers, events['ppo'], total_s)}{body}</main></body></html>\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("road", type=Path, help="the road's folder")
    parser.add_argument("--out", type=Path, default=Path("road.html"), help="the page to write")
    given = parser.parse_args()
    aside = given.out.with_suffix(".part")
    aside.write_text(render(given.road), encoding="utf-8")
    aside.replace(given.out)
    print(f"the page is {given.out.resolve()}")
