"""Compare plain torch with ms_kernels for losses, and for log-probabilities at a temperature.

Half of the positions are prompts without a loss. Each variant runs in its own process on one
thread; the table has the minimum CPU time of three steps and the growth of peak memory.

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
OUTPUTS = ("logits", "log-probabilities", "entropies")


def peak_mib() -> float:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(ops: Any, output_kind: str) -> None:
    """Time three steps and print a row of the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True)
    weight = (torch.randn(CLASSES, HIDDEN) * 0.05).requires_grad_()
    targets = torch.randint(CLASSES, (ROWS, LENGTH))
    targets[:, : LENGTH // 2] = -100
    memory_before, step_times, last_loss = peak_mib(), [], 0.0
    for _ in range(3):
        start = process_time()
        output: Any
        if output_kind == "logits":
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
        if output_kind == "entropies":
            loss = loss - 0.01 * output.entropies(targets != -100, temperature=TEMPERATURE).sum()
        loss.backward()
        step_times.append(process_time() - start)
        last_loss = loss.item()
    name = f"{ops.__name__}, {output_kind}"
    growth = peak_mib() - memory_before
    print(f"| {name} | {1000 * min(step_times):.0f} | {growth:.0f} | {last_loss:.2f} |")


def main() -> None:
    """Print a table of all variants, or a single row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--variant", choices=("plain", "kernels"))
    parser.add_argument("--output", choices=OUTPUTS, default=OUTPUTS[0])
    options = parser.parse_args()
    if options.variant is None:
        print("| operators | ms | peak growth, MiB | loss |\n|---|---|---|---|", flush=True)
        for output_kind in OUTPUTS:
            for variant in ("plain", "kernels"):
                command = [sys.executable, __file__, "--variant", variant, "--output", output_kind]
                subprocess.run(command, check=True)
        return
    ops: Any = operators
    if options.variant == "kernels":
        import ms_kernels

        ops = ms_kernels
    measure(ops, options.output)


if __name__ == "__main__":
    main()
