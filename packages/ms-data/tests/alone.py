"""Run by `nox -s alone` in a bare environment: the installed wheel and its requirements only."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import ms_data
from ms_data import TokenStream, build, train_tokenizer, verify


def check(condition: bool, fact: str) -> None:
    """Exit with status 1 if a fact does not hold."""
    if not condition:
        sys.exit(f"does not hold: {fact}")


def main() -> None:
    """Train a tokenizer, build, resume a stream and run the command."""
    absent = ("torch", "ms_kernels", "ms_parallel", "ms_align", "ms_compress", "ms_profile")
    for module in absent:
        check(importlib.util.find_spec(module) is None, f"{module} is absent here")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.jsonl")
        text.write_text('{"text": "To be, or not to be: that is the question."}\n' * 200)
        train_tokenizer(text, vocab_size=300, out=Path(folder, "tokenizer.json"))
        build(text, tokenizer=Path(folder, "tokenizer.json"), out=Path(folder, "shards"))
        check(verify(Path(folder, "shards")).ok, "the built dataset verifies")
        stream, restored = (
            TokenStream(Path(folder, "shards"), sequence_length=16, batch_size=4) for _ in range(2)
        )
        next(stream)
        restored.load_state_dict(stream.state_dict())
        expected, resumed = next(stream), next(restored)
        check(bool((expected["tokens"] == resumed["tokens"]).all()), "a stream resumes exactly")
        command = [sys.executable, "-I", "-m", "ms_data", "verify", str(Path(folder, "shards"))]
        result = subprocess.run(command, capture_output=True)
        check(result.returncode == 0, "ms-data verify works")
        Path(folder, "a.parquet").write_bytes(b"PAR1")
        command[4:] = ["tokenizer", str(Path(folder, "a.parquet")), "--out", "t.json"]
        result = subprocess.run(command, capture_output=True, text=True)
        check(
            result.returncode == 2 and result.stderr.count("\n") == 1,
            "a missing extra gives a one-line error",
        )
        check("pip install 'ms-data[parquet]'" in result.stderr, "the error names the extra")
    print(f"ms-data {ms_data.__version__} works alone")


if __name__ == "__main__":
    main()
