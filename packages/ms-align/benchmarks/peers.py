"""Compare speed with TRL and transformers: the same work, one process per side, alternating rounds.

Reports samples or tokens per second of CPU time, with one thread. GRPO is compared with TRL 1.16.
PPO was removed after TRL 1.12, so it is compared with 1.12 in a separate environment, which is
created unless `--trl-1-12` names one.

    nox -s "peers(ms-align)" -- --rounds 3 [--trl-1-12 PYTHON] [--only ppo] [--side ppo-decoder]
"""

import argparse
import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
COMPARISONS = {
    "grpo": ("grpo-trl", ["grpo", "grpo-decoder"]),
    "ppo": ("ppo-trl", ["ppo", "ppo-shared", "ppo-decoder", "ppo-decoder-shared"]),
    "rollout": ("generate", ["rollout", "rollout-decoder"]),
    "groups": ("generate-groups", ["rollout-groups"]),
    "full": ("generate-full", ["rollout-full"]),
}


def main() -> None:
    """Print medians with their range, and the median of the ratios within a round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--trl-1-12", metavar="PYTHON", help="interpreter of an environment with TRL 1.12"
    )
    parser.add_argument("--only", choices=[*COMPARISONS, "sft"], action="append")
    parser.add_argument("--side", action="append", help="run only this side of ours; default: all")
    options = parser.parse_args()
    old = options.trl_1_12
    for name in options.only or COMPARISONS:
        if name == "sft":  # measured by peers_sft.py
            continue
        peer, sides = COMPARISONS[name]
        sides = [side for side in sides if not options.side or side in options.side]
        if peer == "ppo-trl" and old is None:
            old = environment()
        python = old if peer == "ppo-trl" else sys.executable
        figures: dict[str, list[float]] = {side: [] for side in (peer, *sides)}
        for _ in range(options.rounds):
            for side in figures:
                figures[side].append(measure(python if side == peer else sys.executable, side))
        for side, rates in figures.items():
            ratios = [a / b for a, b in zip(rates, figures[peer], strict=True)]
            print(
                f"{name:8} {side:20} {median(rates):9.2f} /s ({min(rates):.2f} to "
                f"{max(rates):.2f})  {median(ratios):5.2f} x ({min(ratios):.2f} to "
                f"{max(ratios):.2f})",
                flush=True,
            )


def measure(python: str, side: str) -> float:
    """Return the rate of one side, measured in a process with one thread."""
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [python, str(HERE / "side.py"), side]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **one_thread}, check=False
    )
    if run.returncode:
        sys.exit(f"{side} failed:\n{run.stderr[-2000:]}")
    return float(json.loads(run.stdout.splitlines()[-1])["figure"])


def environment() -> str:
    """Return the interpreter of an environment with TRL 1.12; create it here if needed."""
    folder = Path(sys.prefix).with_name("trl-1.12")
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        venv.create(folder, with_pip=True)
        torch = os.environ.get("MS_TORCH", "torch==2.13.0")
        for requirement in (torch, "trl==1.12.0"):
            subprocess.run([python, "-m", "pip", "install", "-q", requirement], check=True)
    return python


if __name__ == "__main__":
    main()
