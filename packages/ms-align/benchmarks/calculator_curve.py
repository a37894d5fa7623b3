"""Draw the learning curve of `examples/align/grpo_calculator.py`, next to its control.

python packages/ms-align/benchmarks/calculator_curve.py grpo-calculator --out environments.svg
"""

import argparse
import json
from pathlib import Path

WIDTH, HEIGHT, MARGIN = 620, 260, 44
LINES = {"run": ("#1f6feb", "reward of the answer"), "shuffled": ("#9a6700", "shuffled (control)")}


def curve(run: Path) -> list[tuple[float, float]]:
    """Return the share of right answers and the calls per answer of each rollout."""
    events = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    rollouts = [event for event in events if event["kind"] == "rollout"]
    return [(rollout["reward"], rollout["tool_calls"]) for rollout in rollouts]


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("environments.svg"))
    options = parser.parse_args()
    curves = {name: curve(options.folder / name) for name in LINES}
    longest = max(map(len, curves.values()))
    inner_width, inner_height = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" role="img">',
        "<title>Share of right answers and calls per answer over the updates</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        y = HEIGHT - MARGIN - share * inner_height
        parts.append(f'<path d="M{MARGIN} {y:.0f}H{WIDTH - MARGIN}" stroke="#d0d7de"/>')
        parts.append(f'<text x="8" y="{y + 4:.0f}">{share:.0%}</text>')
    for index, (name, points) in enumerate(curves.items()):
        color, label = LINES[name]
        for column, dashes in ((0, ""), (1, ' stroke-dasharray="4 3"')):
            path = " ".join(
                f"{'L' if position else 'M'}"
                f"{MARGIN + position * inner_width / max(longest - 1, 1):.1f} "
                f"{HEIGHT - MARGIN - min(point[column], 1.0) * inner_height:.1f}"
                for position, point in enumerate(points)
            )
            parts.append(
                f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2"{dashes}/>'
            )
        parts.append(f'<text x="{MARGIN + index * 200}" y="20" fill="{color}">{label}</text>')
    caption = f"solid: right answers; dashed: calls per answer; {longest} updates"
    parts.append(f'<text x="{MARGIN}" y="{HEIGHT - 12}">{caption}</text>')
    options.out.write_text("\n".join([*parts, "</svg>", ""]))


if __name__ == "__main__":
    main()
