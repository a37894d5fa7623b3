"""The trainer in one process: arithmetic, events, progress and commands."""

import io
import json
import os
import pty
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import MODEL, RUN, run_of, train, write_run

import ms_data
from ms_parallel import DistributedTrainer, Engine, Layout, load_model
from ms_parallel.cli import main
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.events import JsonLines
from ms_parallel.models import architecture
from ms_parallel.progress import RunDisplay, Throughput, duration
from ms_parallel.run_file import read_run_file
from ms_parallel.training.inspection import inspect, picture
from ms_parallel.training.optional import data_package
from ms_parallel.weights import save_model


def trainer(output: Path, **settings: Any) -> DistributedTrainer:
    """A trainer with a tiny model."""
    defaults = {name: value for name, value in RUN.items() if name != "steps"}
    return DistributedTrainer(
        **{**defaults, "model_config": MODEL, "output_dir": output, **settings}
    )


def test_epochs_and_steps_count_the_same_batches(corpus: Path, tmp_path: Path) -> None:
    """Half an epoch is half the samples in full batches, and the held-out loss falls."""
    recorded: list[tuple[str, dict[str, Any]]] = []
    run = trainer(tmp_path, on_event=lambda event, fields: recorded.append((event, dict(fields))))
    result = run.train(corpus, epochs=0.05)
    steps = [fields for event, fields in recorded if event == "step"]
    assert result.step == len(steps) > 10
    assert result.tokens == result.step * RUN["batch_size"] * RUN["sequence_length"]
    samples = run._run.stream.stream.samples_per_epoch  # type: ignore[union-attr,attr-defined]
    assert result.step == round(0.05 * samples) // RUN["batch_size"]
    names = {"step", "loss", "grad_norm", "learning_rate", "tokens", "rate_tokens_per_s"}
    assert all(fields.keys() == names for fields in steps)
    assert result.held_out_loss is not None
    assert result.first_held_out_loss is not None
    assert result.held_out_loss < result.first_held_out_loss
    assert run.evaluate() == result.held_out_loss
    held_out = ms_data.inspect(run._run.shards).splits["held_out"]  # type: ignore[union-attr]
    for fields in (fields for event, fields in recorded if event == "evaluate"):
        assert fields["rows"] + fields["rows_left_out"] == held_out.tokens // RUN["sequence_length"]
        assert fields["rows"] >= RUN["batch_size"]


def test_shards_are_built_once_and_the_model_is_a_folder(corpus: Path, tmp_path: Path) -> None:
    """A second run reuses the shards; the trained folder has a tokenizer and loads."""
    result = trainer(tmp_path).train(corpus, steps=2)
    index = tmp_path / "shards" / "index.json"
    built = index.stat().st_mtime_ns
    longer = trainer(tmp_path).train(corpus, steps=3)
    assert index.stat().st_mtime_ns == built
    assert (result.step, longer.step) == (2, 3)
    assert longer.model_folder is not None
    assert (longer.model_folder / "tokenizer.json").is_file()
    logits = load_model(longer.model_folder)(torch.arange(8)[None])
    assert logits.shape[:2] == (1, 8)
    assert torch.isfinite(logits).all()


