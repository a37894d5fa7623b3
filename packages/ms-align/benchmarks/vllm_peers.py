"""Rollouts and GRPO steps with one vLLM server, next to plain requests and to TRL, alternating.

    TRL/bin/python packages/ms-align/benchmarks/vllm_peers.py --python VLLM/bin/python

The Llama with 6.84M parameters of `peers.py`, the same prompts and server for all, float32, one
thread for each process, wall time. The first round, in which vLLM compiles, is not counted.

- Rollouts: one request with all prompts to `/v1/completions`, with log-probabilities, next to our
  rollout engine, which checks each token, its log-probability and its weight version.
- GRPO steps: TRL's GRPOTrainer with transformers' generation, and ours with vLLM and with the
  built-in generator. TRL's server mode sends weights by NCCL, which needs GPUs.
"""

import argparse
import json
import os
import tempfile
import urllib.request
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from tiny import BATCH, GROUP, RESPONSE, causal, decoder, prompts, text, tokenizer

from ms_align import GRPOTrainer, Sampling
from ms_align.engines.local import LocalEngine
from ms_align.rollouts.generators import rollout_engine_builder
from ms_align.rollouts.vllm.local_server import LocalServer
from ms_align.rollouts.vllm.options import VllmOptions

STEPS = 3
"""Timed GRPO steps in a round, after an untimed one."""


def parity(tokens: list[int]) -> float:
    """Cheap reward: the fraction of even tokens."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def plain_requests(url: str, model: str, seed: int) -> int:
    """Send all prompts in one request and return the number of tokens."""
    body = {
        "model": model,
        "prompt": prompts(BATCH // GROUP),
        "n": GROUP,
        "seed": seed,
        "max_tokens": RESPONSE,
        "temperature": 1.0,
        "logprobs": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        choices = json.loads(answer.read())["choices"]
    return sum(len(choice["token_ids"]) for choice in choices)


def rates(sides: Mapping[str, Callable[[int], int]], rounds: int) -> dict[str, list[float]]:
    """Return tokens per second of each side in each round but the first."""
    figures: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name, side in sides.items():
            start = perf_counter()
            tokens = side(number)
            figures[name].append(tokens / (perf_counter() - start))
    return {name: values[1:] for name, values in figures.items()}


def our_steps(generator: str, vllm: Mapping[str, Any] | None) -> float:
    """Run our GRPO trainer and return the mean seconds of a step."""
    ends: list[float] = []

    def on_event(kind: str, fields: Mapping[str, Any]) -> None:
        if kind == "step":
            ends.append(perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            policy_model=decoder(),
            reward_model=lambda samples: [parity(list(s.response_tokens)) for s in samples],
            learning_rate=1e-6,
            steps=STEPS + 1,
            batch_size=BATCH,
            num_generations=GROUP,
            max_new_tokens=RESPONSE,
            max_num_seqs=BATCH,
            stop_token_ids=(),
            kl_coeff=0.0,
            output_dir=Path(folder, "run"),
            on_event=on_event,
            progress=False,
            generator=generator,
            vllm=vllm,
        ).optimize(prompts(64))
    return sum(after - before for before, after in pairwise(ends)) / STEPS


def trl_steps() -> float:
    """Run TRL's GRPO trainer without its recomputation; return the mean seconds of a step."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig
    from trl import GRPOTrainer as TRLTrainer

    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        TRLTrainer(
            model=causal(),
            reward_funcs=lambda completion_ids, **_: [parity(ids) for ids in completion_ids],
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=BATCH,
                gradient_accumulation_steps=1,
                num_generations=GROUP,
                max_completion_length=RESPONSE,
                beta=0.0,
                max_steps=STEPS + 1,
                learning_rate=1e-6,
                lr_scheduler_type="constant",
                report_to="none",
                save_strategy="no",
                logging_steps=1000,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": text(row)} for row in prompts(64)]),
            processing_class=tokenizer(),
            callbacks=[Clock()],
        ).train()
    return sum(after - before for before, after in pairwise(ends)) / STEPS


def show(name: str, values: list[float], reference: list[float], unit: str) -> None:
    """Print the median with its range, and the median ratio to the reference."""
    ratios = [value / base for value, base in zip(values, reference, strict=True)]
    print(
        f"| {name} | {median(values):.3g} ({min(values):.3g} to {max(values):.3g}) {unit} | "
        f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |",
        flush=True,
    )


def main() -> None:
    """Measure rollouts, then GRPO steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="Python of an environment with vLLM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-rounds", type=int, default=3)
    parser.add_argument("--without-trl", action="store_true")
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
        server.start(Path(scratch, "start"))
        url, name = server.connection.url, str(server.name)
        engine = rollout_engine_builder("vllm")(
            LocalEngine(decoder()),
            max_num_seqs=BATCH,
            decode=None,
            vllm=VllmOptions(url=url),
            folder=Path(scratch, "rollouts"),
        )
        engine.update_weights(0)
        rows, sampling = prompts(BATCH // GROUP), Sampling(max_new_tokens=RESPONSE)

        def our_rollout(seed: int) -> int:
            return int(engine.generate(rows, sampling, count=GROUP, seed=seed).lengths.sum())

        figures = rates(
            {"plain": lambda seed: plain_requests(url, name, seed), "ours": our_rollout},
            options.rounds,
        )
        show("one plain request", figures["plain"], figures["plain"], "tokens/s")
        show("our rollout engine", figures["ours"], figures["plain"], "tokens/s")
        engine.client.close()
        steps: dict[str, list[float]] = {}
        for _ in range(options.step_rounds):
            if not options.without_trl:
                steps.setdefault("TRL, transformers' generation", []).append(trl_steps())
            steps.setdefault("ours, vLLM", []).append(our_steps("vllm", {"url": url}))
            steps.setdefault("ours, built-in", []).append(our_steps("policy", None))
        reference = next(iter(steps.values()))
        for side, values in steps.items():
            show(side, values, reference, "s per GRPO step")
        server.close()


if __name__ == "__main__":
    main()
