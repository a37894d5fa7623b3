"""TRL's SFT compared with ours: the same samples and model, one process per side, alternating.

One thread; sample tokens per CPU second, without padding and the first step. The loss is on every
token on all sides. The samples are the standard library's docstrings.

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
"""Timed steps, after an untimed one."""
# All tokens are marked as the assistant's, since TRL trains on all tokens by default.
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


def prepare(folder: Path) -> None:
    """Write the dataset `data` and the folder `model`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ms_data import build, train_tokenizer

    sys.path.insert(0, str(ROOT / "examples"))
    from docstrings import write_instructions

    write_instructions(folder / "rows")
    lines = [
        line
        for path in sorted((folder / "rows").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    (folder / "text.jsonl").write_text(
        "".join(
            json.dumps({"text": "\n".join(m["content"] for m in json.loads(line)["messages"])})
            + "\n"
            for line in lines
        )
    )
    train_tokenizer(folder / "text.jsonl", vocab_size=8192, out=folder / "tokenizer.json")
    (folder / "few.jsonl").write_text("\n".join(lines[:: len(lines) // SAMPLES][:SAMPLES]) + "\n")
    (folder / "chat.jinja").write_text(TEMPLATE)
    build(
        folder / "few.jsonl",
        tokenizer=folder / "tokenizer.json",
        out=folder / "data",
        chat=folder / "chat.jinja",
        skip_invalid=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(folder / "model")


def trl(work_folder: Path, steps: int, *, packing: bool) -> float:
    """Run TRL's SFTTrainer in float32 without activation checkpointing."""
    from datasets import Dataset
    from transformers import LlamaForCausalLM, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from ms_data import Samples

    step_ends: list[float] = []
    token_counts: list[int] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_ends.append(process_time())

    samples = Samples(work_folder / "data")
    rows = [samples.conversation(index).tokens.tolist()[:LENGTH] for index in range(len(samples))]
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=LlamaForCausalLM.from_pretrained(work_folder / "model"),
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
            processing_class=_tokenizer(work_folder),
            callbacks=[Clock()],
        )
        collate = trainer.data_collator

        def counting(batch: Any) -> Any:
            token_counts.append(sum(len(row["input_ids"]) for row in batch))
            return collate(batch)

        trainer.data_collator = counting
        trainer.train()
    return sum(token_counts[1 : steps + 1]) / (step_ends[steps] - step_ends[0])


def _tokenizer(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    file = str(folder / "tokenizer.json")
    end = "<|endoftext|>"
    return PreTrainedTokenizerFast(tokenizer_file=file, eos_token=end, pad_token=end)


def ours(work_folder: Path, steps: int, *, transformers: bool) -> float:
    """Run our trainer with packing, on our decoder or on the transformers model."""
    from ms_align.trainers.sft import SFTTrainer
    from ms_data import InstructionStream

    step_ends: list[float] = []
    token_totals: list[float] = []
    stream = InstructionStream(
        work_folder / "data", sequence_length=LENGTH, batch_size=PACKED_ROWS, open_rows=128
    )

    def on_event(event_kind: str, fields: Any) -> None:
        if event_kind == "step":
            step_ends.append(process_time())
            token_totals.append(stream.delivered_rows * LENGTH * stream.fill)

    with tempfile.TemporaryDirectory() as folder:
        SFTTrainer(
            model=_model(work_folder, transformers=transformers),
            learning_rate=1e-4,
            steps=steps + 1,
            output_dir=Path(folder),
            progress=False,
            checkpoint_every=10**6,
            on_event=on_event,
        ).train(stream)
    return (token_totals[steps] - token_totals[0]) / (step_ends[steps] - step_ends[0])


def _model(folder: Path, *, transformers: bool) -> Any:
    if transformers:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM.from_pretrained(folder / "model")
    from ms_align.models.folder import load_model

    return load_model(folder / "model")


SIDES: dict[str, Callable[[Path, int], float]] = {
    "trl-padded": lambda folder, steps: trl(folder, steps, packing=False),
    "trl-packed": lambda folder, steps: trl(folder, steps, packing=True),
    "ours": lambda folder, steps: ours(folder, steps, transformers=False),
    "ours-transformers": lambda folder, steps: ours(folder, steps, transformers=True),
}


def measure(folder: Path, side: str) -> float:
    """Return the rate of one side, measured in a process with one thread."""
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--one", side, "--place", str(folder)]
    run = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **one_thread}, check=False
    )
    if run.returncode:
        sys.exit(f"{side} failed:\n{run.stderr[-2000:]}")
    return float(json.loads(run.stdout.splitlines()[-1])["figure"])


def main() -> None:
    """Print medians, ranges, and the median of the ratios within a round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    # `nox -s peers` passes the same arguments to all scripts.
    parser.add_argument("--only", action="append", help="skip unless `sft` is listed")
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
    with tempfile.TemporaryDirectory() as folder_name:
        prepare(Path(folder_name))
        figures: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side in SIDES:
                figures[side].append(measure(Path(folder_name), side))
    for side, rates in figures.items():
        ratios = []
        for peer in ("trl-padded", "trl-packed"):
            pairs = [a / b for a, b in zip(rates, figures[peer], strict=True)]
            ratios.append(f"{median(pairs):5.2f} x {peer} ({min(pairs):.2f} to {max(pairs):.2f})")
        print(
            f"{side:18} {median(rates):8.1f} tokens/s ({min(rates):.1f} to {max(rates):.1f})  "
            + "  ".join(ratios),
            flush=True,
        )


if __name__ == "__main__":
    main()
