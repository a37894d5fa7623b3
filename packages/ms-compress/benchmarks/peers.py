"""Compare with torchao and llm-compressor: same model, same text, one run.

    python packages/ms-compress/benchmarks/peers.py [OUT] [--rounds 9] [--draws 5] [--only steps]

Step times need no other files; perplexities and decoding need OUT, the output folder of base.py.
Calibration uses 64 rows of 256 tokens for every method, the same in each draw; perplexity, over
held-out rows, is the median over the draws and their range. One thread.
If a peer cannot run on a CPU, its own error message is printed.
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import process_time

import torch
from bench import SIZES
from bench import model as model_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ms_compress import ExportError, export, fit_scales, gptq, perplexity, qat, wanda
from ms_compress.corpus import rows
from ms_compress.evaluation.measure import evaluate
from ms_compress.evaluation.options import Evaluation
from ms_compress.report import table
from ms_parallel.weights import load_model

LENGTH = 256


def main() -> None:
    """Print every comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", help="output folder of base.py")
    parser.add_argument("--model", default="base", help="folder in OUT of the decoder")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=64, help="held-out rows of 256 tokens")
    parser.add_argument("--draws", type=int, default=1, help="random draws of calibration rows")
    parser.add_argument("--only", choices=("steps", "perplexity", "decode"), action="append")
    options = parser.parse_args()
    torch.set_num_threads(1)
    selected = options.only or ["steps", "perplexity", "decode"]
    if "steps" in selected:
        steps(options.rounds)
    if options.out is None:
        print("perplexity and decoding: not measured; pass the output folder of base.py")
        return
    if "perplexity" in selected:
        perplexities(options)
    if "decode" in selected:
        decoding(options)


def steps(rounds: int) -> None:
    """Compare CPU times of a training step, prepared and plain, alternating."""
    models = {"plain": model_of(None)}
    for name in ("ct.int4_g32", "gguf.q4_0", "ct.w8a8"):
        models[name] = model_of(name)
    models["gguf.q4_0, learned scales"] = model_of("gguf.q4_0", learned_scales=True)
    models["torchao, int4 weights only"] = prepared_by_torchao(model_of(None), inputs=False)
    models["torchao, 8da4w"] = prepared_by_torchao(model_of(None), inputs=True)
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
        for name, model in models.items()
    }
    tokens = torch.randint(0, SIZES.vocab_size, (8, LENGTH))
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            start = process_time()
            cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            times[name].append(process_time() - start)
    for name, step_times in times.items():
        ratios = [a / b for a, b in zip(step_times, times["plain"], strict=True)]
        print(
            f"step  {name:32} {median(step_times) * 1e3:6.0f} ms  {median(ratios):.2f} x plain"
            f" ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )


def prepared_by_torchao(model: nn.Module, *, inputs: bool) -> nn.Module:
    """Prepare for 4-bit groups of 32 weights, optionally with 8-bit inputs per token."""
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    token = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    group = IntxFakeQuantizeConfig(torch.int4, group_size=32)
    config = QATConfig(
        activation_config=token if inputs else None, weight_config=group, step="prepare"
    )
    quantize_(model, config)
    return model


def perplexities(options: argparse.Namespace) -> None:
    """Quantize or prune the same base with every method, on the same rows in every draw."""
    shards, base = options.out / "shards", options.out / options.model
    held_out = rows(shards, split="held_out", sequence_length=LENGTH, count=options.rows)
    draws = [
        rows(shards, split="train", sequence_length=LENGTH, count=64, seed=7 + draw)["tokens"]
        for draw in range(options.draws)
    ]
    methods: Mapping[str, Callable[[Tensor], nn.Module]] = {
        "float": lambda text: load_model(base),
        "RTN, int4 g32: ours": lambda text: qat(load_model(base), "ct.int4_g32"),
        "RTN, int4 g32: ours, scales fitted": lambda text: by_fitted_scales(base, "ct.int4_g32"),
        "RTN, int4 g32: torchao": lambda text: rounded_by_torchao(load_model(base)),
        "RTN, int4 g32: llm-compressor": lambda text: by_llm_compressor(options, text, "rtn"),
        "GPTQ, int4 g32: ours": lambda text: by_gptq(base, text, "ct.int4_g32"),
        "GPTQ, int4 g32: ours, scales fitted": lambda text: by_gptq(
            base, text, "ct.int4_g32", fit_scales=True
        ),
        "GPTQ, int4 g32: ours, by the loss": lambda text: by_gptq(
            base, text, "ct.int4_g32", by_loss=True
        ),
        "GPTQ, int4 g32: ours, both": lambda text: by_gptq(
            base, text, "ct.int4_g32", by_loss=True, fit_scales=True
        ),
        "GPTQ, int4 g32: llm-compressor": lambda text: by_llm_compressor(options, text, "gptq"),
        "GPTQ, int4 g32: torchao": lambda text: gptq_of_torchao(base, text, 4),
        "GPTQ, int8 rows: ours": lambda text: by_gptq(base, text, "ct.w8a8"),
        "GPTQ, int8 rows: torchao": lambda text: gptq_of_torchao(base, text, 8),
        "Wanda, 2:4: ours": lambda text: by_wanda(base, text),
        "Wanda, 2:4: torchao": lambda text: wanda_of_torchao(load_model(base), text),
        "Wanda, 2:4: llm-compressor": lambda text: by_llm_compressor(options, text, "wanda"),
    }
    for name, make in methods.items():
        values = []
        start = process_time()
        for text in draws:
            try:
                model = make(text)
            except Exception as error:  # the peers' errors have no other common base class
                message = " ".join(str(error).split())
                print(
                    f"{name:38} does not run: {type(error).__name__}: {message[:160]}", flush=True
                )
                break
            values.append(perplexity(model, held_out))
        else:
            seconds = (process_time() - start) / len(draws)
            span = f"({min(values):.4f} to {max(values):.4f})"
            print(f"{name:38} {median(values):9.4f} {span}  in {seconds:4.0f} s", flush=True)


def by_fitted_scales(base: Path, name: str) -> nn.Module:
    """Round to nearest with our fitted scales."""
    model = qat(load_model(base), name, learned_scales=True)
    fit_scales(model)
    return model


def by_gptq(base: Path, text: Tensor, name: str, **options: bool) -> nn.Module:
    """Quantize weights with our GPTQ."""
    model = load_model(base)
    gptq(model, name, list(text.split(4)), activations=False, **options)
    return model


def by_wanda(base: Path, text: Tensor) -> nn.Module:
    """Prune with our Wanda."""
    model = load_model(base)
    wanda(model, "2:4", list(text.split(4)))
    return model


def rounded_by_torchao(model: nn.Module) -> nn.Module:
    """Quantize weights with torchao's public configuration."""
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))
    return model


