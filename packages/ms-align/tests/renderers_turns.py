"""Compare the tokens of conversations with the package renderers, id by id.

    python renderers_turns.py FOLDER

prints a line for each chat template in a folder of `*.jinja` files that renderers supports, and the
totals. renderers has the tokens of a model family in Python, without its template.
"""

import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import renderers
from attrs import define, field
from turns import TOOL, Counts, TurnTokens, converse, tokenizer_for

FAMILIES = {
    "deepseekv3": "deepseek-r1",
    "gemma4": "gemma4",
    "gemma4_v2": "gemma4",
    "gemma4_v3": "gemma4",
    "gemma4_v4": "gemma4",
    "gemma4_v5": "gemma4",
    "glm4moe": "glm-4.5",
    "llama3_2": "llama-3",
    "nemotron_3_5_lightning": "nemotron-3.5",
    "nemotron_3_nano": "nemotron-3",
    "nemotron_3_super": "nemotron-3",
    "nemotron_3_ultra": "nemotron-3-ultra",
    "qwen3": "qwen3",
    "qwen3_5_nothink": "qwen3.5",
    "qwen3_5_think": "qwen3.5",
    "qwen3_6": "qwen3.6",
    "qwen3_8": "qwen3.8",
    "qwen3_instruct_2507": "qwen3",
    "qwen3_vl": "qwen3-vl",
}
"""Renderer of each template of TRL whose model renderers supports.

Its renderer of gpt-oss needs a vocabulary that it downloads, so it is left out.
"""
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen3_5_nothink": {"enable_thinking": False},
    "nemotron_3_5_lightning": {"truncate_history_thinking": False},
    "nemotron_3_nano": {"truncate_history_thinking": False},
    "nemotron_3_super": {"truncate_history_thinking": False},
    "nemotron_3_ultra": {"truncate_history_thinking": False},
}
"""Settings of a renderer: its template's defaults, and to keep earlier thoughts."""
STOPS = {"glm-4.5": ("<|user|>", "<|observation|>")}
"""Stop tokens without and with calls, where the next role's token ends a turn."""
TOKENS = {
    "deepseek-r1": ["<think>", "</think>"],
    "gemma4": [*["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"],
               *["<|tool>", "<tool|>"],
               *["<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>"],
               *["<|image>", "<|image|>", "<image|>"], '<|"|>'],
    "glm-4.5": [*["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
                *["<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"],
                *["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]],
    "llama-3": [*["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|end_of_text|>"],
                *["<|eom_id|>", "<|python_tag|>"]],
}  # fmt: skip
"""Tokens of the real tokenizers."""
QWEN_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
               "</tool_response>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]  # fmt: skip
ENDS = {
    "deepseek-r1": ("<\uff5cbegin\u2581of\u2581sentence\uff5c>",
                    "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "llama-3": ("<|begin_of_text|>", "<|eot_id|>"),
}  # fmt: skip
"""First and last token of a text, where the template prints them."""


@define
class Agreement:
    """Outcomes of the turns of a template."""

    equal: int = 0
    """The tokens of the next turn's prompt are the same."""
    declined: int = 0
    """renderers does not continue the conversation, but renders it again."""
    different: list[str] = field(factory=list)
    prompts: int = 0
    """First prompts with the same tokens."""
    different_prompts: list[str] = field(factory=list)


def compare(folder: Path, name: str, seeds: int) -> Agreement:
    """Compare first prompts, and the next prompts after each response."""
    agreement, family = Agreement(), FAMILIES[name]
    template = (folder / f"{name}.jinja").read_text()
    bos, eos = ENDS.get(family, ("<bos>", "<eos>"))
    encoder = tokenizer_for(template, TOKENS.get(family, QWEN_TOKENS), bos, eos)
    tokenizer = encoder.tokenizer
    settings = dict(SETTINGS.get(name, {}))
    if family == "llama-3":  # the template prints today
        settings["date_string"] = datetime.now(tz=UTC).strftime("%d %b %Y")
    # Keep earlier thoughts, as a policy is trained on what it sampled.
    config = renderers.config_from_name(family).model_copy(
        update={"thinking_retention": "all", **settings}
    )
    renderer = renderers.create_renderer(tokenizer, config)

    def on_turn(turn: TurnTokens) -> None:
        if len(turn.history) == 1:
            expected = renderer.render_ids(turn.history, tools=[TOOL], add_generation_prompt=True)
            if expected == turn.prompt:
                agreement.prompts += 1
            else:
                agreement.different_prompts.append(
                    f"{tokenizer.decode(turn.prompt)!r} != {tokenizer.decode(expected)!r}"
                )
        bridge = renderer.bridge_to_next_turn(
            turn.prompt, turn.response, turn.new_messages, tools=[TOOL]
        )
        if bridge is None:
            agreement.declined += 1
        elif bridge.token_ids == turn.next_prompt:
            agreement.equal += 1
        else:
            start = len(turn.prompt) + len(turn.response)
            ours, theirs = turn.next_prompt[start:], bridge.token_ids[start:]
            agreement.different.append(
                f"{tokenizer.decode(ours)!r} != {tokenizer.decode(theirs)!r}"
            )

    for seed in range(seeds):
        converse(
            template,
            seed,
            counts=Counts(),
            on_turn=on_turn,
            tokenizer=encoder,
            stops=STOPS.get(family),
        )
    return agreement


def main() -> None:
    """Print the counts of all templates in a folder."""
    totals: Counter[str] = Counter()
    for name, family in FAMILIES.items():
        agreement = compare(Path(sys.argv[1]), name, 10)
        row = {
            "equal": agreement.equal,
            "declined": agreement.declined,
            "different": len(agreement.different),
            "prompts": agreement.prompts,
            "different prompts": len(agreement.different_prompts),
        }
        totals.update(row)
        examples = [*agreement.different_prompts[:1], *agreement.different[:2]]
        sys.stdout.write(f"{name} {family}: {row} {' '.join(examples)}\n")
    sys.stdout.write(f"{len(FAMILIES)} templates: {dict(totals)}\n")


if __name__ == "__main__":
    main()
