"""TRL's SFT beside ours: the same samples and model, a process a side, in turn, round after round.

One thread; tokens of samples a second of processor time, padding not counted, the first step left
out. The loss is on every token on all sides. The samples are the standard library's docstrings.

    nox -s "peers(ms-align)" -- --rounds 3 --only sft
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

ROOT = Path(__file__).parents[3]
LENGTH, PACKED_ROWS, PADDED_ROWS, SAMPLES = 512, 4, 16, 1024
STEPS = {"trl-padded": 3, "trl-packed": 5, "ours": 12, "ours-transformers": 8}
"""Timed steps, after one that is not."""
# Every token is marked as the assistant's, as TRL's default learns all of them.
TEMPLATE = (
    "{% generation %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|endoftext|>\n{% endfor %}{% endgeneration %}"
)
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 8192,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}


def prepare(place: Path) -> None:
    """Writes the shards `data` and the folder `model`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ms_data import build, train_tokenizer

    sys.path.insert(0, str(ROOT / "examples"))
    from docstrings import write_instructions

    write_instructions(place / "rows")
    lines = [
        line
        for path in sorted((place / "rows").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    (place / "text.jsonl").write_text(
        "".join(
            json.dumps({"text": "\n".join(m["content"] for m in json.loads(line)["messages"])})
            + "\n"
            for line in lines
        )
    )
    train_tokenizer(place / "text.jsonl", vocab_size=8192, out=place / "tokenizer.json")
    (place / "few.jsonl").write_text("\n".join(lines[:: len(lines) // SAMPLES][:SAMPLES]) + "\n")
    (place / "chat.jinja").write_text(TEMPLATE)
    build(
        place / "few.jsonl",
        tokenizer=place / "tokenizer.json",
        out=place / "data",
        chat=place / "chat.jinja",
        skip_invalid=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(place / "model")


def trl(place: Path, steps: int, *, packing: bool) -> float:
    """TRL's SFTTrainer, in float32, without checkpointing of activations."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from ms_data import Samples

    marks: list[float] = []
    seen: list[int] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            marks.append(process_time())

    samples = Samples(place / "data")
    rows = [samples.conversation(at).tokens.tolist()[:LENGTH] for at in range(len(samples))]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=LlamaForCausalLM.from_pretrained(place / "model"),
            args=SFTConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                packing=packing,
                max_length=LENGTH,
                per_device_train_batch_size=PACKED_ROWS if packing else PADDED_ROWS,
                gradient_accumulation_steps=1,
                max_steps=steps + 1,
                learning_rate=1e-4,
                lr_scheduler_type="constant",
                report_to="none",
                save_strategy="no",
                logging_steps=1000,
                disable_tqdm=True,
                dataloader_num_workers=0,
            ),
            train_dataset=Dataset.from_list([{"input_ids": row} for row in rows]),
            processing_class=_tokenizer(place),
            callbacks=[Clock()],
        )
        collate = trainer.data_collator

        def counting(batch: Any) -> Any:
            seen.append(sum(len(row["input_ids"]) for row in batch))
            return collate(batch)

        trainer.data_collator = counting
        trainer.train()
    return sum(seen[1 : steps + 1]) / (marks[steps] - marks[0])


def _tokenizer(place: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    file = str(place / "tokenizer.json")
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_file=file, eos_token=end, pad_token=end)


def ours(place: Path, steps: int, *, transformers: bool) -> float:
    """Ours, packed, from the same samples, on our decoder or on transformers' model."""
    from ms_align.trainers.sft import SFTTrainer
    from ms_data import InstructionStream

    marks: list[float] = []
    filled: list[float] = []
    stream = InstructionStream(
        place / "data", sequence_length=LENGTH, batch_size=PACKED_ROWS, open_rows=128
    )

    def on_event(kind: str, fields: Any) -> None:
        if kind == "step":
            marks.append(process_time())
            filled.append(stream.delivered_rows * LENGTH * stream.fill)

    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=_model(place, transformers=transformers),
            learning_rate=1e-4,
            steps=steps + 1,
            output_dir=Path(folder),
            progress=False,
            checkpoint_every=10**6,
            on_event=on_event,
        ).train(stream)
    return (filled[steps] - filled[0]) / (marks[steps] - marks[0])


def _model(place: Path, *, transformers: bool) -> Any:
    if transformers:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(place / "model")
    from ms_align.models.folder import load_model

    return load_model(place / "model")


SIDES: dict[str, Callable[[Path, int], float]] = {
    "trl-padded": lambda place, steps: trl(place, steps, packing=False),
    "trl-packed": lambda place, steps: trl(place, steps, packing=True),
    "ours": lambda place, steps: ours(place, steps, transformers=False),
    "ours-transformers": lambda place, steps: ours(place, steps, transformers=True),
}


def measure(place: Path, side: str) -> float:
    """One side's figure, in a process of one thread."""
    one = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--one", side, "--place", str(place)]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **one}, check=False
    )
    if run.returncode:
        sys.exit(f"{side} failed:\n{run.stderr[-2000:]}")
    return float(json.loads(run.stdout.splitlines()[-1])["figure"])


def main() -> None:
    """Print medians, their range, and the median of the ratios of neighbors."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    # `nox -s peers` gives all scripts the same arguments.
    parser.add_argument("--only", action="append", help="measure nothing unless `sft` is among it")
    parser.add_argument("--trl-1-12", help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--side", action="append", help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps({"figure": SIDES[options.one](options.place, STEPS[options.one])}))
        return
    if options.only and "sft" not in options.only:
        return
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place))
        figures: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side in SIDES:
                figures[side].append(measure(Path(place), side))
    for side, found in figures.items():
        ratios = []
        for peer in ("trl-padded", "trl-packed"):
            pairs = [a / b for a, b in zip(found, figures[peer], strict=True)]
            ratios.append(f"{median(pairs):5.2f} x {peer} ({min(pairs):.2f} to {max(pairs):.2f})")
        print(
            f"{side:18} {median(found):8.1f} tokens/s ({min(found):.1f} to {max(found):.1f})  "
            + "  ".join(ratios),
            flush=True,
        )


if __name__ == "__main__":
    main()
