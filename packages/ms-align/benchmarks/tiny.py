"""Model, tokenizer and prompts that all sides of a comparison share."""

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
"""Stop tokens that make lengths differ: a random model samples one about every 32 tokens."""


def config() -> LlamaConfig:
    """Return the configuration of a model with 6.84M parameters."""
    return LlamaConfig(
        **SIZES,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        pad_token_id=0,
        eos_token_id=END,
        bos_token_id=2,
    )


def causal(seed: int = 0) -> LlamaForCausalLM:
    """Build a language model with weights determined by the seed."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config())


def classifier(seed: int = 1) -> LlamaForSequenceClassification:
    """Build a model with a single score."""
    torch.manual_seed(seed)
    settings = config()
    settings.num_labels = 1
    return LlamaForSequenceClassification(settings)


def decoder(seed: int = 0) -> Any:
    """Build ms-parallel's decoder with the same weights."""
    from ms_parallel.models import architecture, build_model

    sizes = {**SIZES, "tie_word_embeddings": True, "rms_norm_eps": config().rms_norm_eps}
    model = build_model(architecture("llama", sizes))
    model.load_state_dict(causal(seed).state_dict(), strict=False)
    return model


def prompts(count: int, *, low: int = PROMPT, high: int = PROMPT) -> list[list[int]]:
    """Return random prompts of `low` to `high` tokens."""
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [torch.randint(300, 8192, (n,), generator=generator).tolist() for n in lengths]


def tokenizer() -> Any:
    """Build a tokenizer with words w0 to w8191, one token each."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(8192)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="w0", eos_token="w1", padding_side="left"
    )


def text(tokens: list[int]) -> str:
    """Return the words of tokens."""
    return " ".join(f"w{token}" for token in tokens)