@torch.no_grad()
def gptq_of_torchao(base: Path, text: Tensor, bits: int) -> nn.Module:
    """Run torchao's prototype GPTQ: 4-bit groups, or 8 bits with one scale per row."""
    from torchao.prototype.gptq import GPTQConfig
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    base_config = Int4WeightOnlyConfig(group_size=32) if bits == 4 else Int8WeightOnlyConfig()
    model = load_model(base)
    quantize_(model, GPTQConfig(step="observe", base_config=base_config))
    for tokens in text.split(4):
        model(tokens)
    quantize_(model, GPTQConfig(step="convert", base_config=base_config))
    return model


@torch.no_grad()
def wanda_of_torchao(model: nn.Module, text: Tensor) -> nn.Module:
    """Prune with torchao's WandaSparsifier, on the same layers."""
    from torchao.sparsity import WandaSparsifier

    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    sparsifier = WandaSparsifier(semi_structured_block_size=4)
    sparsifier.prepare(model, config=[{"tensor_fqn": f"{name}.weight"} for name in linear])
    for tokens in text.split(4):
        model(tokens)
    sparsifier.step()
    sparsifier.squash_mask()
    return model


def by_llm_compressor(options: argparse.Namespace, text: Tensor, method: str) -> nn.Module:
    """Run a one-shot method of llm-compressor, on the folder loaded by transformers."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    if method == "wanda":
        from llmcompressor.modifiers.pruning import WandaPruningModifier

        recipe = WandaPruningModifier(
            sparsity=0.5, mask_structure="2:4", targets=["Linear"], ignore=["re:.*lm_head"]
        )
    else:
        from llmcompressor.modifiers.gptq import GPTQModifier
        from llmcompressor.modifiers.quantization import QuantizationModifier

        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": 32,
        }
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        modifier = GPTQModifier if method == "gptq" else QuantizationModifier
        recipe = modifier(config_groups=groups, ignore=["lm_head"])
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        options.out / options.model, dtype=torch.float32
    )
    dataset = Dataset.from_dict(
        {"input_ids": text.tolist(), "attention_mask": torch.ones_like(text).tolist()}
    )
    oneshot(
        model=model,
        processor=PreTrainedTokenizerFast(tokenizer_file=str(options.out / "tokenizer.json")),
        dataset=dataset,
        recipe=recipe,
        max_seq_length=text.shape[1],
        num_calibration_samples=len(text),
    )
    return model


def decoding(options: argparse.Namespace) -> None:
    """Compare RTN exports in their runtimes with float32 torch, in alternating rounds."""
    base = options.out / options.model
    with TemporaryDirectory() as name:
        models = {}
        for scheme in ("ort.matmulnbits", "gguf.q4_0", "gguf.q8_0"):
            folder = Path(name) / scheme
            tokenizer = options.out / "tokenizer.json"
            export(qat(load_model(base), scheme), folder, tokenizer=tokenizer)
            models[f"RTN {scheme}"] = str(folder)
        try:
            import llama_cpp  # noqa: F401 - only to see if it is installed
        except ImportError:
            print("llama.cpp: not measured; `nox -s deploy` builds its package")
            models = {key: value for key, value in models.items() if "gguf" not in key}
        try:
            settings = Evaluation(
                baseline=str(base),
                models=models,
                dataset=str(options.out / "shards"),
                sequences=8,
                rounds=options.rounds,
            )
            print(table(evaluate(settings)))
        except ExportError as error:
            print(f"decoding: not measured: {error}")


if __name__ == "__main__":
    main()
