"""lm-evaluation-harness on our models: its own `hf` model is the truth, on one folder and task."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("ms_parallel")
pytestmark = pytest.mark.slow

TASKS = {
    "lib_choice": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_target: 0
doc_to_choice: "{{choices}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "lib_text": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte}, {metric: byte_perplexity}]
""",
    "lib_answer": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
"""Continuations, whole texts longer than the context, and answers."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that has learnt a little, and three tasks on other text."""
    import email
    import textwrap

    from ms_parallel import DistributedTrainer

    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    folder = tmp_path_factory.mktemp("evaluation")
    os.environ["HF_HOME"] = str(folder / "home")
    DistributedTrainer(
        "llama",
        model_config={
            "hidden_size": 64,
            "intermediate_size": 160,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
        },
        vocab_size=512,
        sequence_length=128,
        batch_size=8,
        learning_rate=3e-3,
        held_out_fraction=0.05,
        output_dir=folder / "run",
        device="cpu",
        progress=False,
    ).train(Path(email.__file__).parent, steps=60)
    lines = Path(textwrap.__file__).read_text().splitlines()
    rows = [
        {
            "context": "\n".join(lines[at - 3 : at]).strip() + "\ndef",
            "text": "\n".join(lines[at : at + 24]),
            "choices": [lines[at] or "pass", lines[at * 7 % 300] or "x", " f(a):", " import os"],
        }
        for at in range(3, 90, 3)
    ]
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tasks / 'data.jsonl'}}}}}\n"
    )
    for name, text in TASKS.items():
        (tasks / f"{name}.yaml").write_text(f"task: {name}\ntest_split: test\n{source}{text}")
    return folder


def asked(model: Any, place: Path) -> dict[str, Any]:
    """All that the harness keeps of the three tasks."""
    from lm_eval.tasks import TaskManager

    known = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=known, bootstrap_iters=0
    )
    return found


def responses(found: dict[str, Any], task: str) -> list[Any]:
    """What the model said, document by document."""
    samples = sorted(found["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return [each for sample in samples for each in sample["resps"]]


def numbers(found: dict[str, Any]) -> dict[tuple[str, str], float]:
    """The metrics."""
    return {
        (task, metric): float(value)
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if metric.endswith(",none") and "stderr" not in metric
    }


@pytest.fixture(scope="module")
def truth(place: Path) -> dict[str, Any]:
    """What the harness's own model of transformers says."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(place / "run" / "model"), device="cpu", batch_size=8)
    return asked(model, place)


@pytest.mark.parametrize("loaded", ["folder", "engine"])
def test_our_numbers_are_those_of_the_hf_model(
    place: Path, truth: dict[str, Any], loaded: str
) -> None:
    """Log-likelihoods within rounding, the same answers to the letter, the same metrics."""
    from ms_align.evaluation import harness_model
    from ms_parallel import Engine

    folder = place / "run" / "model"
    if loaded == "folder":
        found = asked(harness_model(folder), place)
    else:
        found = asked(harness_model(Engine(folder, device="cpu"), folder), place)
    assert responses(found, "lib_answer") == responses(truth, "lib_answer")
    assert any(answer for (answer,) in responses(found, "lib_answer"))
    for (ours,), (theirs,) in zip(
        responses(found, "lib_choice"), responses(truth, "lib_choice"), strict=True
    ):
        # Some 20 float32 logarithms near 5, summed in another order.
        assert float(ours[0]) == pytest.approx(float(theirs[0]), abs=1e-3)
        assert ours[1] == theirs[1]
    for name, value in numbers(truth).items():
        assert numbers(found)[name] == pytest.approx(value, rel=1e-6), name
    assert numbers(found)["lib_choice", "acc,none"] == numbers(truth)["lib_choice", "acc,none"]


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_two_processes_say_what_one_does(place: Path, truth: dict[str, Any], axis: str) -> None:
    """The command under torchrun, with a run file: metrics of the `hf` model."""
    run = place / f"{axis}.toml"
    run.write_text(
        f'model = "{place / "run" / "model"}"\ntasks = {json.dumps(list(TASKS))}\n'
        f'include_path = "{place / "tasks"}"\nlayout = {{ {axis} = 2 }}\nbatch_size = 8\n'
        f'output_path = "{place / axis}.json"\n'
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "ms_align", "evaluate", str(run), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    said = json.loads(ended.stdout[ended.stdout.index("{") :])
    assert json.loads((place / f"{axis}.json").read_text())["results"] == said["results"]
    for (task, metric), value in numbers(truth).items():
        assert said["results"][task][metric.partition(",")[0]] == pytest.approx(value, rel=1e-5)


def test_an_exported_model_is_asked_in_its_own_runtime(place: Path, truth: dict[str, Any]) -> None:
    """4 bits in onnxruntime: near the plain model's numbers, and not the same."""
    pytest.importorskip("onnxruntime")
    from ms_align.evaluation import harness_model
    from ms_compress import export, open_runtime, qat
    from ms_parallel import load_model

    folder, source = place / "ort", place / "run" / "model"
    model = load_model(source)
    qat(model, "ort.matmulnbits")
    export(model, folder, target="ort.matmulnbits", tokenizer=source, overwrite=True)
    found = asked(harness_model(open_runtime(folder, "ort"), folder, context=128), place)
    ours, theirs = (numbers(each)["lib_text", "bits_per_byte,none"] for each in (found, truth))
    assert ours != theirs
    assert ours == pytest.approx(theirs, rel=0.05)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ('tasks=["lib_chioce"]', "task 'lib_chioce' is unknown; did you mean 'lib_choice'?"),
        ("tasks=[]", "tasks must be a list of names"),
        ("few_shots=1", "did you mean 'num_fewshot'?"),
        ("runtime=nonsense", "unknown target 'nonsense'"),
    ],
)
def test_a_mistake_is_one_line(place: Path, setting: str, line: str) -> None:
    """Exit code 2, and what to do."""
    run = place / "mistake.toml"
    run.write_text(
        f'model = "{place / "run" / "model"}"\ntasks = ["lib_choice"]\n'
        f'include_path = "{place / "tasks"}"\n'
    )
    command = [sys.executable, "-m", "ms_align", "evaluate", str(run), "--set", setting]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 2, ended.stderr
    (last,) = [text for text in ended.stderr.splitlines() if text.startswith("ms-align")]
    assert line in last
