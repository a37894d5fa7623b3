"""Unpaired preferences: rows with a label, stored and streamed with their mismatched responses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ms_data import InstructionStream, UnpairedStream, build, read_unpaired, verify
from ms_data.cli import main
from ms_data.errors import SettingError, StateError

from .chat_templates import GENERATION_MARKS, write_rows, write_tokenizer
from .test_instructions import PAIRS, Reader

ROWS = [
    {"prompt": f"Is {n} even?", "completion": f"Number {n}. " * (1 + n % 3), "label": n % 3 == 0}
    for n in range(20)
]
SIZES: dict[str, Any] = {"sequence_length": 128, "batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the datasets `labeled` and `pairs`, and their tokenizer."""
    folder = tmp_path_factory.mktemp("unpaired")
    model = write_tokenizer(folder / "model")
    labeled = write_rows(folder / "labeled.jsonl", ROWS)
    build(
        labeled,
        tokenizer=model,
        out=folder / "labeled",
        chat=model,
        unpaired=True,
        held_out_fraction=0.2,
    )
    pairs = write_rows(folder / "pairs.jsonl", PAIRS)
    build(pairs, tokenizer=model, out=folder / "pairs", chat=model, pairs=True)
    return folder


def split_row(batch: Any, row: int, prefix: str = "") -> tuple[list[int], list[int]]:
    """Return prompt and completion tokens of a row."""
    targets = batch[f"{prefix}targets"][row]
    positions = np.flatnonzero(targets >= 0)
    first = int(positions[0])
    tokens = batch[f"{prefix}tokens"][row]
    return tokens[: first + 1].tolist(), targets[positions].tolist()


def test_labels_and_completions_survive_a_build(folder: Path) -> None:
    """Every row is delivered once per epoch with its label, and only completions are targets."""
    assert verify(folder / "labeled").faults == ()
    labels = []
    for split in ("train", "held_out"):
        stream = UnpairedStream(folder / "labeled", split=split, epochs=1, **SIZES)
        for batch in stream:
            has_targets = (batch["targets"] >= 0).any(1)
            labels += batch["label"][has_targets].tolist()
            assert batch["label"][~has_targets].tolist() == [0.0] * int((~has_targets).sum())
    assert sorted(labels) == sorted(float(row["label"]) for row in ROWS)


def test_mismatched_rows_rotate_the_completions_of_the_global_batch(folder: Path) -> None:
    """Row i has the prompt of row i and the completion of row i - 1."""
    batch = next(UnpairedStream(folder / "labeled", **SIZES))
    rows = [split_row(batch, row) for row in range(4)]
    mismatched = [split_row(batch, row, "kl_") for row in range(4)]
    assert [prompt for prompt, _ in mismatched] == [prompt for prompt, _ in rows]
    completions = [completion for _, completion in rows]
    assert [c for _, c in mismatched] == [completions[-1], *completions[:-1]]
    assert "kl_tokens" not in next(UnpairedStream(folder / "labeled", mismatched=False, **SIZES))


def test_the_ranks_together_read_the_global_batch(folder: Path) -> None:
    """The columns of two ranks, concatenated, equal one process."""
    alone = UnpairedStream(folder / "pairs", **SIZES)
    ranks = [UnpairedStream(folder / "pairs", place=Reader(rank, 2), **SIZES) for rank in (0, 1)]
    for _ in range(25):  # crosses the end of an epoch
        expected, parts = next(alone), [next(stream) for stream in ranks]
        for name, column in expected.items():
            assert np.array_equal(np.concatenate([part[name] for part in parts]), column)


def test_pairs_are_unpaired(folder: Path) -> None:
    """Each chosen response is desirable and each rejected one is not."""
    stream = UnpairedStream(folder / "pairs", shuffle=False, epochs=1, **SIZES)
    labels = np.concatenate([batch["label"] for batch in stream])
    assert labels.tolist() == [1.0] * len(PAIRS) + [0.0] * len(PAIRS)


