"""Compare post-training methods with llm-compressor: divergence, CPU time and peak memory.

    python packages/ms-compress/benchmarks/post_training.py OUT [--peer-python PYTHON]

OUT is the output folder of schemes.py. Both tools quantize the same model of transformers with the
same rows; each run has its own process, and its divergence from the float model is measured on the
same held-out rows. The second model computes the same as the first, but some features of its norms
are 20 times larger, as in large language models. One thread.

`--peer-python` runs llm-compressor in another environment. `--width 768` adds a larger model with
random weights, for which only time and memory are meaningful.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

import torch
from schemes import LENGTH, batch, text
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, logging

from ms_compress.evaluation.divergence import compare_logits
from ms_compress.models.logits import model_logits

SCHEMES = {
    "int4 g32": "ct.int4_g32",
    "w8a8": "ct.w8a8",
    "nvfp4": "ct.nvfp4",
    "fp8": "ct.fp8",
}
METHODS = {
    "int4 g32": ("rtn", "gptq", "gptq+by_loss", "awq", "awq+gptq", "autoround", "awq+autoround"),
    "w8a8": ("rtn", "gptq", "awq", "smoothquant", "smoothquant+gptq", "autoround"),
    "nvfp4": ("rtn", "gptq", "autoround"),
    "fp8": ("gptq", "autoround"),  # its input scales need calibration
}
COMPARED = {
    "int4 g32": {"rtn", "gptq", "awq", "awq+gptq"},
    "w8a8": {"rtn", "gptq", "awq", "smoothquant", "smoothquant+gptq"},
}
"""What llm-compressor runs too."""
ROWS, BATCH = 128, 8
OUTLIERS, FACTOR = 5, 20.0


def main() -> None:
    """Print a table with one row per scheme and method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="output folder of schemes.py")
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--ours", action="store_true", help="run only ms-compress")
    parser.add_argument("--width", type=int, help="also measure a random model of this width")
    parser.add_argument("--run", nargs=3, metavar=("TOOL", "SCHEME", "METHOD"), help="one process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    if options.run is not None:
        run(options.out, *options.run)
        return
    with TemporaryDirectory() as name:
        models = {"trained": Path(name) / "trained", "with outliers": Path(name) / "outliers"}
        copies(options.out / "base", models)
        if options.width is not None:
            models["random"] = Path(name) / "random"
            random_model(options.width).save_pretrained(models["random"])
        compare(models, None if options.ours else options.peer_python)


def compare(models: dict[str, Path], peer_python: str | None) -> None:
    """Run every method of both tools; without `peer_python` those of ms-compress."""
    print("| Model | Scheme | Method | ours: KL, s, MB | llm-compressor: KL, s, MB |")
    print("|---|---|---|---|---|")
    for model_name, folder in models.items():
        for scheme, methods in METHODS.items():
            for method in methods:
                cells = [in_process(sys.executable, folder, "ours", scheme, method)]
                if peer_python is not None and method in COMPARED.get(scheme, ()):
                    cells.append(in_process(peer_python, folder, "peer", scheme, method))
                print(f"| {model_name} | {scheme} | {method} | {' | '.join(cells)} |", flush=True)


def in_process(python: str, folder: Path, *arguments: str) -> str:
    """Run one tool in a process; return its figures, or its error."""
    command = [python, __file__, str(folder), "--run", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ)
    if result.returncode:
        return f"does not run: {result.stderr.strip().splitlines()[-1][:120]}"
    figures = json.loads(result.stdout.splitlines()[-1])
    return f"{figures['kl']:.6f}, {figures['seconds']:.1f}, {figures['mb']:.0f}"


def run(folder: Path, tool: str, scheme: str, method: str) -> None:
    """Quantize in this process and print its figures as JSON."""
    generator = torch.Generator().manual_seed(1)
    held_out = batch(text(held_out=True), 64, generator)[:, :-1]
    calibration = batch(text(held_out=False), ROWS, generator)[:, :-1]
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = model_logits(model, held_out)
    act = ours(scheme, method) if tool == "ours" else llm_compressor(scheme, method)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of the process
    before_mb, start = memory_mb("VmRSS"), process_time()
    act(model, calibration)
    seconds, peak_mb = process_time() - start, memory_mb("VmHWM")
    quality = compare_logits(expected, model_logits(model, held_out))
    figures = {"kl": quality.kl, "seconds": seconds, "mb": peak_mb - before_mb}
    print("\n" + json.dumps(figures))


def memory_mb(name: str) -> float:
    """Return a figure of this process's memory in MB, such as `VmRSS`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


Act = Callable[[nn.Module, Tensor], object]


def ours(scheme: str, method: str) -> Act:
    """Return our method; GPTQ in activation order, which is llm-compressor's default."""
    from ms_compress import autoround, awq, gptq, qat, smoothquant

    name = SCHEMES[scheme]
    first, _, second = method.partition("+")
    if first == "rtn":
        return lambda model, rows: qat(model, name)
    if first == "gptq":
        by_loss = second == "by_loss"
        return lambda model, rows: gptq(
            model, name, rows.split(BATCH), act_order=True, by_loss=by_loss
        )
    if first == "autoround":
        return lambda model, rows: autoround(model, name, rows.split(BATCH))
    scaled = awq if first == "awq" else smoothquant
    rounding: Any = second or "rtn"
    return lambda model, rows: scaled(
        model, name, rows.split(BATCH), rounding=rounding, act_order=True
    )


def llm_compressor(scheme: str, method: str) -> Act:
    """Return llm-compressor's method with its default settings."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from llmcompressor.pipelines.cache import IntermediatesCache
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    first, _, second = method.partition("+")
    weights: dict[str, Any] = {"type": "int", "symmetric": True}
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if scheme == "w8a8":
        weights |= {"num_bits": 8, "strategy": "channel"}
        inputs = {"num_bits": 8, "strategy": "token", "dynamic": True}
        group["input_activations"] = {"type": "int", "symmetric": True, **inputs}
    else:
        weights |= {"num_bits": 4, "strategy": "group", "group_size": 32}
    rounds = GPTQModifier if "gptq" in (first, second) else QuantizationModifier
    recipe: list[Any] = [rounds(config_groups={"group_0": group}, ignore=["lm_head"])]
    if first == "awq":
        recipe.insert(0, AWQModifier())
    elif first == "smoothquant":
        recipe.insert(0, SmoothQuantModifier(smoothing_strength=0.5))
    if not torch.accelerator.is_available():
        # Its AWQ pins memory for transfers to a GPU, which fails on a machine without one.
        IntermediatesCache.pin_memory = lambda self, batch_index, input_names=None: None
    vocabulary = {f"<{byte}>": byte for byte in range(256)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<0>")), pad_token="<0>"
    )

    def act(model: nn.Module, rows: Tensor) -> None:
        columns = {"input_ids": rows.tolist(), "attention_mask": torch.ones_like(rows).tolist()}
        oneshot(
            model=model,
            processor=tokenizer,
            dataset=Dataset.from_dict(columns),
            recipe=recipe,
            max_seq_length=rows.shape[1],
            num_calibration_samples=len(rows),
            batch_size=BATCH,
        )

    return act


def copies(base: Path, models: dict[str, Path]) -> None:
    """Save the trained model, and an equivalent model with some large features."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.save_pretrained(models["trained"])
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            readers = {
                layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
                layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
            }
            for norm, linears in readers.items():
                norm.weight[:OUTLIERS] *= FACTOR
                for linear in linears:
                    linear.weight[:, :OUTLIERS] /= FACTOR
    model.save_pretrained(models["with outliers"])


def random_model(width: int) -> nn.Module:
    """Return a Llama of six layers with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 32 * 32,
        num_hidden_layers=6,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        vocab_size=256,
        max_position_embeddings=LENGTH * 4,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
