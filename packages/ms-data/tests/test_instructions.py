"""From an instruction set to shards to batches: complete, without leakage, resumable."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ms_data import InstructionStream, PreferenceStream, TokenStream, build, inspect, verify
from ms_data.building.encoders import ChatEncoder
from ms_data.chat.template import ChatTemplate
from ms_data.cli import main
from ms_data.disk.samples import Samples
from ms_data.errors import CorpusError, DataError, SettingError, StateError, TokenizerError
from ms_data.streams.packing_rules import PACKING_RULES
from ms_data.streams.packing_rules.best_fit import BestFitPacker
from ms_data.tokenization.tokenizer import Tokenizer

from .chat_templates import (
    DATED_TEMPLATE,
    GENERATION_MARKS,
    INST_TEMPLATE,
    ROWS,
    write_rows,
    write_tokenizer,
)
from .test_build import stat_or_none

SMALL_STEPS = """
from ms_data.cli import main
from ms_data.engine import batches, run
run.SAVE_EVERY_S, batches.BATCH_CHARACTERS = 0.0, 20_000
raise SystemExit(main())
"""
"""The command with small batches and a save after each."""

PAIRS = [
    {
        "prompt": f"Is {n} even?",
        "chosen": "No. Yes. " * (1 + n % 3),
        "rejected": "Perhaps",
        "margin": n,
    }
    for n in range(40)
]


class Reader:
    """A rank and the number of ranks."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer folder, instruction sets and a preference set, all built."""
    folder = tmp_path_factory.mktemp("instructions")
    model = write_tokenizer(folder / "model")
    write_rows(folder / "rows.jsonl", ROWS)
    write_rows(folder / "more.jsonl", ROWS[:50])
    write_rows(folder / "pairs.jsonl", PAIRS)
    tokenizer = Tokenizer.load(model)
    for name in ("rows", "more"):
        build(folder / f"{name}.jsonl", tokenizer=tokenizer, out=folder / name, chat=model)
    build(folder / "pairs.jsonl", tokenizer=tokenizer, out=folder / "pairs", chat=model, pairs=True)
    return folder


