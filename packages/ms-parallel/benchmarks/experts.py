"""Our mixture of experts compared with transformers' with `grouped_mm`.

    python packages/ms-parallel/benchmarks/experts.py --steps 30

Both are a Qwen3-MoE block, router and experts, with the same weights on the same hidden states,
forward and backward, in float32 on one thread. Results and gradients must agree before anything is
timed. Steps alternate; the figure is the median ratio of neighboring steps in CPU time.
"""

import argparse
import json
import platform
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ms_parallel import operators
from ms_parallel.models.experts.mixture import MixtureOfExperts
from ms_parallel.models.experts.router_config import RouterConfig

LIMIT = 1.0
"""Limit of the median ratio..."""
NOISE = 0.03
"""...and the difference between runs of one program on a shared machine."""
SIZES = {
    "many small": (1024, 256, 128, 32, 4),
    "few wide": (1024, 256, 704, 8, 2),
    "fine": (512, 128, 64, 64, 8),
}
"""Tokens, hidden size, expert width, number of experts, experts per token."""


def blocks(hidden: int, inner: int, experts: int, top_k: int) -> tuple[nn.Module, nn.Module]:
    """The blocks of transformers and ours, with the same weights."""
    config = Qwen3MoeConfig(
        hidden_size=hidden,
        moe_intermediate_size=inner,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        experts_implementation="grouped_mm",
    )
    theirs: Any = Qwen3MoeSparseMoeBlock(config)
    choice = RouterConfig(num_experts=experts, num_experts_per_tok=top_k)
    ours = MixtureOfExperts(choice, hidden, inner, operators)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0.0, 0.05)
        ours.gate.weight.copy_(theirs.gate.weight)
        up = theirs.experts.gate_up_proj.view(experts, 2, inner, hidden)
        ours.experts.gate_up_proj.weight.copy_(up)
        ours.experts.down_proj.weight.copy_(theirs.experts.down_proj)
    return theirs, ours


def step(block: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output and gradients of a forward and backward pass."""
    leaves = [x, *block.parameters()]
    for leaf in leaves:
        leaf.grad = None
    result = block(x)
    result.backward(gradient)
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check(theirs: list[Tensor], ours: list[Tensor]) -> None:
    """Check that outputs and gradients agree; parameter gradients by their sorted norms."""
    for a, b in zip(theirs[:2], ours[:2], strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4)
    norms = [sorted(float(g.norm()) for g in results[2:]) for results in (theirs, ours)]
    torch.testing.assert_close(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=1e-4, atol=0)


def step_ms(block: nn.Module, x: Tensor, gradient: Tensor) -> float:
    """CPU milliseconds of a step."""
    start = process_time()
    step(block, x, gradient)
    return 1e3 * (process_time() - start)


def compare(name: str, steps: int) -> dict[str, Any]:
    """Times and ratio of a size."""
    tokens, hidden, *sizes = SIZES[name]
    torch.manual_seed(0)
    theirs, ours = blocks(hidden, *sizes)
    x = torch.randn(1, tokens, hidden, requires_grad=True)
    gradient = torch.randn(1, tokens, hidden)
    check(step(theirs, x, gradient), step(ours, x, gradient))
    pairs = []
    for turn in range(steps):
        order = (theirs, ours) if turn % 2 else (ours, theirs)
        times = {id(block): step_ms(block, x, gradient) for block in order}
        pairs.append((times[id(ours)], times[id(theirs)]))
    return {
        "size": name,
        "ours_ms": round(median(a for a, _ in pairs), 2),
        "transformers_ms": round(median(b for _, b in pairs), 2),
        "ratio": round(median(a / b for a, b in pairs), 3),
    }


def main() -> int:
    """Print a line per size; exit with 1 if ours is slower."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [compare(name, arguments.steps) for name in SIZES]
    print(json.dumps({"machine": platform.machine(), "torch": torch.__version__}))
    for result in results:
        print(json.dumps(result))
    return int(any(result["ratio"] > LIMIT + NOISE for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
