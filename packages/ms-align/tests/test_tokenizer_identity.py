"""Data, reward models and references with another tokenizer are rejected."""

import json
import shutil
from pathlib import Path

import pytest
from small_models import decoder
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from ms_align import GRPOTrainer, RewardModel
from ms_align.cli import main
from ms_align.errors import DataError, ModelError
from ms_align.files.tokenizer_source import tokenizer_difference
from ms_align.models.folder import load_model
from ms_align.tokenizer_files import files_of
from ms_data import build

VOCABULARY = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}


def write(
    folder: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]], *special_tokens: str
) -> Path:
    """Write a folder with a BPE tokenizer.json and some special tokens."""
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special_tokens])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_formatting_and_added_tokens_do_not_matter(tmp_path: Path) -> None:
    """Merges as strings or pairs, indentation, truncation and a new padding token."""
    base = write(tmp_path / "base", VOCABULARY, [("a", "b"), ("b", "c")], "<end>")
    extended = write(tmp_path / "more", VOCABULARY, [("a", "b"), ("b", "c")], "<end>", "<pad>")
    document = json.loads((extended / "tokenizer.json").read_text())
    document["model"]["merges"] = ["a b", "b c"]
    document["truncation"] = {
        "max_length": 8,
        "stride": 0,
        "strategy": "LongestFirst",
        "direction": "Right",
    }
    (extended / "tokenizer.json").write_text(json.dumps(document, indent=4))
    assert tokenizer_difference(base, extended, error=DataError) is None
    assert tokenizer_difference(extended, base / "tokenizer.json", error=DataError) is None


@pytest.mark.parametrize(
    ("vocabulary", "merges", "special_tokens", "message"),
    [
        ({**VOCABULARY, "a": 1, "b": 0}, [("a", "b"), ("b", "c")], ("<end>",), "token 0 is 'a'"),
        (VOCABULARY, [("b", "c"), ("a", "b")], ("<end>",), "different merges"),
        (VOCABULARY, [("a", "b"), ("b", "c")], ("<stop>",), "token 5 is '<end>'"),
        (VOCABULARY, [("a", "b"), ("b", "c")], ("<stop>", "<end>"), "token 5"),
        ({"a": 0, "b": 1, "c": 2, "ab": 3}, [("a", "b")], (), "token 4"),
    ],
)
def test_vocabulary_order_and_merges_matter(
    tmp_path: Path,
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    special_tokens: tuple[str, ...],
    message: str,
) -> None:
    """Also with the same number of tokens."""
    base = write(tmp_path / "base", VOCABULARY, [("a", "b"), ("b", "c")], "<end>")
    other = write(tmp_path / "other", vocabulary, merges, *special_tokens)
    assert message in (tokenizer_difference(base, other, error=DataError) or "")
    assert tokenizer_difference(other, base, error=DataError) is not None


def test_a_folder_without_a_tokenizer_is_not_compared(tmp_path: Path) -> None:
    """Model folders may lack a tokenizer."""
    base = write(tmp_path / "base", VOCABULARY, [("a", "b")])
    assert tokenizer_difference(base, tmp_path / "nothing", error=DataError) is None


def other_tokenizer(sets: Path, out: Path) -> Path:
    """Write the datasets' tokenizer with two bytes swapped."""
    document = json.loads((sets / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    out.mkdir(parents=True, exist_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(document))
    return out


@pytest.fixture
def model(sets: Path, tmp_path: Path) -> Path:
    """Model folder with the datasets' tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(sets / "model", folder)
    shutil.copy(sets / "tokenizer.json", folder)
    return folder


@pytest.mark.parametrize("command", ["sft", "dpo", "reward"])
def test_data_of_another_tokenizer_is_rejected(
    command: str, sets: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line before anything is written; a matching model is accepted."""
    other = other_tokenizer(sets, tmp_path / "other")
    shards = tmp_path / "shards"
    rows = sets / ("copy.jsonl" if command == "sft" else "pairs.jsonl")
    options = {"chat": sets / "chat.jinja", "pairs": command != "sft"}
    build(rows, tokenizer=other / "tokenizer.json", out=shards, **options)
    run = tmp_path / "run.toml"
    text = f'sequence_length = 64\nsteps = 1\noutput_dir = "{tmp_path / "out"}"\nprogress = false\n'
    run.write_text(f'model = "{model}"\ndataset = "{shards}"\n{text}')
    assert main([command, str(run)]) == 2
    error = capsys.readouterr().err
    assert "must have the same tokenizer" in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
    shutil.copy(other / "tokenizer.json", model)
    assert main([command, str(run)]) == 0


def train(model: Path, out: Path, **overrides: object) -> None:
    """Run one update of GRPO."""
    settings = {"reward_model": lambda samples: [len(s.response) for s in samples], **overrides}
    GRPOTrainer(
        policy_model=str(model),
        steps=1,
        batch_size=4,
        num_generations=2,
        max_new_tokens=3,
        output_dir=out,
        progress=False,
        **settings,  # type: ignore[arg-type]
    ).optimize(["a b", "c"])


@pytest.mark.parametrize("setting", ["reward_model", "reference_model", "tokenizer"])
def test_reward_and_reference_models_need_the_same_tokenizer(
    setting: str, sets: Path, model: Path, tmp_path: Path
) -> None:
    """The policy's token ids would mean other words."""
    other = other_tokenizer(sets, tmp_path / "other")
    folder = tmp_path / "second"
    if setting == "reward_model":
        RewardModel(load_model(sets / "model")).save(folder, files_of(other))
    else:
        shutil.copytree(sets / "model", folder)
        shutil.copy(other / "tokenizer.json", folder)
    with pytest.raises(ModelError, match="must have the same tokenizer"):
        train(model, tmp_path / "out", kl_coeff=0.1, **{setting: str(folder)})
    assert not (tmp_path / "out").exists()
    if setting == "reward_model":  # accepted with the policy's tokenizer
        RewardModel(load_model(sets / "model")).save(folder, files_of(model))
        train(model, tmp_path / "out", reward_model=str(folder))


@pytest.mark.parametrize("setting", ["reward_model", "reference_model"])
def test_a_model_that_lacks_tokens_of_the_policy_is_rejected(
    setting: str, model: Path, tmp_path: Path
) -> None:
    """Such a token would be out of range in its embedding."""
    small = decoder(vocab_size=200)
    second_model = RewardModel(small) if setting == "reward_model" else small
    with pytest.raises(ModelError, match="must have the tokenizer's 257 tokens"):
        train(model, tmp_path / "out", kl_coeff=0.1, **{setting: second_model})


def test_generation_with_another_tokenizer_is_rejected(
    sets: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tokenizer` may not contradict the model's own."""
    other = other_tokenizer(sets, tmp_path / "other")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n')
    run = tmp_path / "run.toml"
    out = f'output_path = "{tmp_path / "out.jsonl"}"\n'
    run.write_text(f'model = "{model}"\ndataset = "{tmp_path / "prompts.jsonl"}"\n{out}')
    assert main(["generate", str(run), "--set", f"tokenizer={other / 'tokenizer.json'}"]) == 2
    assert "must have the same tokenizer" in capsys.readouterr().err
    assert main(["generate", str(run), "--set", f"tokenizer={sets / 'tokenizer.json'}"]) == 0
