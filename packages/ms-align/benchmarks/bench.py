"""What a user pays for, in under a minute: rollouts, the parts of a PPO step, packed tuning.

Llama of 6.84M parameters, random weights, float32, one thread; the best of a few rounds, in
processor time.

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
    """Seconds of processor time of the fastest round, after one that is not counted."""
    work()
    times = []
    for _ in range(rounds):
        began = process_time()
        work()
        times.append(process_time() - began)
    return min(times)


def model(seed: int = 0) -> torch.nn.Module:
    """A fresh decoder."""
    made = build_model(architecture("llama", SIZES))
    initialize(made, seed=seed)
    return made


def rollouts(policy: torch.nn.Module, prompts: list[list[int]]) -> None:
    """Tokens a second, log-probabilities included."""
    generate, sampling = (
        LocalGenerator(policy, max_num_seqs=BATCH),
        Sampling(max_new_tokens=RESPONSE),
    )
    made = BATCH * RESPONSE
    seconds = best(lambda: generate(prompts, sampling))
    print(f"rollout, {BATCH} prompts of {PROMPT}: {made / seconds:.0f} tokens/s")
    groups = prompts[: BATCH // GROUP]
    seconds = best(lambda: generate(groups, sampling, count=GROUP))
    print(f"rollout, {BATCH // GROUP} groups of {GROUP}: {made / seconds:.0f} tokens/s")


def ppo(policy: torch.nn.Module, prompts: list[list[int]]) -> None:
    """Milliseconds of each part of a PPO step of 16 responses."""
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
        "reference's log-probabilities": lambda: logprobs_of(engine, rows, 1.0),
        "values": lambda: values_of(value, rows),
        "policy's update, an epoch": lambda: engine.step(batch, PPOLoss()),
        "value's update, an epoch": lambda: value.step(batch, ValueLoss()),
    }
    for name, work in parts.items():
        print(f"PPO, {BATCH} x ({PROMPT} + {RESPONSE}): {name} {best(work) * 1e3:.0f} ms")


def tuning(policy: torch.nn.Module) -> None:
    """Tokens a second of an update on four rows of 512, documents of about a hundred."""
    lengths = torch.tensor([64, 180, 100, 96, 72] * 4)
    documents = torch.repeat_interleave(torch.arange(20), lengths).view(4, 512).int()
    positions = torch.cat([torch.arange(int(n)) for n in lengths]).view(4, 512)
    tokens = torch.randint(8192, (4, 512))
    batch = {"tokens": tokens, "positions": positions, "documents": documents, "targets": tokens}
    engine = LocalEngine(policy, OptimizerOptions())
    seconds = best(lambda: engine.step(batch, SFTLoss()))
    print(f"packed tuning, 4 x 512: {2048 / seconds:.0f} tokens/s")


def log_probabilities() -> None:
    """Milliseconds of losses and their gradient from hidden states, beside the plain formula."""
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
    """Judged responses a second of wall-clock time, beside an interpreter for each, in turn."""
    code, tests = "def double(x): return 2 * x", "assert double(4) == 8"
    alone = [sys.executable, "-I", "-S", "-c", f"{code}\n{tests}"]
    assert judge(code, tests).passed
    seconds = [0.0, 0.0]
    for _ in range(count):
        began = perf_counter()
        judge(code, tests)
        between = perf_counter()
        subprocess.run(alone, check=True)
        seconds[0] += between - began
        seconds[1] += perf_counter() - between
    print(
        f"judged responses: {count / seconds[0]:.0f} a second; interpreters without any wall: "
        f"{count / seconds[1]:.0f}"
    )


def main() -> None:
    """Print all figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    prompts = torch.randint(300, 8192, (BATCH, PROMPT)).tolist()
    rewards, values = torch.randn(2, 256, 1024).unbind()
    mask = torch.rand(256, 1024) < 0.7
    print(f"gae of 256 x 1,024: {best(lambda: gae(rewards, values, mask), 20) * 1e3:.2f} ms")
    log_probabilities()
    rollouts(model(), prompts)
    ppo(model(), prompts)
    tuning(model())
    judging()


if __name__ == "__main__":
    main()