def test_a_stream_resumes_from_its_state(folder: Path) -> None:
    """Batches after a restored position match an undisturbed stream."""
    stream = UnpairedStream(folder / "labeled", **SIZES)
    for _ in range(3):
        next(stream)
    again = UnpairedStream(folder / "labeled", **SIZES)
    again.load_state_dict(stream.state_dict())
    expected, batch = next(stream), next(again)
    assert all(np.array_equal(batch[name], column) for name, column in expected.items())
    other = UnpairedStream(folder / "pairs", **SIZES)
    with pytest.raises(StateError, match="dataset"):
        other.load_state_dict(stream.state_dict())


def test_long_responses_are_truncated_or_dropped_and_counted(folder: Path) -> None:
    """A response without a target in the row is dropped."""
    stream = UnpairedStream(folder / "labeled", sequence_length=30, batch_size=2)
    assert stream.cut_off > 0
    assert stream.left_out + stream.responses_per_epoch == len(stream.samples)
    with pytest.raises(SettingError, match="raise sequence_length"):
        UnpairedStream(folder / "labeled", sequence_length=3, batch_size=2)


def test_a_folder_of_the_wrong_kind_is_rejected(folder: Path) -> None:
    """The message names the kind of data in the folder."""
    with pytest.raises(SettingError, match="unpaired preferences"):
        InstructionStream(folder / "labeled", **SIZES)
    chats = write_rows(
        folder / "chats.jsonl",
        [
            {
                "messages": [
                    {"role": "user", "content": "Why?"},
                    {"role": "assistant", "content": "So."},
                ]
            }
        ],
    )
    build(chats, tokenizer=folder / "model", out=folder / "chats", chat=folder / "model")
    with pytest.raises(SettingError, match="conversations instead of preferences"):
        UnpairedStream(folder / "chats", **SIZES)


ASK = {"role": "user", "content": "Why?"}
SAY = {"role": "assistant", "content": "So."}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Why?", "completion": "So.", "label": True},
        {"prompt": [ASK], "completion": [SAY], "label": 1},
        {"prompt": [ASK], "completion": [ASK, SAY], "label": 1},
        {"messages": [ASK, SAY], "label": True},
        {
            "conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}],
            "label": True,
        },
    ],
)
def test_every_format_of_a_labeled_response_is_read(row: dict[str, Any]) -> None:
    """All are the same prompt, completion and label."""
    response = read_unpaired(row)
    assert (response.prompt, response.completion, response.label) == ([ASK], [SAY], True)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "Why?", "completion": "So."}, "must have `prompt`, `completion` and `label`"),
        ({"prompt": "Why?", "label": True}, "must have"),
        ({"prompt": "Why?", "completion": "So.", "label": "yes"}, "label must be true"),
        ({"prompt": "Why?", "completion": "So.", "label": 2}, "label must be true"),
        ({"prompt": "Why?", "completion": "So.", "label": None}, "label must be true"),
        ({"messages": [SAY], "label": True}, "no prompt"),
        ({"messages": [SAY, ASK], "label": True}, "assistant"),
        ({"prompt": [ASK], "completion": [ASK], "label": 0}, "assistant"),
        ({"prompt": "Why?", "chosen": "So.", "rejected": "No."}, "must have"),
    ],
)
def test_an_invalid_row_is_rejected(row: dict[str, Any], message: str) -> None:
    """The message names the key."""
    with pytest.raises(ValueError, match=message):
        read_unpaired(row)


def test_the_command_builds_labeled_responses(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--unpaired` excludes `--pairs` and needs a chat template."""
    (tmp_path / "chat.jinja").write_text(GENERATION_MARKS)
    corpus, model = str(folder / "labeled.jsonl"), str(folder / "model")
    call = ["build", corpus, "--tokenizer", model, "--out", str(tmp_path / "out"), "--unpaired"]
    assert main([*call, "--chat-template", str(tmp_path / "chat.jinja")]) == 0
    assert len(UnpairedStream(tmp_path / "out", **SIZES).samples) == len(ROWS)
    assert main(call) == 2
    assert "need a chat template" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*call, "--chat", "--pairs"])
