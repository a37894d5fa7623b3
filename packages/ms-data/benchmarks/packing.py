"""How full packed rows are, and how many tokens a second of CPU an `InstructionStream` gives.

Run it: python packages/ms-data/benchmarks/packing.py. It makes an instruction set of the standard
library's docstrings, builds it with a tokenizer trained on it, and reads three epochs.
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
    """Fill, and tokens of samples a CPU second, medians of `ROUNDS` rounds."""
    rates = []
    for _ in range(ROUNDS):
        stream = InstructionStream(folder, sequence_length=length, batch_size=8, long="split")
        next(stream)
        tokens, began = 0, time.process_time()
        for _ in range(400_000 // length // 8 + 1):
            tokens += int((next(stream)["positions"] >= 0).sum())
        rates.append(tokens * stream.fill / (time.process_time() - began))
    return stream.fill, float(np.median(rates))


def measure_packer(length: int) -> tuple[float, float]:
    """Fill, and samples packed a CPU second, on lognormal lengths."""
    lengths = np.random.default_rng(0).lognormal(5, 1, 200_000).astype(int)
    sizes = np.clip(lengths, 8, length).tolist()
    packer, rows, began = BestFitPacker(length), [], time.process_time()
    for number, size in enumerate(sizes):
        rows += packer.add(Segment(number, 0, size))
    seconds = time.process_time() - began
    used = sum(stop - start for row in rows for _, start, stop in row)
    return used / len(rows) / length, len(sizes) / seconds


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_instructions(folder / "rows")
        text = folder / "text.jsonl"
        with text.open("w") as file:
            for path in sorted((folder / "rows").glob("*.jsonl")):
                for line in path.read_text().splitlines():
                    said = "\n".join(one["content"] for one in json.loads(line)["messages"])
                    file.write(json.dumps({"text": said}) + "\n")
        train_tokenizer(text, vocab_size=8192, out=folder / "tokenizer.json")
        (folder / "chat.jinja").write_text(TEMPLATE)
        began = time.process_time()
        summary = build(
            folder / "rows",
            tokenizer=folder / "tokenizer.json",
            out=folder / "shards",
            chat=folder / "chat.jinja",
            skip_invalid=True,
        )
        seconds = time.process_time() - began
        print(
            f"build: {summary.documents:,} conversations, {summary.tokens:,} words, "
            f"{summary.tokens / seconds:,.0f} tokens a CPU second"
        )
        for length in (512, 1024, 2048):
            fill, rate = measure_stream(folder / "shards", length)
            print(f"stream, rows of {length}: fill {fill:.4f}, {rate:,.0f} tokens a CPU second")
    for length in (1024, 4096):
        fill, rate = measure_packer(length)
        print(f"packer alone, lognormal, rows of {length}: fill {fill:.4f}, {rate:,.0f} samples/s")


if __name__ == "__main__":
    main()
