"""Reports about the data: counts, end tokens, and missing held-out splits; reading prompts."""

import csv
import gzip
import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import tokenizers
import zstandard

from ms_align import GRPOTrainer, SFTTrainer
from ms_align.cli import main
from ms_align.errors import DataError
from ms_align.rewards.named import named_rewards
from ms_align.rollouts.prompts import read_prompts
from ms_align.tokenizer import ByteTokenizer
from ms_align.trainers.dpo import DPOTrainer
from ms_data import PreferenceStream, build
from ms_parallel import save_model

from .instruction_sets import TEMPLATE, byte_tokenizer, row
from .small_models import decoder

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def events(folder: Path, event_kind: str) -> list[dict[str, Any]]:
    """Read the events of one kind."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == event_kind]


def write_model_and_data(
    folder: Path, rows: list[dict[str, Any]], template: str = TEMPLATE, **options: Any
) -> tuple[Path, Path]:
    """Write a model folder with a tokenizer, and build data with it."""
    model, data = folder / "model", folder / "shards"
    save_model(decoder(vocab_size=262), model)  # type: ignore[arg-type]
    tokenizer = tokenizers.Tokenizer.from_str(byte_tokenizer().decode())
    if template is CHATML:
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(model / "tokenizer.json"))
    (folder / "chat.jinja").write_text(template)
    (folder / "rows.jsonl").write_text("".join(json.dumps(example) + "\n" for example in rows))
    chat = folder / "chat.jinja"
    build(folder / "rows.jsonl", tokenizer=model / "tokenizer.json", out=data, chat=chat, **options)
    return model, data


def train(trainer_class: type[Any], model: Path, data: Path, out: Path, **options: Any) -> Any:
    """Run a few steps with progress output."""
    quiet = {"sequence_length": 64, "batch_size": 4, "progress": True, "log_every": 1000}
    return trainer_class(
        model=str(model), output_dir=out, **{"steps": 2, **quiet, **options}
    ).train(data)


def test_truncated_answers_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every second prompt fills its row: events at the start and the end, and one warning."""
    rows = [row(("word " * 60 if n % 2 else "") + f"what is {n}?", f"{n}.") for n in range(40)]
    model, data = write_model_and_data(tmp_path, rows)
    train(SFTTrainer, model, data, tmp_path / "out", steps=None, epochs=1)
    data_events = events(tmp_path / "out", "data")
    assert data_events[0]["step"] == 1
    for event in (data_events[0], data_events[-1]):  # the stream reads ahead of packing
        assert event["truncated"] == event["without_targets"]
        assert event["drawn"] // 2 - 2 <= event["truncated"] <= event["drawn"] // 2 + 2
    assert data_events[-1]["drawn"] >= 40
    assert f"{data_events[-1]['truncated']} parts have no answer tokens" in capfd.readouterr().out


def test_skipped_pairs_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """At the start of a run."""
    rows = [
        {"prompt": "word " * (60 if n % 4 == 0 else 1) + str(n), "chosen": "yes", "rejected": "no"}
        for n in range(40)
    ]
    model, data = write_model_and_data(tmp_path, rows, pairs=True)
    train(DPOTrainer, model, data, tmp_path / "out", steps=1)
    (event,) = events(tmp_path / "out", "left_out")
    assert (event["left_out"], event["cut_off"], event["pairs"]) == (10, 0, 40)
    assert "of 40 pairs, 10 are skipped" in capfd.readouterr().out


