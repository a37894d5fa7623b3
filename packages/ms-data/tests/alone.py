"""Run by `nox -s alone` in a bare environment: the installed wheel, with nothing but its needs."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import ms_data
from ms_data import TokenStream, build, train_tokenizer, verify


def check(holds: bool, fact: str) -> None:
    """End with status 1 where a fact does not hold."""
    if not holds:
        sys.exit(f"does not hold: {fact}")


def main() -> None:
    """From text to a resumed stream, and the command."""
    absent = ("torch", "ms_kernels", "ms_parallel", "ms_align", "ms_compress", "ms_profile")
    for module in absent:
        check(importlib.util.find_spec(module) is None, f"{module} is absent here")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text.jsonl")
        text.write_text('{"text": "To be, or not to be: that is the question."}\n' * 200)
        train_tokenizer(text, vocab_size=300, out=Path(folder, "tokenizer.json"))
        build(text, tokenizer=Path(folder, "tokenizer.json"), out=Path(folder, "shards"))
        check(verify(Path(folder, "shards")).ok, "what was built is whole")
        stream, again = (
            TokenStream(Path(folder, "shards"), sequence_length=16, batch_size=4) for _ in range(2)
        )
        next(stream)
        again.load_state_dict(stream.state_dict())
        follows, resumed = next(stream), next(again)
        check(bool((follows["tokens"] == resumed["tokens"]).all()), "a stream resumes")
        command = [sys.executable, "-I", "-m", "ms_data", "verify", str(Path(folder, "shards"))]
        done = subprocess.run(command, capture_output=True)
        check(done.returncode == 0, "ms-data verify works")
        Path(folder, "a.parquet").write_bytes(b"PAR1")
        command[4:] = ["tokenizer", str(Path(folder, "a.parquet")), "--out", "t.json"]
        done = subprocess.run(command, capture_output=True, text=True)
        check(done.returncode == 2 and done.stderr.count("\n") == 1, "a missing extra is one line")
        check("pip install 'ms-data[parquet]'" in done.stderr, "which names the extra")
    print(f"ms-data {ms_data.__version__} works alone")


if __name__ == "__main__":
    main()
