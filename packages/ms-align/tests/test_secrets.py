"""Keys and passwords do not reach run folders, events or error messages."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ms_align import GRPOTrainer
from ms_align.cli import main
from ms_align.secret_text import without_secrets

from .test_online import PROMPTS, settings

SECRET = "correct-horse-battery"


@dataclasses.dataclass
class RewardClient:
    """Client of a reward server, as users write them."""

    api_key: str

    def __call__(self, samples: Sequence[Any]) -> list[float]:
        """Fail like an HTTP client whose errors print the URL."""
        if len(samples) == 1 and len(samples[0].response) % 2:
            raise OSError(f"host unreachable, url: /score?api_key={self.api_key}&model=x")
        if any(len(sample.response) % 2 for sample in samples):
            raise OSError(f"https://user:{self.api_key}@host/score is down")
        return [float(index) for index in range(len(samples))]


@dataclasses.dataclass
class TokenizerWithSecret:
    """A caller's tokenizer with a field that holds a secret."""

    password: str

    def encode(self, text: str) -> list[int]:
        """Return one token per letter."""
        return [ord(letter) % 16 for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return letters whose count decides above whether the reward fails."""
        return "x" * (sum(tokens) % 7)


def test_no_file_of_a_run_contains_a_secret(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Fields of a caller's objects, command arguments, and errors of a reward server."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--api-key", SECRET])
    run = settings(
        tmp_path / "run",
        reward_model=RewardClient(SECRET),
        tokenizer=TokenizerWithSecret(SECRET),
        on_reward_failure="penalize",
        progress=True,
    )
    GRPOTrainer(**run, num_generations=4).optimize(PROMPTS)
    events = (tmp_path / "run/events.jsonl").read_text()
    assert "reward_failure" in events
    assert "api_key=***" in events
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["settings"]["reward_model"] == "RewardClient"
    assert "train.py" in (tmp_path / "run/lock").read_text()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) >= 4
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    captured = capfd.readouterr()
    assert SECRET not in captured.out + captured.err + caplog.text


def test_error_messages_mask_secrets_in_urls(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """User, password and named parameters; the rest of the line is unchanged."""
    url = f"https://me:{SECRET}@host/score?api_key={SECRET}"
    run = tmp_path / "run.toml"
    run.write_text(f'model = "no/model"\ndataset = "no.jsonl"\nreward_model = "{url}"\n')
    assert main(["grpo", str(run)]) == 2
    assert main(["sft", str(run), "--set", f"model={url}"]) == 2
    error = capfd.readouterr().err
    assert SECRET not in error


@pytest.mark.parametrize(
    "text",
    [
        f"url: /score?x=1&X-Amz-Signature={SECRET}",
        f"s3://key:{SECRET}@bucket/a",
        f"headers {{'Authorization': 'Bearer {SECRET}'}}",
        f"api_key={SECRET}",
        f"Authorization: Basic {SECRET}",
    ],
)
def test_secrets_are_masked_by_context(text: str) -> None:
    """In URLs, headers and settings."""
    assert SECRET not in without_secrets(text)
    assert "***" in without_secrets(text)


@pytest.mark.parametrize(
    "text",
    [
        "run.toml: unknown key: foo; did you mean 'bar'?",
        "eos_token: '</s>' is not in the vocabulary",
        "pad_token_id=3, max_new_tokens=8",
        "/data/hf_checkpoints/llama has no config.json; see https://host/a?page=2",
        "basic training of a model, e.g. a@b.c",
    ],
)
def test_ordinary_messages_are_unchanged(text: str) -> None:
    """Words such as key and token are common in them."""
    assert without_secrets(text) == text
