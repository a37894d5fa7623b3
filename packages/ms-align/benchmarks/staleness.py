"""Seconds per GRPO step with generation that runs ahead by 0, 1 and 2 updates.

    python packages/ms-align/benchmarks/staleness.py
    python packages/ms-align/benchmarks/staleness.py --url http://127.0.0.1:8000

The Llama with 6.84M parameters of `peers.py`, float32, one thread for each of generator and
learner, wall time. Without --url, a server of the tests with vLLM's endpoints stands in for vLLM:
it generates in another process with ms-align's generator. The first steps fill the queue and are
not counted.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tiny import BATCH, GROUP, decoder, prompts

from ms_align import GRPOTrainer, Sample
from ms_align.models.folder import save_model

STEPS, SKIPPED, TOKENS = 8, 3, 32
FAKE_SERVER = Path(__file__).parents[1] / "tests" / "fake_vllm.py"


def spread(samples: Sequence[Sample]) -> list[float]:
    """Reward that differs within every group."""
    return [sum(sample.response_tokens) % 7 / 6 for sample in samples]


def measure(name: str, folder: Path, max_staleness: int, url: str | None) -> None:
    """Print seconds per step, waiting times and distance between sampler and learner."""
    steps: list[dict[str, Any]] = []

    def on_event(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "step":
            steps.append({**fields, "time_s": perf_counter()})

    GRPOTrainer(
        policy_model=decoder(),
        reward_model=spread,
        learning_rate=1e-4,
        steps=STEPS,
        batch_size=BATCH,
        num_generations=GROUP,
        max_new_tokens=TOKENS,
        stop_token_ids=(),
        output_dir=folder,
        on_event=on_event,
        progress=False,
        generator="vllm" if url else "policy",
        vllm={"url": url} if url else None,
        max_staleness=max_staleness,
    ).optimize(prompts(64))
    times = [step["time_s"] for step in steps]
    seconds = [times[i] - times[i - 1] for i in range(SKIPPED, STEPS)]
    counted = steps[SKIPPED:]
    learner, generator, staleness, kl = (
        median(step.get(field, 0.0) for step in counted)
        for field in ("learner_wait_s", "generator_wait_s", "staleness", "sampler_kl")
    )
    print(
        f"| {name} | {max_staleness} | {median(seconds):.2f} ({min(seconds):.2f} to "
        f"{max(seconds):.2f}) | {learner:.2f} | {generator:.2f} | {staleness:.0f} | {kl:.1e} |",
        flush=True,
    )


def main() -> None:
    """Measure the built-in generator, then a server."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", help="a running vLLM server, see docs/align/vllm.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        for ahead in range(3):
            measure("built-in", Path(scratch, f"policy-{ahead}"), ahead, None)
        if options.url:
            for ahead in range(3):
                measure("vLLM", Path(scratch, f"vllm-{ahead}"), ahead, options.url)
            return
        save_model(decoder(), Path(scratch, "start"))
        server = subprocess.Popen(
            [sys.executable, str(FAKE_SERVER), str(Path(scratch, "start"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        assert server.stdin is not None
        url = server.stdout.readline().strip()
        for ahead in range(3):
            measure("test server", Path(scratch, f"server-{ahead}"), ahead, url)
        server.stdin.close()
        server.wait()


if __name__ == "__main__":
    main()
