"""Check that random conversations with tools keep all tokens, with the chat templates of a folder.

    python turns.py FOLDER

prints a line for each template in a folder of `*.jinja` files, and the totals.
"""

import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import tokenizers
from attrs import define, field, frozen
from transformers import PreTrainedTokenizerFast

from ms_align.chat.template import render_chat
from ms_align.environments.calls import Reply, ToolCall
from ms_align.environments.conversation import ChatFormat
from ms_align.errors import DataError
from ms_align.tokenizer import HuggingFaceTokenizer

WORDS = ["the", "answer", "is", "about", "red", "green", "12", "345", "because", "long,", "then?"]
SPECIAL = (
    r"<\|[^|<>\s]+\|>|<\uff5c[^<>]+\uff5c>|\[/?[A-Z_]{3,}\]"
    r"|<(?:start|end)_of_turn>|</?[a-z]+_?[a-z]*>"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


def tokenizer_for(
    template: str, tokens: Iterable[str] = (), bos: str = "<bos>", eos: str = "<eos>"
) -> HuggingFaceTokenizer:
    """Build a BPE tokenizer with merges, and the special tokens that a template mentions.

    `tokens` are further tokens that are not special.
    """
    special = sorted({bos, eos, *re.findall(SPECIAL, template)} - {"<think>", "</think>"})
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([" ".join(WORDS) * 3], trainer)
    model.add_tokens(
        [tokenizers.AddedToken(text, special=True, normalized=False) for text in special]
    )
    model.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in tokens])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    result = HuggingFaceTokenizer(tokenizer)
    result.tools = [TOOL]
    return result


@define
class Counts:
    """Outcomes of the turns of a template."""

    exact: int = 0
    """The template prints the entire conversation with the same text."""
    reformatted: int = 0
    """It prints calls differently from the response."""
    forked: int = 0
    """It changes earlier text, such as dropped thoughts."""
    refused: int = 0
    """It rejects the conversation, for example because it has no tools."""
    retokenized: int = 0
    """Turns where tokenizing the entire text again would have given other tokens."""
    problems: list[str] = field(factory=list)


@frozen
class TurnTokens:
    """Tokens of a turn, and the messages that follow it."""

    chat: ChatFormat
    history: list[dict[str, object]]
    """Messages before the response."""
    prompt: list[int]
    response: list[int]
    """Tokens of the response, with its stop token."""
    new_messages: list[dict[str, object]]
    next_prompt: list[int]
    forked: bool
    """The template would change earlier text."""


