"""From an instruction set to shards to batches: nothing lost, nothing leaked, resumable."""

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

from .chats import BRACKETS, DATED, MARKED, ROWS, write_rows, write_tokenizer
from .test_build import facts_of

SMALL_STEPS = """
from ms_data.cli import main
from ms_data.engine import batches, run
run.SAVE_EVERY_S, batches.BATCH_CHARACTERS = 0.0, 20_000
raise SystemExit(main())
"""
"""The command, keeping what it has done after each small batch."""

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
    """A place among readers."""

    def __init__(self, rank: int, count: int) -> None:
        self.rank, self.count = rank, count


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer's folder, an instruction set and a preference set, built."""
    place = tmp_path_factory.mktemp("instructions")
    model = write_tokenizer(place / "model")
    write_rows(place / "rows.jsonl", ROWS)
    write_rows(place / "more.jsonl", ROWS[:50])
    write_rows(place / "pairs.jsonl", PAIRS)
    tokenizer = Tokenizer.load(model)
    for name in ("rows", "more"):
        build(place / f"{name}.jsonl", tokenizer=tokenizer, out=place / name, chat=model)
    build(place / "pairs.jsonl", tokenizer=tokenizer, out=place / "pairs", chat=model, pairs=True)
    return place


def read_back(batch: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Tokens and targets of each document of a batch that has a target."""
    found = []
    for row in range(len(batch["tokens"])):
        for document in range(int(batch["documents"][row].max()) + 1):
            inside = batch["documents"][row] == document
            targets = batch["targets"][row][inside]
            if (targets >= 0).any():
                found.append((tuple(batch["tokens"][row][inside]), tuple(targets)))
    return found


def truth(samples: Samples) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The same of each sample, one at a time."""
    found = []
    for number in range(len(samples)):
        tokens, learnt, _ = samples.conversation(number)
        following = np.where(learnt[1:], tokens[1:], -100)
        found.append((tuple(tokens), (*following, -100)))
    return found


@pytest.mark.parametrize("open_rows", [512, 3, 0], ids=["packed", "narrow", "alone"])
def test_an_epoch_delivers_every_sample_once_and_whole(place: Path, open_rows: int) -> None:
    """Tokens and targets of each document are those of one sample; the last batch is filled up."""
    stream = InstructionStream(
        place / "rows", sequence_length=256, batch_size=4, epochs=1, open_rows=open_rows
    )
    batches = list(stream)
    assert all(batch["tokens"].shape == (4, 256) for batch in batches)
    found = [one for batch in batches for one in read_back(batch)]
    assert sorted(found) == sorted(truth(Samples(place / "rows")))
    for batch in batches:
        learns = batch["targets"] != -100
        assert ((batch["weights"] > 0) == learns).all()
        starts = np.diff(batch["documents"], axis=1, prepend=-1) != 0
        assert (batch["positions"][starts] == 0).all()
        assert (np.diff(batch["positions"], axis=1)[~starts[:, 1:]] == 1).all()


def test_the_answer_is_what_is_learnt(place: Path) -> None:
    """Decoded targets are the assistant's words and its end."""
    tokenizer = Tokenizer.load(place / "rows")
    sample = Samples(place / "rows").conversation(7)
    said = tokenizer._model.decode(
        sample.tokens[sample.loss_mask].tolist(), skip_special_tokens=False
    )
    assert said == ROWS[7]["messages"][1]["content"] + "<|im_end|>"


def test_ranks_read_the_rows_of_one_global_batch(place: Path) -> None:
    """Any number of readers, the same batches."""
    settings: dict[str, Any] = {"sequence_length": 128, "batch_size": 4, "seed": 5}
    whole = InstructionStream(place / "rows", **settings)
    parts = [InstructionStream(place / "rows", place=Reader(r, 2), **settings) for r in range(2)]
    for _ in range(12):
        batch, halves = next(whole), [next(part) for part in parts]
        for name, value in batch.items():
            joined = np.concatenate([half[name] for half in halves])  # type: ignore[literal-required]
            assert (joined == value).all()  # type: ignore[attr-defined]


@pytest.mark.parametrize("at", [0, 1, 9, 40])
def test_a_stream_resumes_exactly_with_other_ranks_and_other_weights(place: Path, at: int) -> None:
    """Two sources, weights that change in mid-run, the state through JSON."""

    def make(**more: Any) -> InstructionStream:
        sources = {"rows": place / "rows", "more": place / "more"}
        return InstructionStream(
            sources, sequence_length=128, batch_size=4, weights={"rows": 3, "more": 1}, **more
        )

    stream = make()
    for step in range(at):
        if step == 5:
            stream.change_weights({"rows": 1, "more": 4})
        next(stream)
    state = json.loads(json.dumps(stream.state_dict()))
    halves = [make(place=Reader(rank, 2)) for rank in range(2)]
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
        InstructionStream(place / "rows", sequence_length=64, batch_size=4).load_state_dict(state)


def test_sources_of_different_tokenizers_are_not_mixed(place: Path, tmp_path: Path) -> None:
    """Another file or another end of text; both sources are named."""
    model = place / "model"
    tokenizer = Tokenizer.load(model, end_of_text="<|endoftext|>")
    build(place / "more.jsonl", tokenizer=tokenizer, out=tmp_path / "other", chat=model)
    sources = {"one": place / "rows", "same": place / "more", "two": tmp_path / "other"}
    with pytest.raises(SettingError, match="'one' and 'two' were built with different tokenizers"):
        InstructionStream(sources, sequence_length=128, batch_size=4)


def test_a_table_of_no_sources_is_refused() -> None:
    """By one line, as a run file may hold an empty table."""
    with pytest.raises(SettingError, match="sources is empty"):
        InstructionStream({}, sequence_length=128, batch_size=4)


def test_epochs_repeat_no_sample_before_all_came(place: Path) -> None:
    """Each epoch has every sample once, in another order."""
    stream = InstructionStream(place / "more", sequence_length=128, batch_size=1, open_rows=0)
    orders = []
    for _ in range(3):
        batches = [next(stream) for _ in range(50)]
        orders.append([tuple(batch["tokens"][0]) for batch in batches])
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("epochs", [2, None])
def test_a_run_that_ended_goes_on_in_a_longer_one(place: Path, epochs: int | None) -> None:
    """Its second epoch comes whole; the state is still that of an end for as many epochs."""

    def make(epochs: int | None) -> InstructionStream:
        return InstructionStream(
            place / "more", sequence_length=128, batch_size=1, epochs=epochs, open_rows=0
        )

    stream = make(1)
    first = [tuple(batch["tokens"][0]) for batch in stream]
    longer, again = make(epochs), make(1)
    longer.load_state_dict(stream.state_dict())
    again.load_state_dict(stream.state_dict())
    second = [tuple(next(longer)["tokens"][0]) for _ in range(50)]
    assert sorted(second) == sorted(first)
    assert list(longer) == [] if epochs else next(longer)
    assert list(again) == []


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
def test_a_damaged_state_is_refused_and_changes_nothing(place: Path, key: str, value: Any) -> None:
    """The stream goes on as if it had not been shown."""
    make = partial(InstructionStream, place / "more", sequence_length=128, batch_size=2)
    stream, whole = make(), make()
    for _ in range(3):
        next(stream), next(whole)
    before = stream.state_dict()
    later = make()
    for _ in range(9):
        next(later)
    state = later.state_dict()
    if key == "sources":
        value = [{**state["sources"][0], **value[0]}]
    damaged = {**state, key: value}
    if key == "flushed":
        del damaged[key]
    with pytest.raises(StateError):
        stream.load_state_dict(damaged)
    assert stream.state_dict() == before
    assert (next(stream)["tokens"] == next(whole)["tokens"]).all()


def test_settings_may_be_numbers_of_numpy(place: Path) -> None:
    """The state is JSON all the same, and that of plain numbers."""
    for kind, folder in ((InstructionStream, "rows"), (PreferenceStream, "pairs")):
        states = []
        for number in (int, np.int64):
            stream: Any = kind(
                place / folder,
                sequence_length=number(32),  # type: ignore[arg-type]
                batch_size=number(4),  # type: ignore[arg-type]
                seed=number(3),  # type: ignore[arg-type]
            )
            next(stream)
            states.append(json.dumps(stream.state_dict()))
        assert states[0] == states[1]


def test_tasks_can_be_asked_for_row_by_row(place: Path) -> None:
    """As a scheduler of tasks does; `task` says which source each row is of."""
    sources = {"rows": place / "rows", "more": place / "more"}
    stream = InstructionStream(sources, sequence_length=128, batch_size=3)
    for tasks in ([0, 1, 0], [1, 1, 1], [0, 0, 1]):
        batch = stream.of_tasks(tasks)
        assert batch["task"].tolist() == tasks
        assert ((batch["targets"] >= 0).sum(axis=1) > 0).all()
    with pytest.raises(SettingError, match="must be 3 numbers below 2"):
        stream.of_tasks([0, 2, 0])


def test_long_samples_are_cut_off_or_in_parts_and_counted(place: Path) -> None:
    """In parts every target comes once; cut off, those within the row."""
    whole = sum(sum(t >= 0 for t in targets) for _, targets in truth(Samples(place / "rows")))
    for long, key in (("split", "split"), ("truncate", "truncated")):
        stream = InstructionStream(
            place / "rows",
            sequence_length=32,
            batch_size=2,
            epochs=1,
            long=long,  # type: ignore[arg-type]
        )
        learnt = sum(int((batch["targets"] >= 0).sum()) for batch in stream)
        assert stream.counts["rows"][key] > 50
        assert learnt == whole if long == "split" else 0 < learnt < whole


def test_pairs_that_are_cut_off_or_left_out_are_counted(place: Path) -> None:
    """Compare with the pairs themselves, for rows that hold few of them, most, and all."""
    samples = Samples(place / "pairs")
    pairs = [samples.pair(number)[:2] for number in range(len(samples))]
    lengths = [max(len(part.tokens) for part in parts) - 1 for parts in pairs]
    begins = [max(int(part.loss_mask.argmax()) for part in parts) for parts in pairs]
    counts = []
    for length in range(min(begins), max(lengths) + 8, 8):
        learnt = [min(part.loss_mask[1 : length + 1].sum() for part in parts) for parts in pairs]
        left_out = sum(not count for count in learnt)
        cut_off = sum(bool(c) and n > length for c, n in zip(learnt, lengths, strict=True))
        stream = PreferenceStream(place / "pairs", sequence_length=length, batch_size=2)
        assert (stream.left_out, stream.cut_off) == (left_out, cut_off)
        counts.append((left_out, cut_off))
    assert all(counts[0])
    assert counts[-1] == (0, 0)


def test_weighting_by_sample_gives_each_the_same_sum(place: Path) -> None:
    """One a sample, however long its answer; one a token otherwise."""
    for weighting in ("sample", "token"):
        stream = InstructionStream(
            place / "rows",
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
def test_weighting_by_sample_counts_a_long_sample_once(place: Path, long: Any) -> None:
    """Parts share their sample's weight; what is left of one that is cut off bears it alone."""
    stream = InstructionStream(
        place / "rows",
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


class OneByOne(BestFitPacker):
    """A packing rule that gives each segment a row of its own."""

    def __init__(self, capacity: int, *, window: int) -> None:
        super().__init__(capacity, window=0)


def test_another_packing_rule_is_chosen_by_its_name(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state keeps the name; a rule that is not there is refused with those that are."""
    make = partial(InstructionStream, place / "rows", sequence_length=128, batch_size=2, epochs=1)
    monkeypatch.setitem(PACKING_RULES, "one_by_one", OneByOne)
    packed, alone = make(), make(packing="one_by_one")
    assert [batch["tokens"].tolist() for batch in alone] == [
        batch["tokens"].tolist() for batch in make(open_rows=0)
    ]
    assert sum(1 for _ in packed) < alone.delivered_rows / 2
    with pytest.raises(StateError, match="stream state has packing 'one_by_one'"):
        make().load_state_dict(alone.state_dict())
    with pytest.raises(
        SettingError, match="packing must be 'best_fit' or 'one_by_one', got 'none'"
    ):
        make(packing="none")


def test_pairs_come_as_two_rows_with_only_the_answers_learnt(place: Path) -> None:
    """Chosen above rejected, the margin with both; every pair once; ranks share."""
    stream = PreferenceStream(place / "pairs", sequence_length=128, batch_size=8, epochs=1)
    tokenizer = Tokenizer.load(place / "pairs")
    seen = []
    for batch in stream:
        for row in range(0, 16, 2):
            if not (batch["targets"][row] >= 0).any():
                continue
            number = int(batch["margin"][row])
            assert batch["margin"][row + 1] == number
            said = [
                tokenizer._model.decode([t for t in batch["targets"][at] if t >= 0])
                for at in (row, row + 1)
            ]
            assert said == [PAIRS[number]["chosen"], "Perhaps"]
            seen.append(number)
    assert sorted(seen) == list(range(40))
    half = PreferenceStream(place / "pairs", sequence_length=128, batch_size=8, place=Reader(1, 2))
    whole = PreferenceStream(place / "pairs", sequence_length=128, batch_size=8)
    next(half), next(whole)
    again = PreferenceStream(place / "pairs", sequence_length=128, batch_size=8)
    again.load_state_dict(json.loads(json.dumps(half.state_dict())))
    batch = next(whole)
    assert (next(half)["tokens"] == batch["tokens"][8:]).all()
    assert (next(again)["tokens"] == batch["tokens"]).all()
    with pytest.raises(SettingError, match="no pair of split"):
        PreferenceStream(place / "pairs", sequence_length=4, batch_size=8)


def test_the_command_builds_and_verifies_an_instruction_set(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--chat-template` takes a tokenizer's folder; damage in the template's file is found."""
    out, model = str(place / "made"), str(place / "model")
    command = ["build", str(place / "rows.jsonl"), "--tokenizer", model, "--chat-template", model]
    assert main([*command, "--out", out, "--held-out-fraction", "0.3"]) == 0
    assert "300 documents" in capsys.readouterr().out
    assert inspect(out).splits["held_out"].documents > 50
    assert verify(out).ok
    path = Path(out, "chat_template.jinja")
    path.write_text(path.read_text() + " ")
    assert [fault.file for fault in verify(out).faults] == ["tokenizer_config.json"]


def test_chat_takes_the_template_in_the_folder_of_the_tokenizer(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same shards as naming the folder twice, also where its file is given; never both."""
    model = place / "model"
    rows = ["build", str(place / "rows.jsonl"), "--tokenizer"]
    assert main([*rows, str(model), "--chat-template", str(model), "--out", f"{tmp_path}/a"]) == 0
    assert main([*rows, str(model), "--chat", "--out", f"{tmp_path}/b"]) == 0
    assert main([*rows, f"{model}/tokenizer.json", "--chat", "--out", f"{tmp_path}/c"]) == 0
    prints = {inspect(tmp_path / name).fingerprint for name in "abc"}
    assert len(prints) == 1
    with pytest.raises(SystemExit, match="2"):
        main([*rows, str(model), "--chat", "--chat-template", str(model), "--out", "d"])
    assert "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("pairs", [False, True])
def test_rows_that_differ_in_their_weight_alone_are_in_one_split(
    place: Path, tmp_path: Path, pairs: bool
) -> None:
    """The text decides; those without weight or margin stay where they were."""
    rows = [{**row, "margin": 0} if pairs else row for row in (PAIRS if pairs else ROWS)]
    more = [{**row, "weight": 0.5, **({"margin": 2} if pairs else {})} for row in rows]
    model = place / "model"
    held = []
    for name, given in (("rows", rows), ("more", more)):
        corpus, out = write_rows(tmp_path / f"{name}.jsonl", given), tmp_path / name
        tokenizer = Tokenizer.load(model)
        build(corpus, tokenizer=tokenizer, out=out, chat=model, held_out_fraction=0.5, pairs=pairs)
        held.append(Samples(out, "held_out"))
    assert 0 < len(held[0]) < len(rows)
    assert held[0].sizes.tolist() == held[1].sizes.tolist()


@pytest.mark.parametrize(
    ("row", "says"),
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
    place: Path, tmp_path: Path, row: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit 2, one line, nothing left; or left out and counted with --skip-invalid."""
    corpus = tmp_path / "rows.jsonl"
    corpus.write_text(json.dumps(ROWS[0]) + "\n" + row + "\n" + json.dumps(ROWS[1]) + "\n")
    model = str(place / "model")
    command = ["build", str(corpus), "--tokenizer", model, "--chat-template", model]
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [corpus]
    assert main([*command, "--out", str(tmp_path / "out"), "--skip-invalid"]) == 0
    assert "2 documents, 1 invalid ones skipped" in capsys.readouterr().out


def test_a_jinja_file_is_told_the_special_tokens_of_the_tokenizer(
    place: Path, tmp_path: Path
) -> None:
    """The same bytes as with the folder's own template; without a folder it is refused."""
    model = write_tokenizer(tmp_path / "model", BRACKETS)
    alone = tmp_path / "brackets.jinja"
    alone.write_text(BRACKETS)
    for name, chat in (("own", model), ("alone", alone)):
        build(place / "more.jsonl", tokenizer=Tokenizer.load(model), out=tmp_path / name, chat=chat)
    shards = [(tmp_path / name / "shard-00000.msd").read_bytes() for name in ("own", "alone")]
    assert shards[0] == shards[1]
    said = Tokenizer.load(model).encode_chat("<s>[INST]")
    assert Samples(tmp_path / "alone").conversation(0).tokens[: len(said)].tolist() == said
    file = Tokenizer.load(model / "tokenizer.json")
    with pytest.raises(SettingError, match=r"uses bos_token.*tokenizer_config\.json"):
        build(place / "more.jsonl", tokenizer=file, out=tmp_path / "none", chat=alone)
    (model / "tokenizer_config.json").write_text("[")
    with pytest.raises(
        TokenizerError, match=r"tokenizer_config\.json: Expected `object`.*download"
    ):
        build(place / "more.jsonl", tokenizer=Tokenizer.load(model), out=tmp_path / "n", chat=alone)


@pytest.mark.parametrize(
    ("answer", "more"),
    [
        ({"content": "x", "reasoning_content": "<|im_end|>"}, {}),
        ({"content": [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]}, {}),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {"a": ["<|im_end|>"]}}}]}, {}),
        ({"tool_calls": [{"function": {"name": "f", "arguments": {"<|im_end|>": 1}}}]}, {}),
        ({"content": "x"}, {"tools": [{"description": "<|im_end|>"}]}),
    ],
    ids=["thoughts", "parts", "arguments", "names", "tools"],
)
def test_no_part_of_a_row_may_spell_a_special_token(
    place: Path, answer: dict[str, Any], more: dict[str, Any]
) -> None:
    """Whatever a template may print, joined as it may join it."""
    encoder = ChatEncoder(
        template=ChatTemplate(MARKED.replace("message.content | trim", "message.content")),
        tokenizer=Tokenizer.load(place / "model"),
    )
    row = {"messages": [ROWS[0]["messages"][0], {"role": "assistant", **answer}], **more}
    with pytest.raises(ValueError, match=r"contains the special token '<\|im_end\|>'"):
        encoder.parse(row)


