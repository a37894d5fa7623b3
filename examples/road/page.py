"""Draw the road as one page from the records of its steps; the page needs no network.

Run it in the road's folder: python .../examples/road/page.py --out road.html
"""

import argparse
import io
import json
import os
import platform
import re
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
from matplotlib.figure import Figure

TASKS = ("add", "describe", "implement")
Event = dict[str, Any]
Points = list[tuple[float, float]]


def read_json(path: Path) -> Any:
    """Read a JSON file; None if it does not exist."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def read_events(path: Path) -> list[Event]:
    """Read the events of a run, without a last line that a crash cut short."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def series(events: Sequence[Event], kind: str, field: str, x: str = "step") -> Points:
    """Return (x, value) of a field; a resumed run's later record of a step wins."""
    rows = [event for event in events if event["kind"] == kind and x in event]
    return sorted({e[x]: e[field] for e in rows if isinstance(e.get(field), int | float)}.items())


def plot(
    title: str,
    lines: dict[str, Points],
    *,
    x: str,
    y: str,
    markers: str = "",
    joined: bool = True,
) -> str:
    """Draw named lines and return an SVG element.

    Args:
        title: title of the plot.
        lines: points by name.
        x: label of the x axis.
        y: label of the y axis.
        markers: name of the line that also gets dots.
        joined: draw lines; False draws dots only.
    """
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.size": 9}):
        figure = Figure(figsize=(5, 3), layout="constrained")
        axes = figure.subplots()
        for name, points in lines.items():
            has_dots = name == markers or not joined
            axes.plot(
                [point[0] for point in points],
                [point[1] for point in points],
                label=name,
                marker="o" if has_dots else None,
                linestyle="-" if joined else "",
                markersize=3,
            )
        if not any(lines.values()):
            axes.text(0.5, 0.5, "nothing was recorded", ha="center", transform=axes.transAxes)
        axes.set(title=title, xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
        if len(lines) > 1:
            axes.legend()
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata={"Date": None})
    return svg.getvalue()[svg.getvalue().index("<svg") :]


def training_plots(events: dict[str, list[Event]]) -> list[str]:
    """Return the curves of all four trainings as SVG elements."""
    pretrain, sft, reward, ppo = events.values()
    step = "optimizer step"
    rollouts = [event for event in ppo if event["kind"] == "rollout"]
    return [
        plot(
            "Pre-training: loss",
            {
                "training": series(pretrain, "step", "loss"),
                "held out": series(pretrain, "evaluate", "held_out_loss"),
            },
            x=step,
            y="nats per token",
            markers="held out",
        ),
        plot(
            "Instruction tuning: loss of each task",
            {task: series(sft, "tasks", f"loss.{task}") for task in TASKS},
            x=step,
            y="nats per token",
        ),
        plot(
            "Instruction tuning: sampling probability of each task",
            {task: series(sft, "tasks", f"probability.{task}") for task in TASKS},
            x=step,
            y="probability",
        ),
        plot(
            "Reward model: accuracy on pairs",
            {
                "training": series(reward, "step", "accuracy"),
                "held out": series(reward, "evaluate", "held_out_accuracy"),
            },
            x=step,
            y="accuracy",
            markers="held out",
        ),
        plot(
            "PPO: share of right sums in rollouts",
            {"rollouts": series(ppo, "rollout", "reward.right", x="rollout")},
            x="rollout",
            y="share",
        ),
        plot(
            "PPO: reward against KL divergence",
            {"rollouts": [(event["kl"], event["reward"]) for event in rollouts]},
            x="KL of a response to the tuned model, nats",
            y="reward",
            joined=False,
        ),
    ]


def planned_layout(events: Sequence[Event]) -> str:
    """Return a sentence on the planned layout of pre-training and its predicted step time."""
    plan = next((event for event in events if event["kind"] == "plan"), None)
    if plan is None:
        return ""
    times = [event["time_s"] for event in events if event["kind"] == "step"]
    durations = [end - start for start, end in pairwise(times)]
    measured = f"; the median step took {statistics.median(durations):.2f} s" if durations else ""
    return (
        f"The planner chose the layout {plan['layout']} for pre-training and predicted"
        f" {plan['predicted_step_s']:.2f} s per step{measured}."
    )


def export_rows(answers: Any, evaluation: Any, folder: Path) -> list[dict[str, Any]]:
    """Return accuracy, size and speed of each model."""
    measured = {row["folder"]: row for row in (evaluation or {}).get("results", [])}
    rows = []
    for model in (answers or {}).get("models", []):
        files = (folder / model["folder"]).glob("model.*")
        rows.append(
            {
                **measured.get(model["folder"], {}),
                **model,  # overrides equal names of the measurement
                "correct_percent": 100 * model["correct"] / model["asked"],
                "megabytes": sum(path.stat().st_size for path in files) / 1e6,
            }
        )
    return rows


def render(folder: Path) -> str:
    """Return the page as HTML; steps that did not run leave their sections empty."""
    runs = ("pretrain", "sft", "reward", "ppo")
    events = {run: read_events(folder / run / "events.jsonl") for run in runs}
    answers = read_json(folder / "answers.json")
    evaluation = read_json(folder / "report" / "report.json")
    done = sorted((folder / "done").glob("*.json"), key=lambda path: path.stat().st_mtime)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["paragraphs"] = lambda text: re.sub(r"\s*\n\s*\n\s*", "\n\n", text)
    return environment.get_template("page.html.jinja").render(
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        plots=training_plots(events),
        layout=planned_layout(events["pretrain"]),
        sampled=[share for _, share in series(events["ppo"], "evaluate", "right")],
        answers=answers,
        models=export_rows(answers, evaluation, folder),
        durations={path.stem: read_json(path) for path in done},
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("road.html"), help="page to write")
    options = parser.parse_args()
    options.out.write_text(render(Path()), encoding="utf-8")
    print(f"the page is {options.out.resolve()}")
