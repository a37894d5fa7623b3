"""Published formats of instruction and preference data, recognized strictly."""

from typing import Any

import pytest

from ms_data import read_conversation, read_pair

ASK = {"role": "user", "content": "Why?"}
SAY = {"role": "assistant", "content": "So."}
NO = {"role": "assistant", "content": "No."}
TERSE = {"role": "system", "content": "Be terse."}
TURN = {"from": "human", "value": "Why?"}
ANSWER = {"from": "gpt", "value": "So."}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASK, SAY], "id": 3},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]},
        {"instruction": "Why?", "output": "So."},
        {"instruction": "Why?", "input": "", "output": "So.", "history": []},
    ],
)
def test_the_three_conversation_formats_are_equivalent(row: dict[str, Any]) -> None:
    assert read_conversation(row).messages == [ASK, SAY]


def test_all_parts_of_a_format_are_read() -> None:
    """System prompt, history and input; tools as text; tool calls and results; sample weights."""
    row: dict[str, Any] = {
        "instruction": "Add.",
        "input": "2 3",
        "output": "5",
        "system": "Be exact.",
        "history": [["1 1", "2"]],
        "weight": 0.5,
    }
    conversation = read_conversation(row)
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert conversation.messages[3]["content"] == "Add.\n\n2 3"
    assert conversation.weight == 0.5
    turns = [
        {"from": "human", "value": "Weather?"},
        {"from": "function_call", "value": '{"name": "w", "arguments": {"at": "Rome"}}'},
        {"from": "observation", "value": "sunny"},
        {"from": "gpt", "value": "Sunny."},
    ]
    conversation = read_conversation(
        {"conversations": turns, "tools": '[{"name": "w"}]', "system": "S"}
    )
    assert conversation.tools == [{"name": "w"}]
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert conversation.messages[2]["tool_calls"][0]["function"]["arguments"] == {"at": "Rome"}


def test_sharegpt_turn_weights_mean_the_same_as_openai_ones() -> None:
    """A weight of None equals a missing key."""
    turns = [{**TURN, "weight": None}, {**ANSWER, "weight": 0}, TURN, {**ANSWER, "weight": 1}]
    assert read_conversation({"conversations": turns}).messages == [
        ASK,
        {**SAY, "weight": 0},
        ASK,
        {**SAY, "weight": 1},
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "matches no format"),
        ({"text": "plain"}, "matches no format, its keys are 'text'"),
        ({"messages": [ASK, SAY], "conversations": []}, "matches 2 formats"),
        ({"messages": []}, "must be a list of messages"),
        ({"messages": [ASK]}, "nothing to train on"),
        (
            {"messages": [{"role": "bot", "content": "x"}]},
            r"messages\[0\].role must be one of .*, got 'bot'",
        ),
        ({"messages": [{**ASK, "txt": 1}, SAY]}, "unknown key 'txt'"),
        ({"messages": [ASK, {"role": "assistant", "content": ""}]}, "empty assistant message"),
        ({"messages": [ASK, {"role": "assistant", "content": 5}]}, "must be a string, got 5"),
        ({"messages": [{"role": "user", "content": [{"type": "table"}]}, SAY]}, "is not text"),
        ({"messages": [ASK, {**SAY, "weight": 2}]}, "weight must be 0 or 1, got 2"),
        ({"conversations": [{"from": "cat", "value": "x"}]}, "from must be one of .*, got 'cat'"),
        ({"conversations": [TURN, {**ANSWER, "loss": 0}]}, r"\[1\] has an unknown key 'loss'"),
        ({"conversations": [TURN, {**ANSWER, "weight": 2}]}, r"\[1\].weight must be 0 or 1, got 2"),
        ({"conversations": [{"value": "x"}]}, "must have `from` and `value`"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "must be JSON"),
        ({"instruction": "x"}, "without `output`"),
        ({"instruction": "", "output": "x"}, "instruction is empty"),
        ({"instruction": "x", "output": "y", "history": [["q"]]}, r"history\[0\]"),
        ({"messages": [ASK, SAY], "weight": -1}, "0 or more"),
        ({"messages": [ASK, SAY], "tools": "{"}, "not JSON"),
    ],
)
def test_malformed_conversations_are_refused_with_the_location(
    row: dict[str, Any], message: str
) -> None:
    """The error gives the problem, the location and the expected form."""
    with pytest.raises(ValueError, match=message):
        read_conversation(row)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
        {"prompt": [ASK], "chosen": [SAY], "rejected": [NO]},
        {"prompt": "Why?", "chosen": [ASK, SAY], "rejected": [ASK, NO]},
        {"chosen": [ASK, SAY], "rejected": [ASK, NO]},
        {"messages": [ASK], "chosen": SAY, "rejected": NO},
        {
            "conversations": [{"from": "human", "value": "Why?"}],
            "chosen": {"from": "gpt", "value": "So."},
            "rejected": {"from": "gpt", "value": "No."},
        },
        {"instruction": "Why?", "input": "", "chosen": "So.", "rejected": "No."},
    ],
)
def test_the_preference_formats_are_equivalent(row: dict[str, Any]) -> None:
    pair = read_pair(row)
    assert (pair.prompt, pair.chosen, pair.rejected) == ([ASK], [SAY], [NO])
    assert (pair.margin, pair.weight) == (0.0, 1.0)
    assert read_pair({**row, "margin": 2}).margin == 2.0
    assert read_pair({**row, "system": "Be terse."}).prompt == [TERSE, ASK]


def test_a_system_prompt_already_in_the_prompt_is_not_repeated() -> None:
    """Some datasets also store it in a separate column."""
    row = {"prompt": [TERSE, ASK], "chosen": "So.", "rejected": "No.", "system": "Be terse."}
    assert read_pair(row).prompt == [TERSE, ASK]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": [TERSE, ASK], "chosen": "y", "rejected": "z", "system": "Be kind."},
            "`system` is not the system message of the prompt",
        ),
        ({"prompt": "x", "chosen": "y"}, "must have `chosen` and `rejected`"),
        ({"prompt": "x", "chosen": "y", "rejected": "y"}, "are identical"),
        ({"prompt": "x", "messages": [ASK], "chosen": "y", "rejected": "z"}, "two prompts"),
        ({"chosen": "y", "rejected": "z"}, "no prompt"),
        ({"prompt": "x", "chosen": [ASK], "rejected": [SAY]}, "assistant message"),
    ],
)
def test_malformed_pairs_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_pair(row)