def test_a_trained_model_continues_a_prompt_up_to_the_end_of_the_document(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ms-parallel generate` prints prompt and text, deterministically for a seed."""
    folder = trainer(tmp_path, progress=False).train(corpus, steps=1).model_folder
    words = ["generate", str(folder), "--prompt", "def main(", "--device", "cpu"]
    texts = []
    for extra in ([], [], ["--seed", "1"]):
        assert main([*words, "--max-new-tokens", "8", *extra]) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("def main(") for text in texts)
    assert texts[0] == texts[1] != texts[2]
    assert main([*words, "--max-new-tokens", "8", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert f"def main({facts['text']}\n" == texts[0]
    assert facts["end_of_text"] or facts["tokens"] == 8

    # With equal logits, greedy decoding selects token 0, the end of the document.
    model = load_model(folder)
    assert data_package().Tokenizer.load(folder).end_of_text == 0
    torch.nn.init.zeros_(model.get_parameter("model.norm.weight"))
    save_model(model, tmp_path / "silent", tokenizer=folder)
    silent = ["generate", str(tmp_path / "silent"), *words[2:]]
    assert main([*silent, "--temperature", "0", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"text": "", "tokens": 1, "end_of_text": True}

    assert main([*words[:3], "", *words[4:]]) == 2
    assert main([*words, "--max-new-tokens", "0"]) == 2
    assert main(["generate", str(tmp_path / "none"), "--prompt", "x"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3


def test_a_restarted_run_writes_its_own_model(corpus: Path, tmp_path: Path) -> None:
    """Even if the existing one has as many steps; the same run again does not rewrite it."""
    folder = trainer(tmp_path).train(corpus, steps=2).model_folder
    assert folder is not None
    first = (folder / "model.safetensors").read_bytes()
    mtime_ns = folder.stat().st_mtime_ns
    trainer(tmp_path).train(corpus, steps=2)
    assert folder.stat().st_mtime_ns == mtime_ns
    shutil.rmtree(tmp_path / "checkpoints")
    trainer(tmp_path, seed=7).train(corpus, steps=2)
    assert (folder / "model.safetensors").read_bytes() != first


@pytest.mark.parametrize(
    "schedule", ["zb-v", pytest.param("interleaved-1f1b", marks=pytest.mark.slow)]
)
def test_a_model_with_several_stages_per_process_is_saved_completely(
    schedule: str, corpus: Path, tmp_path: Path
) -> None:
    """With schedules where a process has the first and last stage, or every second one."""
    run = write_run(tmp_path / "run.toml", corpus, steps=2, schedule=schedule)
    layers = ["--set", "model_config.num_hidden_layers=4", "--set", "parallel_config.pipeline=2"]
    result = train(run, 2, *layers)
    assert result.returncode == 0, result.stderr
    model = load_model(tmp_path / "run" / "model")
    assert model.config.num_hidden_layers == 4


def test_weights_in_other_formats_are_refused(corpus: Path, tmp_path: Path) -> None:
    """A pickle, or an index without its files; training must not start from new weights."""
    folder = trainer(tmp_path / "a").train(corpus, steps=1).model_folder
    assert folder is not None
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="is a pickle, which is not supported; convert it"):
        Engine(folder)
    (folder / "pytorch_model.bin").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError):
        Engine(folder)


def test_invalid_engine_settings_are_refused() -> None:
    """Microbatch sizes below 1, and an unknown choice."""
    config = architecture("llama", MODEL)
    for setting in ({"microbatch_size": 0}, {"microbatch_size": -1}, {"on_nonfinite": "rise"}):
        with pytest.raises(ConfigError, match=f"{next(iter(setting))} (is|must be)"):
            Engine(config, **setting)


@pytest.mark.parametrize("epochs", [float("inf"), float("nan"), True])
def test_epochs_must_be_finite(epochs: Any, corpus: Path, tmp_path: Path) -> None:
    """With a one-line error, not an overflow later."""
    with pytest.raises(ConfigError, match="epochs must be"):
        trainer(tmp_path).train(corpus, epochs=epochs)


def test_a_seed_may_be_a_timestamp(corpus: Path, tmp_path: Path) -> None:
    """Timestamps are common seeds, and torch accepts 64 bits."""
    assert trainer(tmp_path, seed=20261122093000123).train(corpus, steps=1).finished


def test_training_continues_from_the_weights_of_a_folder(corpus: Path, tmp_path: Path) -> None:
    """The first held-out loss of the second run is the last of the first."""
    first = trainer(tmp_path / "a").train(corpus, steps=5)
    shards = tmp_path / "a" / "shards"
    defaults = {name: value for name, value in run_of(shards).items() if name != "steps"}
    continued = DistributedTrainer(
        **{**defaults, "model_arch": first.model_folder, "output_dir": tmp_path / "b"}
    )
    second = continued.train(shards, steps=1)
    assert second.first_held_out_loss == pytest.approx(first.held_out_loss, rel=1e-6)


def test_events_are_json_lines_and_a_truncated_line_is_completed(tmp_path: Path) -> None:
    """A line cut by a crash does not spoil the next; infinities are null."""
    path = tmp_path / "deep" / "events.jsonl"
    path.parent.mkdir()
    path.write_text('{"kind":"st')
    lines = JsonLines(path)
    lines("step", {"step": 1, "loss": float("inf")})
    lines.close()
    cut, complete = path.read_text().splitlines()
    assert cut == '{"kind":"st'
    event = json.loads(complete)
    assert event.pop("time_s") > 1.7e9
    assert event == {"kind": "step", "step": 1, "loss": None}


def test_progress_is_lines_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, last and every tenth step; rate and time left follow once steps are typical.

    Here the first step takes 100 s, as if it compiled, and the others 1 s.
    """
    clock = iter([0.0, *range(100, 125)])
    monkeypatch.setattr("ms_parallel.progress.monotonic", lambda: next(clock))
    show, pace = RunDisplay(total=25, every=10, active=True), Throughput()
    for step in range(1, 26):
        pace.count(100)
        show.show_step(step, {"loss": 2.5}, pace)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/25", "10/25", "20/25", "25/25"]
    assert lines[0] == "step 1/25  loss 2.5000"
    assert lines[1] == "step 10/25  loss 2.5000  100 tokens/s  15 s left"
    assert lines[3] == "step 25/25  loss 2.5000  100 tokens/s  0 s left"


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same facts, and nothing if progress is off."""
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        display, pace = RunDisplay(total=3, every=1, active=True), Throughput()
        silent = RunDisplay(total=3, every=1, active=False)
        monkeypatch.undo()
        pace.count(100)
        pace.count(100)
        silent.show_step(2, {"loss": 9.5}, pace)
        display.show_step(3, {"loss": 2.5}, pace)
        display.close()
        output = b""
        while b"left" not in output:
            output += os.read(master, 1 << 16)
    os.close(master)
    assert b"3/3" in output
    assert b"loss 2.5000" in output
    assert b"9.5" not in output


def test_durations_are_human_readable() -> None:
    """Seconds, then minutes, then hours."""
    assert [duration(s) for s in (0.4, 45, 185, 7800)] == [
        "0 s",
        "45 s",
        "3 min 05 s",
        "2 h 10 min",
    ]


def test_a_run_file_takes_overrides_with_toml_values(tmp_path: Path) -> None:
    """Numbers stay numbers, text needs no quotes, and dots select tables."""
    run = write_run(tmp_path / "run.toml", Path("corpus"))
    overrides = ["batch_size=6", "output_dir=elsewhere", "parallel_config.tensor=2", "steps = 7"]
    run_file = read_run_file(run, [*overrides, "model_config.tie_word_embeddings=true"])
    assert (run_file.options.batch_size, run_file.length.steps) == (6, 7)
    assert run_file.options.output_dir == Path("elsewhere")
    assert run_file.options.parallel_config == Layout(tensor=2)
    assert run_file.options.model_config["tie_word_embeddings"] is True


def test_inspect_counts_the_models_parameters(tmp_path: Path) -> None:
    """Parameters equal the model's, split over stages and data ranks."""
    options = trainer(tmp_path, vocab_size=320, batch_size=8).options
    single = inspect(options, Layout())
    assert (
        single.parameters == 320 * 32 * 2 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 64) + 32
    )
    assert single.ranks[0].parameters == single.parameters
    split = inspect(options, Layout(pipeline=2, data=2))
    assert sum(rank.parameters for rank in split.ranks) == single.parameters
    assert split.picture == "\n".join(
        ["            data 0  data 1", "pipeline 0  [0]     [1]", "pipeline 1  [2]     [3]"]
    )
    assert picture(Layout(tensor=2)).endswith("[0 1]")


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=128),
        Layout(pipeline=64, data=512, tensor=8),
        Layout(pipeline=4, data=8, context=8, tensor=8),
        Layout(data=8, expert=4, context=2, tensor=2),
    ],
    ids=str,
)
def test_large_layouts_are_drawn_within_the_width_of_a_terminal(layout: Layout) -> None:
    """The first and the last rank are shown."""
    lines = picture(layout)
    assert max(map(len, lines.splitlines())) <= 120
    assert len(lines.splitlines()) <= 20
    assert lines.splitlines()[1].split()[2].startswith("[0")
    assert lines.endswith(f"{layout.world_size - 1}]")


@pytest.mark.usefixtures("no_process_group")
def test_inspect_prints_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both exit with 0, and --json prints one JSON object."""
    run = str(write_run(tmp_path / "run.toml", Path("corpus")))
    assert main(["inspect", run]) == 0
    assert "peak memory per rank" in capsys.readouterr().out
    assert main(["inspect", run, "--json"]) == 0
    assert isinstance(json.load(io.StringIO(capsys.readouterr().out)), dict)
