"""Fill of packed rows, and tokens per CPU second of `InstructionStream`.

Run it with python packages/ms-data/benchmarks/packing.py. It writes an instruction set from the
standard library's docstrings, builds it with a tokenizer trained on it, and reads three epochs.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ms_data import BestFitPacker, InstructionStream, Segment, build, train_tokenizer

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from docstrings import write_instructions

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROUNDS = 5


def measure_stream(folder: Path, length: int) -> tuple[float, float]:
    """Return the fill and the sample tokens per CPU second, each a median of `ROUNDS` rounds."""
    rates = []
    for _ in range(ROUNDS):
        stream = InstructionStream(folder, sequence_length=length, batch_size=8, long="split")
        next(stream)
        tokens, start = 0, time.process_time()
        for _ in range(400_000 // length // 8 + 1):
            tokens += int((next(stream)["positions"] >= 0).sum())
        rates.append(tokens * stream.fill / (time.process_time() - start))
    return stream.fill, float(np.median(rates))


def measure_packer(length: int) -> tuple[float, float]:
    """Return the fill and the samples packed per CPU second, for lognormal lengths."""
    lengths = np.random.default_rng(0).lognormal(5, 1, 200_000).astype(int)
    sizes = np.clip(lengths, 8, length).tolist()
    packer, rows, start_s = BestFitPacker(length), [], time.process_time()
    for number, size in enumerate(sizes):
        rows += packer.add(Segment(number, 0, size))
    seconds = time.process_time() - start_s
    used = sum(stop - start for row in rows for _, start, stop in row)
    return used / len(rows) / length, len(sizes) / seconds


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        write_instructions(folder / "rows")
        text = folder / "text.jsonl"
        with text.open("w") as file:
            for path in sorted((folder / "rows").glob("*.jsonl")):
                for line in path.read_text().splitlines():
                    content = "\n".join(
                        message["content"] for message in json.loads(line)["messages"]
                    )
                    file.write(json.dumps({"text": content}) + "\n")
        train_tokenizer(text, vocab_size=8192, out=folder / "tokenizer.json")
        (folder / "chat.jinja").write_text(TEMPLATE)
        start = time.process_time()
        summary = build(
            folder / "rows",
            tokenizer=folder / "tokenizer.json",
            out=folder / "shards",
            chat=folder / "chat.jinja",
            skip_invalid=True,
        )
        seconds = time.process_time() - start
        print(
            f"build: {summary.documents:,} conversations, {summary.tokens:,} tokens,  "
            f"{summary.tokens / seconds:,.0f} tokens per CPU second"
        )
        for length in (512, 1024, 2048):
            fill, rate = measure_stream(folder / "shards", length)
            print(f"stream, rows of {length}: fill {fill:.4f}, {rate:,.0f} tokens per CPU second")
    for length in (1024, 4096):
        fill, rate = measure_packer(length)
        print(f"packer alone, lognormal, rows of {length}: fill {fill:.4f}, {rate:,.0f} samples/s")


if __name__ == "__main__":
    main()
