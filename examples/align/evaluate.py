"""How do I evaluate a model with lm-evaluation-harness, on my own task and offline?

    python examples/align/evaluate.py --steps 60

The task is a YAML file over a JSON Lines file: which line follows this part of a module? The same
harness evaluates a small trained model in the engine and, exported to 4 bits, in onnxruntime. With
network access, the harness's own tasks work the same way, by name.
"""

import argparse
import email
import json
import os
import textwrap
from pathlib import Path

from ms_align.evaluation import harness_model
from ms_compress import export, open_runtime, qat
from ms_parallel import DistributedTrainer, load_model

CORPUS = Path(email.__file__).parent
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "head_dim": 16}
TASK = """
task: next_line
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_target: 0
doc_to_choice: "{{{{choices}}}}"
target_delimiter: "\\n"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def make_task(folder: Path) -> Path:
    """Write the task: one question for every third line of a module outside the training data."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line for line in Path(textwrap.__file__).read_text().splitlines() if line.strip()]
    rows = [
        {
            "context": "\n".join(lines[index - 4 : index]),
            "choices": [lines[index * step % len(lines)] for step in (1, 7, 13, 29)],
        }
        for index in range(4, len(lines) - 1, 3)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "next_line.yaml").write_text(TASK.format(rows=(folder / "rows.jsonl").absolute()))
    return folder


def main(arguments: list[str] | None = None) -> None:
    """Train, export, and evaluate both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("evaluate"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    import lm_eval
    from lm_eval.tasks import TaskManager

    result = DistributedTrainer(
        "llama",
        model_config=SIZES,
        vocab_size=512,
        sequence_length=128,
        learning_rate=3e-3,
        output_dir=options.folder / "run",
        device="cpu",
    ).train(CORPUS, steps=options.steps)
    assert result.model_folder is not None
    folder, exported = result.model_folder, options.folder / "int4"
    export(qat(load_model(folder), "ort.matmulnbits"), exported, tokenizer=folder, overwrite=True)

    tasks = TaskManager(
        include_path=str(make_task(options.folder / "tasks")), include_defaults=False
    )
    models = {
        "float32": harness_model(folder),
        "int4 in onnxruntime": harness_model(open_runtime(exported, "ort"), exported),
    }
    for name, model in models.items():
        evaluation = lm_eval.simple_evaluate(model=model, tasks=["next_line"], task_manager=tasks)
        metrics = evaluation["results"]["next_line"]
        print(f"{name:>20}: acc {metrics['acc,none']:.3f}, acc_norm {metrics['acc_norm,none']:.3f}")


if __name__ == "__main__":
    main()