def read_back(batch: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return tokens and targets of each document in a batch that has targets."""
    documents = []
    for row in range(len(batch["tokens"])):
        for document in range(int(batch["documents"][row].max()) + 1):
            inside = batch["documents"][row] == document
            targets = batch["targets"][row][inside]
            if (targets >= 0).any():
                documents.append((tuple(batch["tokens"][row][inside]), tuple(targets)))
    return documents


def read_samples(samples: Samples) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the same, read from each sample directly."""
    expected = []
    for number in range(len(samples)):
        tokens, learnt, _ = samples.conversation(number)
        following = np.where(learnt[1:], tokens[1:], -100)
        expected.append((tuple(tokens), (*following, -100)))
    return expected


@pytest.mark.parametrize("open_rows", [512, 3, 0], ids=["packed", "narrow", "alone"])
def test_an_epoch_delivers_every_sample_once(workspace: Path, open_rows: int) -> None:
    """Each document's tokens and targets equal one sample's; the last batch is padded."""
    stream = InstructionStream(
        workspace / "rows", sequence_length=256, batch_size=4, epochs=1, open_rows=open_rows
    )
    batches = list(stream)
    assert all(batch["tokens"].shape == (4, 256) for batch in batches)
    delivered = [document for batch in batches for document in read_back(batch)]
    assert sorted(delivered) == sorted(read_samples(Samples(workspace / "rows")))
    for batch in batches:
        has_target = batch["targets"] != -100
        assert ((batch["weights"] > 0) == has_target).all()
        starts = np.diff(batch["documents"], axis=1, prepend=-1) != 0
        assert (batch["positions"][starts] == 0).all()
        assert (np.diff(batch["positions"], axis=1)[~starts[:, 1:]] == 1).all()


def test_only_the_assistant_answer_has_targets(workspace: Path) -> None:
    """Decoded targets are the answer and its end token."""
    tokenizer = Tokenizer.load(workspace / "rows")
    sample = Samples(workspace / "rows").conversation(7)
    answer = tokenizer._model.decode(
        sample.tokens[sample.loss_mask].tolist(), skip_special_tokens=False
    )
    assert answer == ROWS[7]["messages"][1]["content"] + "<|im_end|>"


def test_ranks_read_disjoint_rows_of_one_global_batch(workspace: Path) -> None:
    """Any number of ranks reads the same global batches."""
    settings: dict[str, Any] = {"sequence_length": 128, "batch_size": 4, "seed": 5}
    reference = InstructionStream(workspace / "rows", **settings)
    parts = [
        InstructionStream(workspace / "rows", place=Reader(r, 2), **settings) for r in range(2)
    ]
    for _ in range(12):
        batch, halves = next(reference), [next(part) for part in parts]
        for name, value in batch.items():
            joined = np.concatenate([half[name] for half in halves])  # type: ignore[literal-required]
            assert (joined == value).all()  # type: ignore[attr-defined]


@pytest.mark.parametrize("steps", [0, 1, 9, 40])
def test_a_stream_resumes_exactly_with_different_ranks_and_changed_weights(
    workspace: Path, steps: int
) -> None:
    """Two sources whose weights change during the run; the state goes through JSON."""

    def open_stream(**options: Any) -> InstructionStream:
        sources = {"rows": workspace / "rows", "more": workspace / "more"}
        return InstructionStream(
            sources, sequence_length=128, batch_size=4, weights={"rows": 3, "more": 1}, **options
        )

    stream = open_stream()
    for step in range(steps):
        if step == 5:
            stream.change_weights({"rows": 1, "more": 4})
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    halves = [open_stream(place=Reader(rank, 2)) for rank in range(2)]
    for half in halves:
        half.load_state_dict(state)
    for _ in range(10):
        batch = next(stream)
        parts = [next(half) for half in halves]
        assert (np.concatenate([part["tokens"] for part in parts]) == batch["tokens"]).all()
        assert (np.concatenate([part["task"] for part in parts]) == batch["task"]).all()
    due, counts = stream.mixture.due(stream.mixture.position), stream.mixture.counts
    assert all(abs(due[name] - counts[name]) <= 1 + 1e-6 for name in counts)
    assert {n: c["drawn"] for n, c in stream.counts.items()} == counts
    with pytest.raises(StateError, match="stream state has sources"):
        InstructionStream(workspace / "rows", sequence_length=64, batch_size=4).load_state_dict(
            state
        )


def test_sources_with_different_tokenizers_are_refused(workspace: Path, tmp_path: Path) -> None:
    """A different end-of-text token counts too; the error names both sources."""
    model = workspace / "model"
    tokenizer = Tokenizer.load(model, end_of_text="<|endoftext|>")
    build(workspace / "more.jsonl", tokenizer=tokenizer, out=tmp_path / "other", chat=model)
    sources = {"one": workspace / "rows", "same": workspace / "more", "two": tmp_path / "other"}
    with pytest.raises(SettingError, match="'one' and 'two' were built with different tokenizers"):
        InstructionStream(sources, sequence_length=128, batch_size=4)


def test_an_empty_sources_table_is_refused() -> None:
    with pytest.raises(SettingError, match="sources is empty"):
        InstructionStream({}, sequence_length=128, batch_size=4)


def test_every_epoch_has_each_sample_once_in_a_new_order(workspace: Path) -> None:
    stream = InstructionStream(workspace / "more", sequence_length=128, batch_size=1, open_rows=0)
    orders = []
    for _ in range(3):
        batches = [next(stream) for _ in range(50)]
        orders.append([tuple(batch["tokens"][0]) for batch in batches])
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("epochs", [2, None])
def test_a_finished_run_resumes_with_more_epochs(workspace: Path, epochs: int | None) -> None:
    """The second epoch is complete; restored without more epochs, the stream stays at its end."""

    def open_stream(epochs: int | None) -> InstructionStream:
        return InstructionStream(
            workspace / "more", sequence_length=128, batch_size=1, epochs=epochs, open_rows=0
        )

    stream = open_stream(1)
    first = [tuple(batch["tokens"][0]) for batch in stream]
    longer, same = open_stream(epochs), open_stream(1)
    longer.load_state_dict(stream.state_dict())
    same.load_state_dict(stream.state_dict())
    second = [tuple(next(longer)["tokens"][0]) for _ in range(50)]
    assert sorted(second) == sorted(first)
    assert list(longer) == [] if epochs else next(longer)
    assert list(same) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mixture", {"names": ["more"], "counts": [3], "phases": []}),
        ("mixture", [1]),
        ("flushed", None),
        ("rows", -1),
        ("tokens", 1.5),
        ("ready", [[-1, [[0, 0, 5]]]]),
        ("sources", [{"drawn": -7}]),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(
    workspace: Path, key: str, value: Any
) -> None:
    open_stream = partial(InstructionStream, workspace / "more", sequence_length=128, batch_size=2)
    stream, reference = open_stream(), open_stream()
    for _ in range(3):
        next(stream), next(reference)
    before = stream.state_dict()
    advanced = open_stream()
    for _ in range(9):
        next(advanced)
    state = advanced.state_dict()
    if key == "sources":
        value = [{**state["sources"][0], **value[0]}]
    damaged = {**state, key: value}
    if key == "flushed":
        del damaged[key]
    with pytest.raises(StateError):
        stream.load_state_dict(damaged)
    assert stream.state_dict() == before
    assert (next(stream)["tokens"] == next(reference)["tokens"]).all()


def test_settings_accept_numpy_integers(workspace: Path) -> None:
    """The state is JSON, as with Python integers."""
    for stream_class, folder in ((InstructionStream, "rows"), (PreferenceStream, "pairs")):
        states = []
        for integer in (int, np.int64):
            stream: Any = stream_class(
                workspace / folder,
                sequence_length=integer(32),  # type: ignore[arg-type]
                batch_size=integer(4),  # type: ignore[arg-type]
                seed=integer(3),  # type: ignore[arg-type]
            )
            next(stream)
            states.append(json.dumps(stream.state_dict()))
        assert states[0] == states[1]


def test_tasks_can_be_requested_per_row(workspace: Path) -> None:
    """As a task scheduler does; `task` holds the source of each row."""
    sources = {"rows": workspace / "rows", "more": workspace / "more"}
    stream = InstructionStream(sources, sequence_length=128, batch_size=3)
    for tasks in ([0, 1, 0], [1, 1, 1], [0, 0, 1]):
        batch = stream.of_tasks(tasks)
        assert batch["task"].tolist() == tasks
        assert ((batch["targets"] >= 0).sum(axis=1) > 0).all()
    with pytest.raises(SettingError, match="must be 3 numbers below 2"):
        stream.of_tasks([0, 2, 0])


def test_long_samples_are_split_or_truncated_and_counted(workspace: Path) -> None:
    """Splitting delivers every target once, truncation only those within the row."""
    total = sum(
        sum(target >= 0 for target in targets)
        for _, targets in read_samples(Samples(workspace / "rows"))
    )
    for long, key in (("split", "split"), ("truncate", "truncated")):
        stream = InstructionStream(
            workspace / "rows",
            sequence_length=32,
            batch_size=2,
            epochs=1,
            long=long,  # type: ignore[arg-type]
        )
        target_count = sum(int((batch["targets"] >= 0).sum()) for batch in stream)
        assert stream.counts["rows"][key] > 50
        assert target_count == total if long == "split" else 0 < target_count < total


def test_truncated_and_dropped_pairs_are_counted(workspace: Path) -> None:
    """Compare with counts taken from the pairs, for lengths that fit few, most and all."""
    samples = Samples(workspace / "pairs")
    pairs = [samples.pair(index)[:2] for index in range(len(samples))]
    lengths = [max(len(answer.tokens) for answer in pair) - 1 for pair in pairs]
    first_targets = [max(int(answer.loss_mask.argmax()) for answer in pair) for pair in pairs]
    counts = []
    for length in range(min(first_targets), max(lengths) + 8, 8):
        target_counts = [
            min(answer.loss_mask[1 : length + 1].sum() for answer in pair) for pair in pairs
        ]
        dropped = sum(not target_count for target_count in target_counts)
        truncated = sum(
            bool(target_count) and size > length
            for target_count, size in zip(target_counts, lengths, strict=True)
        )
        stream = PreferenceStream(workspace / "pairs", sequence_length=length, batch_size=2)
        assert (stream.left_out, stream.cut_off) == (dropped, truncated)
        counts.append((dropped, truncated))
    assert all(counts[0])
    assert counts[-1] == (0, 0)


def test_sample_weighting_gives_every_sample_a_total_weight_of_1(workspace: Path) -> None:
    """With token weighting, every target weighs 1."""
    for weighting in ("sample", "token"):
        stream = InstructionStream(
            workspace / "rows",
            sequence_length=128,
            batch_size=2,
            open_rows=0,
            weighting=weighting,  # type: ignore[arg-type]
        )
        batch = next(stream)
        sums = batch["weights"].sum(axis=1)
        targets = (batch["targets"] >= 0).sum(axis=1)
        assert sums == pytest.approx(1.0 if weighting == "sample" else targets, rel=1e-6)


@pytest.mark.parametrize("long", ["split", "truncate"])
def test_weighting_by_sample_counts_a_long_sample_once(workspace: Path, long: Any) -> None:
    """Split parts share their sample's weight; a truncated sample keeps its full weight."""
    stream = InstructionStream(
        workspace / "rows",
        sequence_length=32,
        batch_size=2,
        epochs=1,
        long=long,
        weighting="sample",
    )
    total = sum(float(batch["weights"].sum(dtype=np.float64)) for batch in stream)
    counts = stream.counts["rows"]
    assert counts["split" if long == "split" else "truncated"] > 50
    without = counts["without_targets"] if long == "truncate" else 0
    assert total == pytest.approx(len(ROWS) - without, rel=1e-6)


class NoPacking(BestFitPacker):
    """A packing rule that puts every segment into its own row."""

    def __init__(self, capacity: int, *, window: int) -> None:
        super().__init__(capacity, window=0)


def test_packing_rules_are_selected_by_name(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state records the name; an unknown name is refused with the list of rules."""
    open_stream = partial(
        InstructionStream, workspace / "rows", sequence_length=128, batch_size=2, epochs=1
    )
    monkeypatch.setitem(PACKING_RULES, "one_by_one", NoPacking)
    packed, unpacked = open_stream(), open_stream(packing="one_by_one")
    assert [batch["tokens"].tolist() for batch in unpacked] == [
        batch["tokens"].tolist() for batch in open_stream(open_rows=0)
    ]
    assert sum(1 for _ in packed) < unpacked.delivered_rows / 2
    with pytest.raises(StateError, match="stream state has packing 'one_by_one'"):
        open_stream().load_state_dict(unpacked.state_dict())
    with pytest.raises(
        SettingError, match="packing must be 'best_fit' or 'one_by_one', got 'none'"
    ):
        open_stream(packing="none")


def test_pairs_come_as_two_rows_with_targets_only_on_the_answers(workspace: Path) -> None:
    """Chosen above rejected with the margin on both; every pair once; ranks read disjoint rows."""
    stream = PreferenceStream(workspace / "pairs", sequence_length=128, batch_size=8, epochs=1)
    tokenizer = Tokenizer.load(workspace / "pairs")
    numbers = []
    for batch in stream:
        for row in range(0, 16, 2):
            if not (batch["targets"][row] >= 0).any():
                continue
            number = int(batch["margin"][row])
            assert batch["margin"][row + 1] == number
            answers = [
                tokenizer._model.decode([token for token in batch["targets"][index] if token >= 0])
                for index in (row, row + 1)
            ]
            assert answers == [PAIRS[number]["chosen"], "Perhaps"]
            numbers.append(number)
    assert sorted(numbers) == list(range(40))
    rank_stream = PreferenceStream(
        workspace / "pairs", sequence_length=128, batch_size=8, place=Reader(1, 2)
    )
    reference = PreferenceStream(workspace / "pairs", sequence_length=128, batch_size=8)
    next(rank_stream), next(reference)
    resumed = PreferenceStream(workspace / "pairs", sequence_length=128, batch_size=8)
    resumed.load_state_dict(json.loads(json.dumps(rank_stream.state_dict())))
    batch = next(reference)
    assert (next(rank_stream)["tokens"] == batch["tokens"][8:]).all()
    assert (next(resumed)["tokens"] == batch["tokens"]).all()
    with pytest.raises(SettingError, match="no pair of split"):
        PreferenceStream(workspace / "pairs", sequence_length=4, batch_size=8)


def test_the_command_builds_and_verifies_an_instruction_set(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--chat-template` accepts a tokenizer folder; `verify` detects an edited template file."""
    out, model = str(workspace / "built"), str(workspace / "model")
    command = [
        "build",
        str(workspace / "rows.jsonl"),
        "--tokenizer",
        model,
        "--chat-template",
        model,
    ]
    assert main([*command, "--out", out, "--held-out-fraction", "0.3"]) == 0
    assert "300 documents" in capsys.readouterr().out
    assert inspect(out).splits["held_out"].documents > 50
    assert verify(out).ok
    path = Path(out, "chat_template.jinja")
    path.write_text(path.read_text() + " ")
    assert [fault.file for fault in verify(out).faults] == ["tokenizer_config.json"]


def test_chat_uses_the_template_in_the_tokenizer_folder(
    workspace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gives the same shards as --chat-template with that folder; both together are refused."""
    model = workspace / "model"
    command = ["build", str(workspace / "rows.jsonl"), "--tokenizer"]
    assert (
        main([*command, str(model), "--chat-template", str(model), "--out", f"{tmp_path}/a"]) == 0
    )
    assert main([*command, str(model), "--chat", "--out", f"{tmp_path}/b"]) == 0
    assert main([*command, f"{model}/tokenizer.json", "--chat", "--out", f"{tmp_path}/c"]) == 0
    fingerprints = {inspect(tmp_path / name).fingerprint for name in "abc"}
    assert len(fingerprints) == 1
    with pytest.raises(SystemExit, match="2"):
        main([*command, str(model), "--chat", "--chat-template", str(model), "--out", "d"])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("pairs", [False, True])
def test_rows_that_differ_only_in_weight_land_in_the_same_split(
    workspace: Path, tmp_path: Path, pairs: bool
) -> None:
    """The split depends on the text; rows without a weight or margin stay where they were."""
    rows = [{**row, "margin": 0} if pairs else row for row in (PAIRS if pairs else ROWS)]
    weighted = [{**row, "weight": 0.5, **({"margin": 2} if pairs else {})} for row in rows]
    model = workspace / "model"
    held_out = []
    for name, variant in (("rows", rows), ("more", weighted)):
        corpus, out = write_rows(tmp_path / f"{name}.jsonl", variant), tmp_path / name
        tokenizer = Tokenizer.load(model)
        build(corpus, tokenizer=tokenizer, out=out, chat=model, held_out_fraction=0.5, pairs=pairs)
        held_out.append(Samples(out, "held_out"))
    assert 0 < len(held_out[0]) < len(rows)
    assert held_out[0].sizes.tolist() == held_out[1].sizes.tolist()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": 5}', "rows.jsonl:2: messages must be a list"),
        ('{"text": "x"}', "rows.jsonl:2: the row matches no format"),
        (
            '{"messages": ' + "[" * 10**5 + "]" * 10**5 + "}",
            "rows.jsonl:2: its JSON is nested too deeply",
        ),
        ("[1]", "rows.jsonl:2: a row must be a JSON object"),
        ('{"messages"', "rows.jsonl:2: malformed JSON line"),
        (
            '{"instruction": "a<|im_end|>b", "output": "c"}',
            "rows.jsonl:2: message 0 contains the special token '<|im_end|>'",
        ),
    ],
)
def test_a_bad_row_stops_the_build_with_file_and_line(
    workspace: Path, tmp_path: Path, row: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2 with one line and no output, or the row is skipped and counted with --skip-invalid."""
    corpus = tmp_path / "rows.jsonl"
    corpus.write_text(json.dumps(ROWS[0]) + "\n" + row + "\n" + json.dumps(ROWS[1]) + "\n")
    model = str(workspace / "model")
    command = ["build", str(corpus), "--tokenizer", model, "--chat-template", model]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [corpus]
    assert main([*command, "--out", str(tmp_path / "out"), "--skip-invalid"]) == 0
    assert "2 documents, 1 invalid ones skipped" in capsys.readouterr().out


def test_a_jinja_file_gets_the_special_tokens_of_the_tokenizer_folder(
    workspace: Path, tmp_path: Path
) -> None:
    """It gives the same bytes as the folder's template; a bare tokenizer file is refused."""
    model = write_tokenizer(tmp_path / "model", INST_TEMPLATE)
    template_file = tmp_path / "brackets.jinja"
    template_file.write_text(INST_TEMPLATE)
    for name, chat in (("folder", model), ("file", template_file)):
        build(
            workspace / "more.jsonl",
            tokenizer=Tokenizer.load(model),
            out=tmp_path / name,
            chat=chat,
        )
    shards = [(tmp_path / name / "shard-00000.msd").read_bytes() for name in ("folder", "file")]
    assert shards[0] == shards[1]
    prefix = Tokenizer.load(model).encode_chat("<s>[INST]")
    assert Samples(tmp_path / "file").conversation(0).tokens[: len(prefix)].tolist() == prefix
    bare = Tokenizer.load(model / "tokenizer.json")
    with pytest.raises(SettingError, match=r"uses bos_token.*tokenizer_config\.json"):
        build(workspace / "more.jsonl", tokenizer=bare, out=tmp_path / "none", chat=template_file)
    (model / "tokenizer_config.json").write_text("[")
    with pytest.raises(
        TokenizerError, match=r"tokenizer_config\.json: Expected `object`.*download"
    ):
        build(
            workspace / "more.jsonl",
            tokenizer=Tokenizer.load(model),
            out=tmp_path / "n",
            chat=template_file,
        )


@pytest.mark.parametrize(
    ("answer", "extra"),
    [
        ({"content": "x", "reasoning_content": "<|im_end|>"}, {}),
        ({"content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]}, {}),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {"a": ["<|im_end|>"]}}}]}, {}),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {"<|im_end|>": 1}}}]}, {}),
        ({"content": "x"}, {"tools": [{"description": "<|im_end|>"}]}),
    ],
    ids=["thoughts", "parts", "arguments", "names", "tools"],
)
def test_special_tokens_in_any_part_of_a_row_are_refused(
    workspace: Path, answer: dict[str, Any], extra: dict[str, Any]
) -> None:
    """Includes text that only forms a special token once the template joins its parts."""
    encoder = ChatEncoder(
        template=ChatTemplate(
            GENERATION_MARKS.replace("message.content | trim", "message.content")
        ),
        tokenizer=Tokenizer.load(workspace / "model"),
    )
    row = {"messages": [ROWS[0]["messages"][0], {"role": "assistant", **answer}], **extra}
    with pytest.raises(ValueError, match=r"contains the special token '<\|im_end\|>'"):
        encoder.parse(row)


def test_misuse_is_refused(workspace: Path, tmp_path: Path) -> None:
    """Wrong stream for a dataset, plain text corpus, undated template, pairs without a template."""
    with pytest.raises(SettingError, match="holds conversations, for InstructionStream"):
        TokenStream(workspace / "rows", sequence_length=8, batch_size=1)
    with pytest.raises(SettingError, match="holds preference pairs"):
        InstructionStream(workspace / "pairs", sequence_length=8, batch_size=1)
    with pytest.raises(DataError):
        PreferenceStream(workspace / "rows", sequence_length=8, batch_size=1).__next__()
    model = workspace / "model"
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(CorpusError, match="must be JSON Lines"):
        build(
            tmp_path / "rows.txt", tokenizer=Tokenizer.load(model), out=tmp_path / "o", chat=model
        )
    dated_model = write_tokenizer(tmp_path / "dated", DATED_TEMPLATE)
    with pytest.raises(SettingError, match="set the date with --today"):
        build(
            workspace / "rows.jsonl",
            tokenizer=Tokenizer.load(model),
            out=tmp_path / "o",
            chat=dated_model,
        )
    with pytest.raises(SettingError, match="need a chat template"):
        build(
            workspace / "rows.jsonl",
            tokenizer=Tokenizer.load(model),
            out=tmp_path / "o",
            pairs=True,
        )
    with pytest.raises(SettingError, match="has a target within"):
        InstructionStream(workspace / "rows", sequence_length=3, batch_size=1)


def test_a_killed_build_resumes_to_identical_bytes(workspace: Path, tmp_path: Path) -> None:
    """SIGKILL, then the same command."""
    corpus = write_rows(tmp_path / "rows.jsonl", ROWS * 15)
    out, model = tmp_path / "out", str(workspace / "model")
    command = [
        sys.executable,
        "-c",
        SMALL_STEPS,
    ]
    command += ["build", str(corpus), "--tokenizer", model, "--chat-template", model, "--out"]
    assert (
        subprocess.run([*command, str(tmp_path / "reference")], capture_output=True).returncode == 0
    )
    kills = 0
    while not out.exists():
        process = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL)
        journal, start = tmp_path / "out.partial" / "journal.msgpack", time.monotonic()
        before = stat_or_none(journal)
        while process.poll() is None and kills < 3 and time.monotonic() - start < 60:
            info = stat_or_none(journal)
            if info and (before is None or info.st_mtime_ns != before.st_mtime_ns):
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.002)
        process.wait()
    assert kills  # on a busy machine the build may finish before the next kill
    resumed, expected = (
        {p.name: p.read_bytes() for p in f.iterdir()} for f in (out, tmp_path / "reference")
    )
    assert resumed == expected