def test_wrong_uses_are_refused(place: Path, tmp_path: Path) -> None:
    """A reader for other data, a plain text file, an undated template, one name for two sources."""
    with pytest.raises(SettingError, match="holds conversations, for InstructionStream"):
        TokenStream(place / "rows", sequence_length=8, batch_size=1)
    with pytest.raises(SettingError, match="holds preference pairs"):
        InstructionStream(place / "pairs", sequence_length=8, batch_size=1)
    with pytest.raises(DataError):
        PreferenceStream(place / "rows", sequence_length=8, batch_size=1).__next__()
    model = place / "model"
    (tmp_path / "rows.txt").write_text("x")
    with pytest.raises(CorpusError, match="must be JSON Lines"):
        build(
            tmp_path / "rows.txt", tokenizer=Tokenizer.load(model), out=tmp_path / "o", chat=model
        )
    dated = write_tokenizer(tmp_path / "dated", DATED)
    with pytest.raises(SettingError, match="set the date with --today"):
        build(place / "rows.jsonl", tokenizer=Tokenizer.load(model), out=tmp_path / "o", chat=dated)
    with pytest.raises(SettingError, match="need a chat template"):
        build(place / "rows.jsonl", tokenizer=Tokenizer.load(model), out=tmp_path / "o", pairs=True)
    with pytest.raises(SettingError, match="has a target within"):
        InstructionStream(place / "rows", sequence_length=3, batch_size=1)


