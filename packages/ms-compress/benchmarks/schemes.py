"""Compare schemes on a small trained model: size, KL to the float model, and the runtime's logits.

python packages/ms-compress/benchmarks/schemes.py OUT [--steps 600]

The model predicts bytes of the standard library's source; other files are held out. Each scheme is
rounded to nearest and with GPTQ on 64 rows, exported, and run in transformers.
"""

import argparse
import shutil
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ms_compress import calibrate_inputs, export, gptq, open_runtime, qat
from ms_compress.evaluation.divergence import compare_logits
from ms_compress.models.logits import model_logits
from ms_parallel.models import Decoder, DecoderConfig
from ms_parallel.weights import initialize, load_model, save_model

SIZES = DecoderConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
LENGTH = 64
SCHEMES = (
    *("ct.w8a8", "ct.fp8", "ct.fp8_dynamic", "ct.fp8_block", "ct.mxfp8", "ct.mxfp8a16"),
    *("ct.int4_g32", "ct.int4_g128", "ct.w4a16_asym_g32", "ct.w4a16_asym_g128", "ct.w4afp8_g128"),
    *("ct.nvfp4", "ct.nvfp4a16", "ct.mxfp4", "ct.mxfp4a16"),
)


def text(held_out: bool) -> Tensor:
    """Return the bytes of a tenth of the standard library's files, or of the others, (T,) int64."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    chosen = [path for i, path in enumerate(files) if (i % 10 == 0) == held_out]
    return torch.tensor(list(b"".join(path.read_bytes() for path in chosen)))


def batch(data: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """Draw random rows, (rows, LENGTH + 1)."""
    starts = torch.randint(0, len(data) - LENGTH - 1, (rows,), generator=generator)
    return torch.stack([data[start : start + LENGTH + 1] for start in starts])


def trained(folder: Path, steps: int) -> None:
    """Train the model and save it."""
    model, data = Decoder(SIZES), text(held_out=False)
    initialize(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        rows = batch(data, 8, generator)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
    save_model(model, folder)


def size_of(folder: Path) -> int:
    """Return the size of the weight files in bytes."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def main() -> None:
    """Train the model once, then print one row per scheme."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    base = options.out / "base"
    if not base.is_dir():
        trained(base, options.steps)
    generator = torch.Generator().manual_seed(1)
    held_out = batch(text(held_out=True), 32, generator)
    calibration = [batch(text(held_out=False), 16, generator)[:, :-1] for _ in range(4)]
    tokens = held_out[:, :-1]
    expected = model_logits(load_model(base), tokens)
    loss = F.cross_entropy(expected.flatten(0, 1), held_out[:, 1:].flatten())
    print(f"float: {size_of(base):,} bytes, loss {loss:.4f} on {tokens.numel():,} held-out bytes")
    print("| Scheme | MB | RTN: KL, same byte | GPTQ: KL, same byte | transformers |")
    print("|---|---|---|---|---|")

    def row(name: str) -> None:
        columns, largest = [], 0.0
        for method in ("rtn", "gptq"):
            model: nn.Module = load_model(base)
            if method == "rtn":
                calibrate_inputs(qat(model, name), calibration)
            else:
                gptq(model, name, calibration, act_order=True)
            logits = model_logits(model, tokens)
            quality = compare_logits(expected, logits)
            columns.append(f"{quality.kl:.5f}, {quality.agreement:.2%}")
            folder = export(model, options.out / "exported", overwrite=True)
            runtime_logits = open_runtime(folder, "ct").logits(tokens)
            largest = max(largest, float((runtime_logits - logits).abs().max()))
            size = size_of(folder)
            shutil.rmtree(folder)
        print(f"| `{name}` | {size / 1e6:.2f} | {' | '.join(columns)} | {largest:g} |", flush=True)

    for name in SCHEMES:
        row(name)


if __name__ == "__main__":
    main()
