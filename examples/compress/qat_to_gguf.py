"""How do I train with quantized weights and deploy to llama.cpp?

    python examples/compress/qat_to_gguf.py --steps 160

Trains a model in float32, quantizes it to 4 bits with one scale per 32 weights, and fine-tunes it
with the exact rounding of llama.cpp (`qat`). The output shows the perplexity of each, compared with
the same steps in float32, and the file size. With llama-cpp-python installed it also shows the
file's perplexity in llama.cpp, which matches training.
"""

import argparse
import email
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import torch

from ms_compress import Tuning, export, open_runtime, perplexity, qat, tune
from ms_data import TokenStream
from ms_parallel import DistributedTrainer, load_model

CORPUS = Path(email.__file__).parent
SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}


def rows(shards: Path, split: str, count: int) -> torch.Tensor:
    """Rows of 65 tokens (64 inputs and targets)."""
    stream = TokenStream(shards, sequence_length=65, batch_size=8, split=split, seed=1)
    return torch.cat([torch.as_tensor(batch["tokens"]) for batch in islice(stream, count)])


def main(arguments: list[str] | None = None) -> None:
    """Train, quantize, fine-tune, and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("qat-to-gguf"))
    parser.add_argument("--steps", type=int, default=160)
    options = parser.parse_args(arguments)
    result = DistributedTrainer(
        "llama",
        model_config=SIZES,
        vocab_size=512,
        sequence_length=64,
        batch_size=16,
        learning_rate=4e-3,
        held_out_fraction=0.1,
        output_dir=options.folder / "run",
        device="cpu",
    ).train(CORPUS, steps=options.steps)
    folder, shards = result.model_folder, options.folder / "run" / "shards"
    assert folder is not None
    text, held_out = rows(shards, "train", 24), rows(shards, "held_out", 4)

    tuning = Tuning(steps=options.steps // 4, sequence_length=64, learning_rate=1e-3)
    plain = load_model(folder).eval()
    print(f"float32                {perplexity(plain, held_out):8.2f}")
    tune(plain.train(), text, tuning)
    print(f"tuned in float32       {perplexity(plain.eval(), held_out):8.2f}")
    model = qat(load_model(folder).eval(), "gguf.q4_0", embeddings=True, head=True)
    print(f"quantized to 4 bits    {perplexity(model, held_out):8.2f}")
    tune(model.train(), text, tuning)
    print(f"tuned in 4 bits        {perplexity(model.eval(), held_out):8.2f}")

    exported = options.folder / "gguf"
    export(model, exported, target="gguf.q4_0", tokenizer=folder, overwrite=True)
    before = (folder / "model.safetensors").stat().st_size
    after = (exported / "model.gguf").stat().st_size
    print(f"{before:,} bytes -> {after:,} bytes in {exported / 'model.gguf'}")
    if find_spec("llama_cpp"):
        runtime = open_runtime(exported, "gguf")
        print(f"in llama.cpp           {perplexity(runtime, held_out):8.2f}")


if __name__ == "__main__":
    main()