def test_a_build_killed_at_any_time_ends_in_the_same_bytes(place: Path, tmp_path: Path) -> None:
    """Kill -9, then the same command: shard for shard what an undisturbed build wrote."""
    corpus = write_rows(tmp_path / "rows.jsonl", ROWS * 15)
    out, model = tmp_path / "out", str(place / "model")
    command = [
        sys.executable,
        "-c",
        SMALL_STEPS,
    ]
    command += ["build", str(corpus), "--tokenizer", model, "--chat-template", model, "--out"]
    assert subprocess.run([*command, str(tmp_path / "truth")], capture_output=True).returncode == 0
    killed = 0
    while not out.exists():
        process = subprocess.Popen([*command, str(out)], stdout=subprocess.DEVNULL)
        journal, began = tmp_path / "out.partial" / "journal.msgpack", time.monotonic()
        before = facts_of(journal)
        while process.poll() is None and killed < 3 and time.monotonic() - began < 60:
            facts = facts_of(journal)
            if facts and (before is None or facts.st_mtime_ns != before.st_mtime_ns):
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
                break
            time.sleep(0.002)
        process.wait()
    assert killed  # on a busy machine a build may be done before it is killed again
    made, wanted = (
        {p.name: p.read_bytes() for p in f.iterdir()} for f in (out, tmp_path / "truth")
    )
    assert made == wanted
