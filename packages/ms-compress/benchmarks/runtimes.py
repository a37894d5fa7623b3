"""Measure how far each runtime's log-probabilities are from training.

python packages/ms-compress/benchmarks/runtimes.py OUT [--families llama ...]

Small random models of each family are rounded to nearest, exported, and run on 2 x 48 tokens in
transformers (`ct.*`) and llama.cpp (`gguf.*`, if llama-cpp-python is installed). A cell is the
largest difference of the log-probability of a text's next token, in nats, or the first words of the
refusal.
"""

import argparse
import shutil
from importlib.util import find_spec
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from ms_compress import (
    CompressError,
    calibrate_inputs,
    export,
    open_runtime,
    qat,
    separate_experts,
)
from ms_compress.models.logits import model_logits

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES, intermediate_size=512),
    "mistral": transformers.MistralConfig(**SIZES, intermediate_size=512, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SIZES, intermediate_size=512),
    "qwen3": transformers.Qwen3Config(**SIZES, intermediate_size=512, head_dim=64),
    "gemma3": transformers.Gemma3TextConfig(**SIZES, intermediate_size=512, head_dim=64),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **SIZES,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=64,
        norm_topk_prob=True,
    ),
    "mixtral": transformers.MixtralConfig(**SIZES, intermediate_size=256, num_local_experts=4),
}
SCHEMES = (
    *("ct.int4_g128", "ct.w4a16_asym_g128", "ct.w8a8", "ct.fp8", "ct.fp8_dynamic"),
    *("ct.fp8_block", "ct.mxfp8", "ct.mxfp4a16", "ct.nvfp4a16", "ct.nvfp4"),
    *("gguf.q8_0", "gguf.q4_0", "gguf.q4_k_m", "gguf.q6_k", "gguf.q2_k", "gguf.iq4_nl"),
    "gguf.mxfp4",
)


def build(family: str) -> nn.Module:
    """Return a random model with distinct logits."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3)
    return separate_experts(model.eval())


def next_token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities of each next token, (B, S - 1)."""
    logprobs = logits[:, :-1].float().log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def cell(measure: object, expected: Tensor) -> str:
    """Return the largest difference, or the first words of the refusal."""
    try:
        actual: Tensor = measure()  # type: ignore[operator]
    except CompressError as error:
        return f"refused: {str(error).partition(': ')[2][:60] or str(error)[:60]}"
    return f"{float((actual - expected).abs().max()):.1e}"


def main() -> None:
    """Print one row per family and scheme."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    tokens = torch.randint(0, 256, (2, 48), generator=torch.Generator().manual_seed(1))
    print("| Family | Scheme | transformers | llama.cpp |\n|---|---|---|---|")
    for family in options.families:
        for name in options.schemes:
            folder = options.out / "exported"
            shutil.rmtree(folder, ignore_errors=True)
            try:
                model = qat(build(family), name)
                calibrate_inputs(model, [tokens])
                export(model, folder)
            except CompressError as error:
                print(f"| {family} | `{name}` | refused: {error} | |", flush=True)
                continue
            expected = next_token_logprobs(model_logits(model, tokens), tokens)
            target = name.partition(".")[0]

            def in_runtime(target: str = target, folder: Path = folder) -> Tensor:
                return next_token_logprobs(open_runtime(folder, target).logits(tokens), tokens)

            columns = {"ct": "", "gguf": ""}
            if target == "ct" or find_spec("llama_cpp") is not None:
                columns[target] = cell(in_runtime, expected)
            print(f"| {family} | `{name}` | {' | '.join(columns.values())} |", flush=True)


if __name__ == "__main__":
    main()
