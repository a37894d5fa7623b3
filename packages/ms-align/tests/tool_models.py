"""A tokenizer with a chat template, and a scripted policy for tests."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from ms_align import Responses, Sampling
from ms_align.tokenizer import HuggingFaceTokenizer

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template in the style of Qwen."""
SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
STOP = 257
"""Id of <|im_end|>."""


def chat_tokenizer(template: str = TEMPLATE) -> HuggingFaceTokenizer:
    """Build a byte tokenizer with special tokens 256 to 259 and a chat template."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(SPECIAL_TOKENS[:2])
    model.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in SPECIAL_TOKENS[2:]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    return HuggingFaceTokenizer(tokenizer)


def call(name: str, **arguments: Any) -> str:
    """Return the text of a tool call."""
    content = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{content}\n</tool_call>"


class Script:
    """Policy that follows a script: `respond(text of the context)` returns the response's text.

    Log-probabilities are -(index + 1), so that tests can follow each token, or None.
    """

    def __init__(
        self,
        tokenizer: HuggingFaceTokenizer,
        respond: Callable[[str], str],
        logprobs: bool = True,
    ) -> None:
        self.tokenizer, self.respond, self.logprobs = tokenizer, respond, logprobs
        self.contexts: list[list[int]] = []
        self.responses: list[list[int]] = []

    def __call__(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, count: int, seed: int
    ) -> Responses:
        """Return the scripted responses."""
        rows = []
        for prompt in (prompt for prompt in prompts for _ in range(count)):
            text = str(self.tokenizer.tokenizer.decode(list(prompt), skip_special_tokens=False))
            row = [*self.tokenizer.encode(self.respond(text)), STOP]
            self.contexts.append(list(prompt))
            self.responses.append(row[: sampling.max_new_tokens])
            rows.append(row[: sampling.max_new_tokens])
        lengths = torch.tensor([len(row) for row in rows])
        tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
        for target, row in zip(tokens, rows, strict=True):
            target[: len(row)] = torch.tensor(row)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return Responses(
            tokens=tokens,
            lengths=lengths,
            logprobs=-(positions + 1.0) if self.logprobs else None,
            sampling_logprobs=None,
            stopped=torch.tensor([row[-1] == STOP for row in rows]),
        )
