"""How do I continue training from a Hugging Face folder, and save one?

    python examples/train/hugging_face_folder.py --steps 40

To avoid a download, transformers creates the folder here: a tiny, untrained Qwen 3. Any folder with
config.json and weights works. The trained model opens in transformers, with its tokenizer, and
generates the same text as the trainer.
"""

import argparse
import email
from pathlib import Path

import torch

from ms_data import train_tokenizer
from ms_parallel import DistributedTrainer

CORPUS = Path(email.__file__).parent


def make_folder(folder: Path) -> Path:
    """Create a small transformers model with its tokenizer, in the layout of the Hub."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    if not folder.exists():
        train_tokenizer(CORPUS, vocab_size=512, out=folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def main(arguments: list[str] | None = None) -> None:
    """Continue training, and open the result in transformers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("hugging-face-folder"))
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pretrained = make_folder(options.folder / "given")
    trainer = DistributedTrainer(
        model_arch=pretrained,  # training starts from its weights
        tokenizer=pretrained / "tokenizer.json",
        sequence_length=64,
        batch_size=16,
        learning_rate=3e-3,
        held_out_fraction=0.1,
        output_dir=options.folder / "run",
        device="cpu",
    )
    result = trainer.train(CORPUS, steps=options.steps)
    assert result.model_folder is not None

    tokenizer = AutoTokenizer.from_pretrained(result.model_folder)
    model = AutoModelForCausalLM.from_pretrained(result.model_folder)
    prompt = tokenizer("def get_payload(self", return_tensors="pt")
    expected = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    expected = tokenizer.decode(
        expected[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True
    )
    generated = trainer.generate("def get_payload(self", max_new_tokens=16, temperature=0.0)
    print(f"held-out loss {result.first_held_out_loss:.3f} -> {result.held_out_loss:.3f}")
    print(f"{type(model).__name__} in transformers writes {expected!r}, the trainer {generated!r}")
    assert expected == generated


if __name__ == "__main__":
    main()