def test_skipped_held_out_pairs_are_counted(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the start of a run that evaluates on held-out data."""
    rows = [
        {"prompt": "word " * (60 if n % 2 == 0 else 1) + str(n), "chosen": "yes", "rejected": "no"}
        for n in range(80)
    ]
    model, data = write_model_and_data(tmp_path, rows, pairs=True, held_out_fraction=0.4)
    lost = PreferenceStream(data, sequence_length=64, batch_size=4, split="held_out").left_out
    assert lost > 5
    train(DPOTrainer, model, data, tmp_path / "out", steps=1)
    assert [event["left_out"] for event in events(tmp_path / "out", "held_out_left_out")] == [lost]
    assert f"{lost} held-out pairs are skipped" in capfd.readouterr().out


OUTSIDE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}{% endgeneration %}<|endoftext|>{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(("template", "ended"), [(TEMPLATE, True), (OUTSIDE, False)])
def test_answers_without_an_end_token_give_a_warning(
    template: str, ended: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The model would not learn to stop; answers with an end token give no warning."""
    model, data = write_model_and_data(
        tmp_path, [row(f"hi {n}", "hello there") for n in range(40)], template
    )
    train(SFTTrainer, model, data, tmp_path / "out")
    (event,) = events(tmp_path / "out", "text_ends")
    assert event["texts"] > 0
    assert event["ended"] == (event["texts"] if ended else 0)
    assert ("will not learn to stop" in capfd.readouterr().out) is not ended


def test_samples_of_a_run_end_with_the_end_token_of_the_data(tmp_path: Path) -> None:
    """With ChatML's end of turn, which differs from the tokenizer's end of text."""
    rows = [row("capital?", "Lima.") for _ in range(80)]
    rows += [row(f"capital {n}?", "Lima.") for n in range(80)]
    model, data = write_model_and_data(tmp_path, rows, CHATML, held_out_fraction=0.2)
    settings = {"steps": 60, "learning_rate": 1e-2, "eval_every": 30}
    train(SFTTrainer, model, data, tmp_path / "out", **settings)
    samples = events(tmp_path / "out", "sample")
    assert samples
    assert samples[-1]["response"] == "Lima."
    config = json.loads((tmp_path / "out/model/generation_config.json").read_text())
    ends = config["eos_token_id"]
    assert 258 in (ends if isinstance(ends, list) else [ends])


@pytest.mark.parametrize("every", [None, 1])
def test_missing_held_out_data_gives_a_warning(
    every: int | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """For data without a held-out split and for prompts, only if evaluation is requested."""
    model, data = write_model_and_data(tmp_path, [row(f"hi {n}", "hello") for n in range(20)])
    train(SFTTrainer, model, data, tmp_path / "sft", eval_every=every)
    GRPOTrainer(
        policy_model=str(model),
        reward_model=lambda samples: [float(len(sample.response)) for sample in samples],
        steps=1,
        batch_size=4,
        num_generations=2,
        max_new_tokens=3,
        eval_every=every,
        output_dir=tmp_path / "grpo",
    ).optimize(["a", "b"])
    for name in ("sft", "grpo"):
        assert len(events(tmp_path / name, "no_held_out")) == (0 if every is None else 1)
    assert capfd.readouterr().out.count("nothing is evaluated") == (0 if every is None else 2)
    (event,) = events(tmp_path / "grpo", "prompts")
    assert (event["prompts"], event["held_out"], event["longest"]) == (2, 0, 1)
    (rollout,) = events(tmp_path / "grpo", "rollout")
    assert 0 <= rollout["truncated"] <= 4


def test_generation_reports_truncated_answers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line of text, and the counts in `--json`."""
    model, _ = write_model_and_data(tmp_path, [row(f"hi {n}", "hello") for n in range(20)])
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n')
    run = tmp_path / "run.toml"
    text = f'model = "{model}"\ndataset = "{tmp_path / "prompts.jsonl"}"\nnum_generations = 3\n'
    run.write_text(f'{text}max_new_tokens = 2\noutput_path = "{tmp_path / "out.jsonl"}"\n')
    assert main(["generate", str(run), "--json"]) == 0
    captured = capfd.readouterr()
    summary = json.loads(captured.out)
    assert summary["stopped"] + summary["truncated"] == 3
    assert f"{summary['truncated']} cut at max_new_tokens = 2" in captured.err


def test_a_reward_of_a_module_in_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python modules are found as with `ms-parallel prove`."""
    (tmp_path / "rewards_of_this_folder.py").write_text("def right(samples):\n    return []\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))]
    )
    reward: Callable[..., Any] = named_rewards("rewards_of_this_folder:right")
    assert reward([]) == []


def test_the_base_folders_settings_and_license_are_kept(tmp_path: Path) -> None:
    """Generation settings, padding side, model_max_length, special tokens map, license."""
    model, data = write_model_and_data(tmp_path, [row(f"hi {n}", "hello") for n in range(20)])
    generation = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [0, 7]}
    (model / "generation_config.json").write_text(json.dumps(generation))
    settings = {"padding_side": "left", "model_max_length": 4096, "eos_token": "<|endoftext|>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "special_tokens_map.json").write_text('{"eos_token": "<|endoftext|>"}')
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/rag.jinja").write_text("{{ documents }}")
    (model / "LICENSE").write_text("free")
    (model / "NOTICE.txt").write_text("by the authors")
    shutil.rmtree(data)
    chat = tmp_path / "chat.jinja"
    build(tmp_path / "rows.jsonl", tokenizer=model / "tokenizer.json", out=data, chat=chat)
    for layout in (None, {"data": 1}):
        out = tmp_path / f"out-{layout is None}"
        train(SFTTrainer, model, data, out, layout=layout)
        saved = json.loads((out / "model/generation_config.json").read_text())
        assert {name: saved.get(name) for name in generation} == generation
        config = json.loads((out / "model/tokenizer_config.json").read_text())
        assert {name: config.get(name) for name in settings} == settings
        assert (out / "model/chat_template.jinja").read_text() == TEMPLATE
        extra_template = out / "model/additional_chat_templates/rag.jinja"
        assert extra_template.read_text() == "{{ documents }}"
        assert (out / "model/LICENSE").read_text() == "free"
        assert (out / "model/NOTICE.txt").is_file()
        assert (out / "model/special_tokens_map.json").is_file()


class Chats(ByteTokenizer):
    """Tokenizer with a chat template."""

    def encode_messages(self, messages: Any) -> list[int]:
        """Return one token, the number of messages."""
        return [len(messages)]


@pytest.mark.parametrize(
    "message",
    [
        {"prompt": "question 1", "answer": "1"},
        {"from": "human", "value": "hi"},
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": 7, "content": "hi"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
    ],
)
def test_messages_that_a_template_would_drop_are_rejected(message: dict[str, Any]) -> None:
    """A tool call may have no content."""
    with pytest.raises(DataError, match="message 0 must"):
        read_prompts([[message]], Chats())
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert read_prompts([[{"role": "user", "content": "hi"}, call]], Chats())[0].tokens == (2,)


HI = {"role": "user", "content": "hi"}
PROMPTS: dict[str, list[Any]] = {
    "rows": [{"prompt": "a [b]", "answer": 1}, {"prompt": [HI, HI, HI]}],
    "texts": ["a [b]", "c"],
    "tokens": [[1, 2], [3]],
    "chats": [[HI], [HI, HI]],
}


@pytest.mark.parametrize("entries", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
def test_a_prompt_file_has_lines_or_one_array(
    entries: list[Any], compressed: bool, tmp_path: Path
) -> None:
    """Each format gives the same prompts as the list, with any file name."""
    expected = read_prompts(entries, Chats())
    lines = [json.dumps(entry) for entry in entries]
    for number, text in enumerate(
        ["\n".join(lines), json.dumps(entries), "\ufeff\n" + json.dumps(entries, indent=1)]
    ):
        path = tmp_path / f"{number}.JSON"
        path.write_bytes(gzip.compress(text.encode()) if compressed else text.encode())
        assert read_prompts(path, Chats()) == expected
    (tmp_path / "answers.json").write_text(json.dumps(list(range(len(entries)))))
    with_answers = read_prompts(entries, Chats(), tmp_path / "answers.json")
    assert [prompt.answer for prompt in with_answers] == [str(n) for n in range(len(entries))]


TABLE = [{"prompt": "a [b]", "answer": "1"}, {"prompt": 'say "c", twice', "answer": "2"}]


def write_table(path: Path) -> None:
    """Write `TABLE` in the format that the path's suffixes name."""
    file_type, *compression = [suffix[1:] for suffix in path.suffixes]
    if file_type == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(TABLE), path)
        return
    text = io.StringIO()
    if file_type == "jsonl":
        text.writelines(json.dumps(row) + "\n" for row in TABLE)
    else:
        quoting = csv.QUOTE_ALL if file_type == "csv" else csv.QUOTE_MINIMAL
        table = csv.DictWriter(
            text, list(TABLE[0]), delimiter="," if file_type == "csv" else "\t", quoting=quoting
        )
        table.writeheader()
        table.writerows(TABLE)
    content = text.getvalue().encode()
    if compression == ["zst"]:  # two frames, as written by tools that append
        content = zstandard.compress(content[:30]) + zstandard.compress(content[30:])
    elif compression == ["gz"]:
        content = gzip.compress(content)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["csv", "tsv", "parquet", "csv.gz", "tsv.zst", "jsonl.zst", "jsonl.gz"]
)
def test_prompts_are_read_from_all_table_formats(name: str, tmp_path: Path) -> None:
    """CSV, TSV and Parquet files, plain or compressed, give the rows of JSON."""
    path = tmp_path / f"prompts.{name}"
    write_table(path)
    assert read_prompts(path, Chats()) == read_prompts(TABLE, Chats())


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"prompt,answer\na,b\n", "malformed JSON line"),
        (b"PAR1\0\0", "malformed JSON line"),
        (b"\x28\xb5\x2f\xfd\0", "zstd file is cut off"),
        (zstandard.compress(b'{"prompt": "a"}')[:-3], "zstd file is cut off"),
        (b"\x1f\x8b\x08\0", "damaged gzip file"),
        (gzip.compress(b'{"prompt": "a"}', mtime=0)[:-9], "damaged gzip file"),
        (b'[\n{"prompt": "a"},\n{"pro', "truncated"),
        (b'{"prompt": "a"}\n{"pro', "line 2: .*truncated"),
        (b'[{"from": "human", "value": "hi"}]', r"entry 0 has keys \['from', 'value'\]"),
        (b" \n", "is empty"),
        (b"[]", "is empty"),
    ],
)
def test_a_file_without_prompts_is_rejected_in_one_line(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    """Tables, compressed or truncated files, other columns, and empty files."""
    (tmp_path / "prompts.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=problem) as raised:
        read_prompts(tmp_path / "prompts.jsonl", Chats())
    assert "\n" not in str(raised.value)
