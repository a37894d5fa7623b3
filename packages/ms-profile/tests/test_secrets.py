"""Manifests and reports show a run's arguments without secrets."""

import subprocess
import sys
from pathlib import Path

import pytest

from ms_profile.secret_text import MASK, mask_arguments, without_secrets

SECRET = "s3cr3t-value"
LONG_SECRET = "s3cr3tvalue" * 4


@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key", SECRET],
        ["--api_key", SECRET],
        ["--apiKey", SECRET],
        ["--api-key=" + SECRET],
        ["--HF_TOKEN", SECRET],
        ["--wandb-key", SECRET],
        ["wandb.api_key=" + SECRET],
        ["+logger.token=" + SECRET],
        ["WANDB_API_KEY=" + SECRET],
        ["--db-password", SECRET],
        ["--password", "-" + SECRET],
        ["--client.secret", SECRET],
        ["--aws-secret-access-key", SECRET],
        ["--credentials", SECRET],
        ["--auth", SECRET],
        ["--data", f"s3://user:{SECRET}@host/bucket"],
        ["--data", f"https://host/x?a=1&access_token={SECRET}&b=2"],
        ["--data", f"https://host/x?X-Amz-Signature={SECRET}"],
        ["--data", f"https://host/x?sv=1&sig={SECRET}"],
        ["-H", f"Authorization: Bearer {SECRET}"],
        ["--headers", f'{{"api_key": "{SECRET}"}}'],
        ["--model", f"hf_{LONG_SECRET}"],
        ["--note", f"sk-{LONG_SECRET}"],
    ],
    ids=" ".join,
)
def test_a_secret_is_masked_however_it_is_passed(arguments: list[str]) -> None:
    """The name stays, the value is masked, and other arguments are unchanged."""
    masked = mask_arguments(["--lr", "0.1", *arguments, "--steps", "5"])
    assert "s3cr3t" not in " ".join(masked)
    assert MASK in " ".join(masked)
    assert masked[:2] == ("--lr", "0.1")
    assert masked[-2:] == ("--steps", "5")


def test_names_that_only_look_alike_are_left_alone() -> None:
    """Token counts, tokenizers, key heads and plain options are not secrets."""
    arguments = (
        "--tokenizer", "gpt2", "--max-new-tokens", "64", "--num-key-value-heads", "8", "--keys-dim",
        "4", "--monkey", "x", "train.toml", "--url", "https://host/x?page=2", "a=b", "--turkey=1",
        "time: 3", "--tokens", "1000000", "--eos-token", "</s>", "pad_token=<pad>",
    )  # fmt: skip
    assert mask_arguments(arguments) == arguments


@pytest.mark.parametrize(
    "text",
    [
        f"ConnectionError: https://user:{SECRET}@host/path is not there",
        f"401 for url: https://host/x?page=2&access_token={SECRET}",
        f"TypeError: login(api_key='{SECRET}', retries=3)",
        f"ValueError: HF_TOKEN={SECRET}, which has expired",
        f"Unauthorized: Authorization: Bearer {SECRET}",
        f"bad token hf_{LONG_SECRET}",
    ],
)
def test_a_secret_in_an_error_message_is_masked(text: str) -> None:
    """The rest of the message stays."""
    masked = without_secrets(text)
    assert "s3cr3t" not in masked
    assert MASK in masked
    assert masked[:6] == text[:6]


def test_ordinary_error_messages_are_left_alone() -> None:
    """Settings, counts and URLs without a secret are unchanged."""
    text = "ValueError: lr=0.1, max_new_tokens=64 at https://host/x?page=2; see train.py:3"
    assert without_secrets(text) == text


def test_the_error_of_a_failed_script_is_stored_without_its_secrets(tmp_path: Path) -> None:
    """It appears neither in the rank's manifest nor in the event log or report."""
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\nraise ConnectionError(f'https://user:{sys.argv[2]}@host is not there')\n"
    )
    command = [sys.executable, "-m", "ms_profile", "run", "--train-script", str(script)]
    command += ["--output-dir", str(tmp_path / "run"), "--", "--api-key", SECRET]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 1
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    (manifest,) = (tmp_path / "run" / "ranks").glob("*.json")
    assert f"https://{MASK}@host is not there" in manifest.read_text()


def test_neither_manifest_nor_report_contains_a_secret(tmp_path: Path) -> None:
    """The script gets the secret, but no file of the run has it."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nprint(sys.argv[1:])\n")
    command = [sys.executable, "-m", "ms_profile", "run", "--train-script", str(script)]
    command += ["--output-dir", str(tmp_path / "run"), "--", "--api-key", SECRET, "--lr", "0.1"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert SECRET in process.stdout
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert (tmp_path / "run" / "manifest.json") in files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert "--api-key" in (tmp_path / "run" / "manifest.json").read_text()
