"""How do I train a model on sound?

    python examples/align/sound.py --steps 60

Everything is made here: tones with numpy and soundfile, a tokenizer, a processor, and a tiny
Qwen2-Audio with random weights. `ms_data.build` turns conversations about sound files into shards,
`SFTTrainer` trains on the answers, and transformers opens the result and names tones that it has
not heard. The output shows how the loss falls, and the fraction of correct names.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import tokenizers
import torch
import transformers

from ms_align import SFTTrainer
from ms_data import build

RATE_HZ = 16_000
TONES = {"low": (200, 350), "middle": (700, 1000), "high": (2000, 3000)}
"""Range of frequencies in Hz by answer."""
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
QUESTION = "Which tone?"


def tone(name: str, rng: np.random.Generator) -> np.ndarray:
    """A tone of random frequency, length and loudness, with noise."""
    samples = int(rng.uniform(0.3, 0.9) * RATE_HZ)
    wave = np.sin(2 * np.pi * rng.uniform(*TONES[name]) * np.arange(samples) / RATE_HZ)
    return (rng.uniform(0.1, 0.8) * wave + rng.normal(0, 0.01, samples)).astype(np.float32)


def conversation(sound: str, answer: str | None = None) -> list[dict[str, Any]]:
    """A question about a sound file, with its answer if it is given."""
    question = [{"type": "audio", "audio": sound}, {"type": "text", "text": QUESTION}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    return messages if answer is None else [*messages, {"role": "assistant", "content": answer}]


def write_corpus(folder: Path, count: int, seed: int) -> None:
    """Write sound files, and the conversations about them."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(count):
        name = list(TONES)[index % len(TONES)]
        soundfile.write(folder / f"{index}.wav", tone(name, rng), RATE_HZ)
        rows.append({"messages": conversation(f"{index}.wav", name)})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_model(folder: Path) -> None:
    """Write a tokenizer, a processor and a model with random weights."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([f"user assistant {QUESTION} {name}" for name in TONES], trainer)
    untyped: Any = transformers  # its processors have no annotations
    tokenizer = untyped.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")
    extractor = untyped.WhisperFeatureExtractor(feature_size=32, chunk_length=1)
    untyped.Qwen2AudioProcessor(extractor, tokenizer).save_pretrained(folder)
    encoder = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4}
    config = untyped.Qwen2AudioConfig(
        audio_config={
            **encoder,
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 32,
            "encoder_ffn_dim": 128,
            "max_source_positions": 50,
        },
        text_config={
            "model_type": "qwen2",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": model.get_vocab_size(),
        },
        audio_token_index=model.token_to_id("<|AUDIO|>"),
    )
    torch.manual_seed(0)
    transformers.Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)


def accuracy(folder: Path, count: int, seed: int) -> float:
    """Fraction of new tones that the saved model names, by transformers alone."""
    untyped: Any = transformers
    processor = untyped.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForMultimodalLM.from_pretrained(folder)
    rng = np.random.default_rng(seed)
    correct = 0
    for index in range(count):
        name = list(TONES)[index % len(TONES)]
        text = processor.apply_chat_template(
            conversation("new"), tokenize=False, add_generation_prompt=True
        )
        inputs = processor(
            text=text, audio=[tone(name, rng)], sampling_rate=RATE_HZ, return_tensors="pt"
        )
        tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        answer = processor.decode(tokens[0, inputs["input_ids"].shape[1] :])
        correct += answer.startswith(f"{name}<|im_end|>")
    return correct / count


def main(arguments: list[str] | None = None) -> None:
    """Write the data and the model, train, and test the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("sound"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    out, steps = options.folder, options.steps
    write_model(out / "model")
    write_corpus(out / "corpus", count=240, seed=0)
    model = out / "model"
    build(out / "corpus", tokenizer=model, out=out / "shards", chat=model, processor=model)
    trainer = SFTTrainer(
        model=str(model),
        layout={"data": 1},
        sequence_length=256,
        batch_size=8,
        steps=steps,
        learning_rate=3e-3,
        warmup_steps=10,
        output_dir=out / "run",
    )
    trainer.train(str(out / "shards"))
    print(f"accuracy on new tones: {accuracy(out / 'run/model', count=30, seed=1):.0%}")


if __name__ == "__main__":
    main()
