"""Losses from logits, and log-probabilities at a temperature: plain torch next to ms_kernels.

Half of the positions are prompts without a loss. Each variant runs in its own process on one
thread; the figures are the least CPU time of three steps and the growth of the peak memory.

    python packages/ms-parallel/benchmarks/log_probs.py
"""

import argparse
import resource
import subprocess
import sys
from time import process_time
from typing import Any

import torch

from ms_parallel import operators
from ms_parallel.engine.output import HeadOutput, LogitsOutput

ROWS, LENGTH, HIDDEN, CLASSES = 8, 256, 256, 32_768
TEMPERATURE = 0.7
KINDS = ("logits", "log-probabilities", "entropies")


def peak_mib() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(ops: Any, kind: str) -> None:
    """Print one row of the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True)
    weight = (torch.randn(CLASSES, HIDDEN) * 0.05).requires_grad_()
    targets = torch.randint(CLASSES, (ROWS, LENGTH))
    targets[:, : LENGTH // 2] = -100
    before, seconds, value = peak_mib(), [], 0.0
    for _ in range(3):
        start = process_time()
        output: Any
        if kind == "logits":
            output = LogitsOutput(torch.nn.functional.linear(hidden, weight), ops)
            loss = output.token_losses(targets).sum()
        else:  # a single process needs no process groups
            output = HeadOutput(
                hidden,
                weight,
                ops,
                None,  # type: ignore[arg-type]
                {},
                split=False,
            )
            loss = output.token_losses(targets, temperature=TEMPERATURE).sum()
        if kind == "entropies":
            loss = loss - 0.01 * output.entropies(targets != -100, temperature=TEMPERATURE).sum()
        loss.backward()
        seconds.append(process_time() - start)
        value = loss.item()
    name = f"{ops.__name__}, {kind}"
    memory = peak_mib() - before
    print(f"| {name} | {1000 * min(seconds):.0f} | {memory:.0f} | {value:.2f} |")


def main() -> None:
    """Print a table of all variants, or a single row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--variant", choices=("plain", "kernels"))
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0])
    options = parser.parse_args()
    if options.variant is None:
        print("| operators | ms | peak growth, MiB | loss |\n|---|---|---|---|", flush=True)
        for kind in KINDS:
            for variant in ("plain", "kernels"):
                command = [sys.executable, __file__, "--variant", variant, "--kind", kind]
                subprocess.run(command, check=True)
        return
    ops: Any = operators
    if options.variant == "kernels":
        import ms_kernels

        ops = ms_kernels
    measure(ops, options.kind)


if __name__ == "__main__":
    main()
