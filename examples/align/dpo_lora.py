"""How do I tune a model on preferences, training only adapters?

    python examples/align/dpo_lora.py --steps 30

The pairs come from the standard library: asked for a function's docstring, the docstring is the
chosen answer and the function's code the rejected one. `DPOTrainer` with `LoraOptions` keeps the
model's weights frozen; the reference is the model with its adapters disabled, so no second copy is
needed. The output shows the accuracy on held-out pairs and the two adapter files that peft reads.
"""

import argparse
import email
import json
import runpy
from pathlib import Path

from ms_align import DPOTrainer, LoraOptions
from ms_data import build, train_tokenizer
from ms_parallel.models import architecture, build_model
from ms_parallel.weights import initialize

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def pairs(folder: Path) -> Path:
    """Build shards of prompts, each with a chosen and a rejected answer."""
    if not (folder / "pairs").exists():
        write = runpy.run_path(str(Path(__file__).parents[1] / "docstrings.py"))
        write["write_instructions"](folder / "rows", library=Path(email.__file__).parent)
        with (folder / "rows" / "describe.jsonl").open() as lines:
            chats = [json.loads(line)["messages"] for line in lines]
        with (folder / "pairs.jsonl").open("w") as file:
            for question, answer in chats:
                rejected = {**answer, "content": question["content"].partition("\n\n")[2]}
                row = {"prompt": [question], "chosen": [answer], "rejected": [rejected]}
                file.write(json.dumps(row) + "\n")
        (folder / "chat.jinja").write_text(TEMPLATE)
        train_tokenizer(Path(email.__file__).parent, vocab_size=512, out=folder / "tokenizer.json")
        build(
            folder / "pairs.jsonl",
            tokenizer=folder / "tokenizer.json",
            chat=folder / "chat.jinja",
            pairs=True,
            out=folder / "pairs",
            held_out_fraction=0.2,
        )
    return folder / "pairs"


def main(arguments: list[str] | None = None) -> None:
    """Train adapters of a small model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("dpo-lora"))
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    model = build_model(architecture("llama", {**sizes, "vocab_size": 512}))
    initialize(model, seed=0)
    result = DPOTrainer(
        model=model,
        lora=LoraOptions(rank=4),
        beta=0.1,
        steps=options.steps,
        sequence_length=256,
        batch_size=8,
        learning_rate=3e-3,
        output_dir=options.folder / "run",
        log_every=10,
    ).train(pairs(options.folder))
    for name, value in result.last.items():
        print(f"{name}: {result.first.get(name, float('nan')):.3f} -> {value:.3f}")
    print(*sorted(path.name for path in (options.folder / "run" / "adapter").iterdir()))


if __name__ == "__main__":
    main()
