"""Compare rollouts of the built-in generator and of vLLM in one GRPO run each.

The same Llama with 6.84M parameters, prompts and settings as `peers.py`, float32, one thread for
each process; wall time, as vLLM runs in other processes. The first step, in which vLLM starts and
compiles, is not counted.

    python packages/ms-align/benchmarks/vllm_rollouts.py --python VLLM/bin/python
"""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tiny import BATCH, GROUP, RESPONSE, causal, decoder, prompts

from ms_align import GRPOTrainer, Sample, Sampling
from ms_align.engines.local import LocalEngine
from ms_align.rollouts.generators import rollout_engine_builder
from ms_align.rollouts.vllm.local_server import LocalServer
from ms_align.rollouts.vllm.options import VllmOptions

STEPS = 6


def spread(samples: Sequence[Sample]) -> list[float]:
    """Reward that differs within every group."""
    return [sum(sample.response_tokens) % 7 / 6 for sample in samples]


def measure_rollouts(name: str, folder: Path, vllm: VllmOptions | None, batch: int) -> None:
    """Print tokens per second of generation, and seconds per weight update."""
    policy = LocalEngine(decoder())
    engine = rollout_engine_builder(name)(
        policy, max_num_seqs=batch, decode=None, vllm=vllm, folder=folder
    )
    rows, sampling = prompts(batch // GROUP), Sampling(max_new_tokens=RESPONSE)
    generation, updates = [], []
    for version in range(STEPS):
        start = perf_counter()
        engine.update_weights(version)
        middle = perf_counter()
        responses = engine.generate(rows, sampling, count=GROUP, seed=version)
        end = perf_counter()
        if version:
            updates.append(middle - start)
            generation.append(int(responses.lengths.sum()) / (end - middle))
    engine.close()
    print(
        f"{name:6} batch {batch:3}: {median(generation):7.0f} tokens/s "
        f"({min(generation):.0f} to {max(generation):.0f}), "
        f"{median(updates):.3f} s per weight update",
        flush=True,
    )


def measure_steps(name: str, folder: Path, vllm: Mapping[str, Any] | None, batch: int) -> None:
    """Print seconds per GRPO step, with generation."""
    times: list[float] = []

    def on_event(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "step":
            times.append(perf_counter())

    GRPOTrainer(
        policy_model=decoder(),
        reward_model=spread,
        learning_rate=1e-4,
        steps=STEPS,
        batch_size=batch,
        num_generations=GROUP,
        max_new_tokens=RESPONSE,
        max_num_seqs=batch,
        stop_token_ids=(),
        output_dir=folder,
        on_event=on_event,
        progress=False,
        generator=name,
        vllm=vllm,
    ).optimize(prompts(64))
    steps = [after - before for before, after in pairwise(times)]
    print(
        f"{name:6} batch {batch:3}: {median(steps):.2f} s per GRPO step "
        f"({min(steps):.2f} to {max(steps):.2f})",
        flush=True,
    )


def main() -> None:
    """Run both engines, with one server for all of vLLM's runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--batch", type=int, action="append", help="responses per rollout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    arguments = ["--dtype", "float32", "--max-model-len", "256", "--enforce-eager"]
    with tempfile.TemporaryDirectory() as scratch:
        causal().save_pretrained(Path(scratch, "start"))
        server = LocalServer(
            VllmOptions(python=options.python, arguments=arguments),
            vocabulary=None,
            log_path=Path(scratch, "vllm-server.log"),
        )
        start = perf_counter()
        server.start(Path(scratch, "start"))
        print(f"vLLM started in {perf_counter() - start:.0f} s", flush=True)
        running = {"url": server.connection.url}
        for batch in options.batch or (BATCH, 4 * BATCH):
            for name in ("vllm", "policy"):
                folder = Path(scratch, f"{name}-{batch}")
                servers = VllmOptions(**running) if name == "vllm" else None
                measure_rollouts(name, folder / "rollouts", servers, batch)
                measure_steps(name, folder / "steps", running if servers else None, batch)
        server.close()


if __name__ == "__main__":
    main()
