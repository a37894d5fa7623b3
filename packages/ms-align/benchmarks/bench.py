"""Benchmarks of ms-align, in under a minute: rollouts, parts of a PPO step, packed fine-tuning.

A Llama with 6.84M random parameters, float32, one thread; best of a few rounds, in CPU time.

    nox -s "bench(ms-align)"
"""

import subprocess
import sys
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import torch
import torch.nn.functional as F

from ms_align import LocalEngine, LocalGenerator, Sampling, gae
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.losses.ppo import PPOLoss, ValueLoss
from ms_align.losses.sft import SFTLoss
from ms_align.losses.token_statistics import Scratch, projected_losses_and_entropies
from ms_align.rewards.sandbox import judge
from ms_align.rollouts.rows import logprobs_of, sequences, values_of
from ms_parallel.models import architecture, build_model
from ms_parallel.weights import initialize

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}
PROMPT, RESPONSE, BATCH, GROUP = 32, 64, 16, 8
ROUNDS = 3


def best(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Return CPU seconds of the fastest round, after an untimed one."""
    work()
    times = []
    for _ in range(rounds):
        start = process_time()
        work()
        times.append(process_time() - start)
    return min(times)


def model(seed: int = 0) -> torch.nn.Module:
    """Build a randomly initialized decoder."""
    decoder = build_model(architecture("llama", SIZES))
    initialize(decoder, seed=seed)
    return decoder


def rollouts(policy: torch.nn.Module, prompts: list[list[int]]) -> None:
    """Print tokens per second, including log-probabilities."""
    generate, sampling = (
        LocalGenerator(policy, max_num_seqs=BATCH),
        Sampling(max_new_tokens=RESPONSE),
    )
    token_count = BATCH * RESPONSE
    seconds = best(lambda: generate(prompts, sampling))
    print(f"rollout, {BATCH} prompts of {PROMPT}: {token_count / seconds:.0f} tokens/s")
    groups = prompts[: BATCH // GROUP]
    seconds = best(lambda: generate(groups, sampling, count=GROUP))
    print(f"rollout, {BATCH // GROUP} groups of {GROUP}: {token_count / seconds:.0f} tokens/s")


def ppo(policy: torch.nn.Module, prompts: list[list[int]]) -> None:
    """Print milliseconds of each part of a PPO step with 16 responses."""
    generate, sampling = (
        LocalGenerator(policy, max_num_seqs=BATCH),
        Sampling(max_new_tokens=RESPONSE),
    )
    rows = sequences(prompts, generate(prompts, sampling))
    engine = LocalEngine(policy, OptimizerOptions())
    value = LocalEngine(model(1), OptimizerOptions(), heads={"value": 1})
    shape = rows["targets"].shape
    batch = {**rows, "advantages": torch.randn(shape), "returns": torch.randn(shape)}
    batch["old_values"] = torch.zeros(shape)
    parts = {
        "rollout": lambda: generate(prompts, sampling),
        "reference log-probabilities": lambda: logprobs_of(engine, rows, 1.0),
        "values": lambda: values_of(value, rows),
        "policy update, one epoch": lambda: engine.step(batch, PPOLoss()),
        "value update, one epoch": lambda: value.step(batch, ValueLoss()),
    }
    for name, work in parts.items():
        print(f"PPO, {BATCH} x ({PROMPT} + {RESPONSE}): {name} {best(work) * 1e3:.0f} ms")


def fine_tuning(policy: torch.nn.Module) -> None:
    """Print tokens per second of an update on four rows of 512, documents of about 100 tokens."""
    lengths = torch.tensor([64, 180, 100, 96, 72] * 4)
    documents = torch.repeat_interleave(torch.arange(20), lengths).view(4, 512).int()
    positions = torch.cat([torch.arange(int(n)) for n in lengths]).view(4, 512)
    tokens = torch.randint(8192, (4, 512))
    batch = {"tokens": tokens, "positions": positions, "documents": documents, "targets": tokens}
    engine = LocalEngine(policy, OptimizerOptions())
    seconds = best(lambda: engine.step(batch, SFTLoss()))
    print(f"packed fine-tuning, 4 x 512: {2048 / seconds:.0f} tokens/s")


def log_probabilities() -> None:
    """Print milliseconds of losses and gradients from hidden states, ours and the plain formula."""
    hidden = torch.randn(2048, 256, requires_grad=True)
    weight = torch.randn(8192, 256).div_(16).requires_grad_()
    targets, scratch = torch.randint(8192, (2048,)), Scratch()

    def chunked() -> None:
        losses, _ = projected_losses_and_entropies(hidden, weight, targets, 1.0, scratch)
        losses.sum().backward()  # type: ignore[no-untyped-call]

    def plain() -> None:
        F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum").backward()

    print(
        f"log-probabilities of 2,048 tokens of 8,192, forward and backward: "
        f"{best(chunked) * 1e3:.0f} ms (plain {best(plain) * 1e3:.0f} ms)"
    )


def judging(count: int = 40) -> None:
    """Print judged responses per wall second, alternating with one interpreter per response."""
    code, tests = "def double(x): return 2 * x", "assert double(4) == 8"
    command = [sys.executable, "-I", "-S", "-c", f"{code}\n{tests}"]
    assert judge(code, tests).passed
    seconds = [0.0, 0.0]
    for _ in range(count):
        start = perf_counter()
        judge(code, tests)
        middle = perf_counter()
        subprocess.run(command, check=True)
        seconds[0] += middle - start
        seconds[1] += perf_counter() - middle
    print(
        f"judged responses: {count / seconds[0]:.0f} per second; interpreters without sandbox: "
        f"{count / seconds[1]:.0f}"
    )


def main() -> None:
    """Print all results."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prompts = torch.randint(300, 8192, (BATCH, PROMPT)).tolist()
    rewards, values = torch.randn(2, 256, 1024).unbind()
    mask = torch.rand(256, 1024) < 0.7
    print(f"gae of 256 x 1,024: {best(lambda: gae(rewards, values, mask), 20) * 1e3:.2f} ms")
    log_probabilities()
    rollouts(model(), prompts)
    ppo(model(), prompts)
    fine_tuning(model())
    judging()


if __name__ == "__main__":
    main()
