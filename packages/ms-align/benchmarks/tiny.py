"""The model, the words and the prompts that every side of a comparison gets."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 8192,
}
PROMPT, RESPONSE, BATCH, GROUP = 32, 64, 16, 8
END = 1
STOPS = list(range(1, 257))
"""Tokens that end a row where lengths are to differ: about one in 32 is drawn of a fresh model."""


def config() -> LlamaConfig:
    """6.84M parameters."""
    return LlamaConfig(
        **SIZES,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=END,
        bos_token_id=2,
    )


def causal(seed: int = 0) -> LlamaForCausalLM:
    """A fresh language model, the same for the same seed."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config())


def classifier(seed: int = 1) -> LlamaForSequenceClassification:
    """A fresh model with one score."""
    torch.manual_seed(seed)
    settings = config()
    settings.num_labels = 1
    return LlamaForSequenceClassification(settings)


def decoder(seed: int = 0) -> Any:
    """The same weights in ms-parallel's decoder."""
    from ms_parallel.models import architecture, build_model

    sizes = {**SIZES, "tie_word_embeddings": True, "rms_norm_eps": config().rms_norm_eps}
    model = build_model(architecture("llama", sizes))
    model.load_state_dict(causal(seed).state_dict(), strict=False)
    return model


def prompts(count: int, *, low: int = PROMPT, high: int = PROMPT) -> list[list[int]]:
    """Random prompts of `low` to `high` tokens."""
    chance = torch.Generator().manual_seed(7)
    lengths = torch.randint(low, high + 1, (count,), generator=chance).tolist()
    return [torch.randint(300, 8192, (n,), generator=chance).tolist() for n in lengths]


def tokenizer() -> Any:
    """Words w0 to w8191, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(8192)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="w0", eos_token="w1", padding_side="left"
    )


def text(tokens: list[int]) -> str:
    """The words of tokens."""
    return " ".join(f"w{token}" for token in tokens)
