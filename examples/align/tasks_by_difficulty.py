"""How do I sample tasks by difficulty, with more of the hard ones?

    python examples/align/tasks_by_difficulty.py --steps 60

Two tasks from the standard library: write a function's docstring, and write the function from its
docstring. `TaskOptions` samples rows in proportion to their task's smoothed loss. The output shows
both losses and how each task's share of the rows follows them.
"""

import argparse
import email
import runpy
from collections.abc import Mapping
from pathlib import Path

from ms_align import SFTTrainer, TaskOptions
from ms_data import build, train_tokenizer
from ms_parallel.models import architecture, build_model
from ms_parallel.weights import initialize

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TASKS = ("describe", "implement")
Fields = Mapping[str, int | float | str]


def shards(folder: Path) -> dict[str, Path]:
    """Build shards of each task's conversations from a part of the standard library."""
    if not (folder / "implement").exists():
        write = runpy.run_path(str(Path(__file__).parents[1] / "docstrings.py"))
        write["write_instructions"](folder / "rows", library=Path(email.__file__).parent)
        (folder / "chat.jinja").write_text(TEMPLATE)
        train_tokenizer(Path(email.__file__).parent, vocab_size=512, out=folder / "tokenizer.json")
        for task in TASKS:
            build(
                folder / "rows" / f"{task}.jsonl",
                tokenizer=folder / "tokenizer.json",
                chat=folder / "chat.jinja",
                out=folder / task,
                held_out_fraction=0.1,
            )
    return {task: folder / task for task in TASKS}


def main(arguments: list[str] | None = None) -> None:
    """Train, and print the task sampling."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("tasks-by-difficulty"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    sources = shards(options.folder)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    model = build_model(architecture("llama", {**sizes, "vocab_size": 512}))
    initialize(model, seed=0)

    def on_event(kind: str, fields: Fields) -> None:
        if kind == "tasks" and int(fields["step"]) % 10 == 0:
            values = {name: f"{value:.3f}" for name, value in fields.items() if name != "step"}
            print(f"step {fields['step']}: {values}", flush=True)

    result = SFTTrainer(
        model=model,
        tasks=TaskOptions(temperature=0.5, floor=0.1, warmup_steps=5),
        steps=options.steps,
        sequence_length=256,
        batch_size=8,
        learning_rate=3e-3,
        output_dir=options.folder / "run",
        on_event=on_event,
        log_every=1,
        progress=False,
    ).train(sources)
    first, last = result.first["held_out_loss"], result.last["held_out_loss"]
    print(f"held-out loss {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
