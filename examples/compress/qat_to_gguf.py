"""How do I train with quantized weights and deploy to llama.cpp?

    python examples/compress/qat_to_gguf.py --steps 160

A model is trained in float32, rounded to 4 bits with a scale for 32 weights, and trained on with
the very rounding that llama.cpp does (`qat`). One sees the perplexity of each, beside that of the
same steps in float32, and the size of the file. Where llama-cpp-python is installed, the file's
perplexity in it is shown too: it is the one that training promised.
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
    """Rows of 65 tokens, so that each has 64 targets."""
    stream = TokenStream(shards, sequence_length=65, batch_size=8, split=split, seed=1)
    return torch.cat([torch.as_tensor(batch["tokens"]) for batch in islice(stream, count)])


def main(arguments: list[str] | None = None) -> None:
    """Train, round, train on rounded, export."""
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
    print(f"trained on in float32  {perplexity(plain.eval(), held_out):8.2f}")
    model = qat(load_model(folder).eval(), "gguf.q4_0", embeddings=True, head=True)
    print(f"rounded to 4 bits      {perplexity(model, held_out):8.2f}")
    tune(model.train(), text, tuning)
    print(f"trained on in 4 bits   {perplexity(model.eval(), held_out):8.2f}")

    exported = options.folder / "gguf"
    export(model, exported, target="gguf.q4_0", tokenizer=folder, overwrite=True)
    before = (folder / "model.safetensors").stat().st_size
    after = (exported / "model.gguf").stat().st_size
    print(f"{before:,} bytes -> {after:,} bytes in {exported / 'model.gguf'}")
    if find_spec("llama_cpp"):
        runtime = open_runtime(exported, "gguf")
        print(f"in llama.cpp itself    {perplexity(runtime, held_out):8.2f}")


if __name__ == "__main__":
    main()
