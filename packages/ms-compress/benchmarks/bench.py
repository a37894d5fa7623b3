"""Compare the CPU time of a training step with and without QAT: medians of alternating rounds.

python packages/ms-compress/benchmarks/bench.py [--compile]
"""

import argparse
from statistics import median
from time import process_time

import torch
from torch.nn import functional as F

from ms_compress import qat
from ms_compress.targets.rules import NAMES
from ms_parallel.models import Decoder, DecoderConfig
from ms_parallel.weights import initialize

ROUNDS = 9
SIZES = DecoderConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)


def model(scheme: str | None, **settings: bool) -> torch.nn.Module:
    """Build a decoder with random weights, prepared for QAT unless `scheme` is None."""
    decoder = Decoder(SIZES)
    initialize(decoder, 0)
    return decoder if scheme is None else qat(decoder, scheme, **settings)


def main() -> None:
    """Print the CPU time of one step: forward, backward and AdamW."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="compile all models with inductor")
    compiled = parser.parse_args().compile
    torch.set_num_threads(1)
    models = {"plain": model(None)} | {name: model(name) for name in NAMES}
    models["ct.int4_g32, learned scales"] = model("ct.int4_g32", learned_scales=True)
    models["gguf.q4_0, learned scales"] = model("gguf.q4_0", learned_scales=True)
    models["gguf.q4_0, weights only"] = model("gguf.q4_0", activations=False)
    if compiled:
        for compiled_model in models.values():
            compiled_model.compile(fullgraph=True)
        # The same functions are compiled once per model.
        torch._dynamo.config.recompile_limit = 2 * len(models)
    optimizers = {
        name: torch.optim.AdamW(decoder.parameters(), 1e-4, fused=True)
        for name, decoder in models.items()
    }
    tokens = torch.randint(0, SIZES.vocab_size, (8, 256))
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS + 1):
        for name, decoder in models.items():
            start_s = process_time()
            F.cross_entropy(decoder(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            times[name].append(process_time() - start_s)
    for name, measured in times.items():
        pairs = zip(measured[1:], times["plain"][1:], strict=True)  # without the warmup round
        ratio = median(a / b for a, b in pairs)
        print(f"{name:28} {median(measured[1:]) * 1e3:7.0f} ms  {ratio:.2f} x plain")


if __name__ == "__main__":
    main()
