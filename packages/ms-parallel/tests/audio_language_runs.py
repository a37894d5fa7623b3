"""A tiny Qwen2-Audio, its data, and runs with it, for `test_audio_language.py`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import tokenizers
import torch
import transformers

import ms_data
from ms_parallel import AdamWConfig, Engine, Layout, NextTokenLoss
from ms_parallel.cluster.connection import connect

OPTIMIZER = AdamWConfig(learning_rate=1e-2, warmup_steps=1, decay_steps=20)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>"]
SAMPLES = (700, 16_000, 31_999, 480, 9_000)
RATE_HZ = 16_000


def write_model(folder: Path) -> Any:
    """Write a model folder with random weights; return its processor."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["What is this?"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2)
    processor = transformers.Qwen2AudioProcessor(extractor, tokenizer)
    processor.save_pretrained(folder)
    config = transformers.Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 16,
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "max_source_positions": 100,
        },
        text_config={
            "model_type": "qwen2",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 300,
            "max_position_embeddings": 512,
            "bos_token_id": 0,
            "eos_token_id": 2,
        },
        audio_token_index=model.token_to_id("<|AUDIO|>"),
    )
    torch.manual_seed(0)
    audio_model = transformers.Qwen2AudioForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in audio_model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.1)  # large enough to be sensitive to the sound
    audio_model.save_pretrained(folder)
    return processor


def write_corpus(folder: Path) -> tuple[list[dict[str, Any]], list[list[np.ndarray]]]:
    """Write conversations with zero to two clips; return the rows and the clips of each."""
    folder.mkdir()
    rows, clips = [], []
    for index in range(10):
        parts: list[dict[str, str]] = []
        row_clips: list[np.ndarray] = []
        for clip in range(index % 3):
            time = np.arange(SAMPLES[(index + clip) % len(SAMPLES)])
            samples = (0.3 * np.sin(0.05 * (1 + index) * time)).astype(np.float32)
            name = f"{index}-{clip}.wav"
            soundfile.write(folder / name, samples, RATE_HZ, subtype="FLOAT")
            row_clips.append(samples)
            parts.append({"type": "audio", "path" if clip else "audio": name})
        parts.append({"type": "text", "text": "What is this?"})
        answer = {"role": "assistant", "content": f"Tone {index}."}
        rows.append({"messages": [{"role": "user", "content": parts}, answer]})
        clips.append(row_clips)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows, clips


def batch_of(shards: str | Path, place: Any = None) -> dict[str, Any]:
    """All samples, packed into few rows."""
    stream = ms_data.InstructionStream(
        shards, sequence_length=192, batch_size=6, epochs=1, shuffle=False, place=place
    )
    batch: dict[str, Any] = dict(next(stream))
    assert next(stream, None) is None
    return batch


def train_folder(model: str, shards: str, size: int | None, saved: str) -> list[float]:
    """Losses of three updates on two data ranks with different rows; saves the model."""
    torch.set_num_threads(1)
    groups = connect(Layout.parse("data=2"), device="cpu", timeout_s=120)
    engine = Engine(model, groups=groups, optimizer=OPTIMIZER, microbatch_size=size)
    rows = batch_of(shards, place=groups.place)
    losses = [engine.step(rows, NextTokenLoss()).loss for _ in range(3)]
    engine.save(saved, tokenizer=model)
    return losses