def converse(
    template: str,
    seed: int,
    *,
    counts: Counts,
    on_turn: Callable[[TurnTokens], None] | None = None,
    tokenizer: HuggingFaceTokenizer | None = None,
    stops: tuple[str, str] | None = None,
) -> None:
    """Hold a conversation of 2 to 6 turns, and check the tokens of each turn.

    `on_turn` gets each turn, and thoughts that a prompt opens are closed then. `stops` are the stop
    tokens of responses without and with calls, if the template prints none after them.
    """
    rng = random.Random(seed)
    tokenizer = tokenizer or tokenizer_for(template)
    chat = ChatFormat(tokenizer)
    sentence = lambda: " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))  # noqa: E731
    history: list[dict[str, object]] = [{"role": "user", "content": sentence()}]
    try:
        turn, prompt = chat.start(history)
    except DataError:
        counts.refused += 1
        return
    for index in range(rng.randint(2, 6)):
        calls = ()
        if rng.random() < 0.6:
            calls = (ToolCall(name="look", arguments={"at": sentence()}),)
        reasoning = sentence() if rng.random() < 0.3 else ""
        reply = Reply(content=sentence(), reasoning=reasoning, calls=calls)
        call_ids = [f"call{index:05d}"] * len(calls)
        message = reply.message(call_ids)
        try:
            text, stop = _response_text(chat, turn.messages, turn.text, message, reply)
        except DataError:  # the template takes lists of parts, not texts
            counts.refused += 1
            return
        if on_turn is not None and turn.text.rstrip().endswith("<think>"):
            thought = reasoning or sentence()
            text = f"{thought}\n</think>\n\n{text.rpartition('</think>')[2].lstrip()}"
        if stops is not None:
            text, stop = text.rstrip(), stops[bool(calls)]
        response = [*_sampled(tokenizer, text, rng), *tokenizer.encode(stop)]
        if calls:
            new = [{"role": "tool", "name": "look", "content": sentence()}]
            new[0]["tool_call_id"] = call_ids[0]
        else:
            new = [{"role": "user", "content": sentence()}]
        arguments = (turn, response, reply, new)
        try:
            extended = chat.extend(*arguments, stopped=True, call_ids=call_ids)
            continuation = extended or chat.append(*arguments, stopped=True, call_ids=call_ids)
        except DataError:
            counts.refused += 1
            return
        following = [*prompt, *response, *continuation.tokens]
        if following[: len(prompt) + len(response)] != [*prompt, *response]:
            counts.problems.append(f"turn {index}: the tokens of the turn before it changed")
        if extended is None:
            counts.forked += 1
        elif extended.exact:
            counts.exact += 1
            # All earlier turns were exact too, or the texts may differ.
            decoded = tokenizer.tokenizer.decode(following, skip_special_tokens=False)
            if counts.reformatted + counts.forked == 0 and decoded != extended.turn.text:
                counts.problems.append(f"turn {index}: {decoded!r} != {extended.turn.text!r}")
        else:
            counts.reformatted += 1
        counts.retokenized += tokenizer.encode(continuation.turn.text) != following
        if on_turn is not None:
            forked = extended is None
            on_turn(TurnTokens(chat, history, prompt, response, new, following, forked))
        turn, prompt, history = continuation.turn, following, [*history, message, *new]


def _response_text(
    chat: ChatFormat, messages: object, prompt: str, message: object, reply: Reply
) -> tuple[str, str]:
    """Return a response as the template prints it, or in Hermes' format, and its stop token."""
    tokenizer = chat.tokenizer.tokenizer
    special = "|".join(re.escape(str(t)) for t in tokenizer.added_tokens_decoder.values())
    try:
        printed = render_chat(
            tokenizer,
            [*messages, message],
            tools=[TOOL],
            generation_prompt=False,  # type: ignore
        )
    except DataError:
        printed = ""
    if printed.startswith(prompt):
        body = printed[len(prompt) :].rstrip()
        ends = list(re.finditer(f"(?:{special})$", body))
        if ends:
            return body[: ends[0].start()], ends[0][0]
    thought = f"<think>\n{reply.reasoning}\n</think>\n\n" if reply.reasoning else ""
    printed = render_chat(
        tokenizer,
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        generation_prompt=False,
    ).rstrip()
    stops = re.findall(f"b(?:{special})$", printed)
    return thought + reply.content, stops[0][1:] if stops else "<eos>"


def _sampled(tokenizer: HuggingFaceTokenizer, text: str, rng: random.Random) -> list[int]:
    """Tokenize pieces of a text, which gives other tokens than the entire text would."""
    pieces = re.split(r"(?<=[a-z ])(?=[a-z ])", text) if rng.random() < 0.5 else [text]
    tokens: list[int] = []
    start = 0
    while start < len(pieces):
        width = rng.randint(1, 5)
        tokens += tokenizer.encode("".join(pieces[start : start + width]))
        start += width
    return tokens


def main() -> None:
    """Print the counts of all templates in a folder."""
    totals: Counter[str] = Counter()
    paths = sorted(Path(sys.argv[1]).glob("*.jinja"))
    for path in paths:
        counts = Counts()
        for seed in range(10):
            converse(path.read_text(), seed, counts=counts)
        names = ("exact", "reformatted", "forked", "refused", "retokenized")
        row = {name: getattr(counts, name) for name in names}
        totals.update({**row, "problems": len(counts.problems)})
        sys.stdout.write(f"{path.stem} {row} {' '.join(counts.problems[:1])}\n")
    sys.stdout.write(f"{len(paths)} templates: {dict(totals)}\n")


if __name__ == "__main__":
    main()
