"""lm-evaluation-harness on our models agrees with its own `hf` model on the same folder."""

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
"""Multiple choice, texts longer than the context, and generation."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a briefly trained model and three tasks on other text."""
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
            "context": "\n".join(lines[index - 3 : index]).strip() + "\ndef",
            "text": "\n".join(lines[index : index + 24]),
            "choices": [
                lines[index] or "pass",
                lines[index * 7 % 300] or "x",
                " f(a):",
                " import os",
            ],
        }
        for index in range(3, 90, 3)
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


def evaluate(model: Any, workspace: Path) -> dict[str, Any]:
    """Full results of the harness on the three tasks."""
    from lm_eval.tasks import TaskManager

    task_manager = TaskManager(include_path=str(workspace / "tasks"), include_defaults=False)
    results: dict[str, Any] = lm_eval.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=task_manager, bootstrap_iters=0
    )
    return results


def responses(results: dict[str, Any], task: str) -> list[Any]:
    """The model's responses in document order."""
    samples = sorted(results["samples"][task], key=lambda sample: int(sample["doc_id"]))
    return [response for sample in samples for response in sample["resps"]]


def metrics_of(results: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Metrics of a result by task and name."""
    return {
        (task, metric): float(value)
        for task, metrics in results["results"].items()
        for metric, value in metrics.items()
        if metric.endswith(",none") and "stderr" not in metric
    }


@pytest.fixture(scope="module")
def reference(workspace: Path) -> dict[str, Any]:
    """Results of the harness's own transformers model."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=str(workspace / "run" / "model"), device="cpu", batch_size=8)
    return evaluate(model, workspace)


@pytest.mark.parametrize("loaded", ["folder", "engine"])
def test_our_results_equal_those_of_the_hf_model(
    workspace: Path, reference: dict[str, Any], loaded: str
) -> None:
    """Log-likelihoods within rounding, identical responses, equal metrics."""
    from ms_align.evaluation import harness_model
    from ms_parallel import Engine

    folder = workspace / "run" / "model"
    if loaded == "folder":
        results = evaluate(harness_model(folder), workspace)
    else:
        results = evaluate(harness_model(Engine(folder, device="cpu"), folder), workspace)
    assert responses(results, "lib_answer") == responses(reference, "lib_answer")
    assert any(answer for (answer,) in responses(results, "lib_answer"))
    for (actual,), (expected,) in zip(
        responses(results, "lib_choice"), responses(reference, "lib_choice"), strict=True
    ):
        # Sums of about 20 float32 log-probabilities near 5, in another order.
        assert float(actual[0]) == pytest.approx(float(expected[0]), abs=1e-3)
        assert actual[1] == expected[1]
    for name, value in metrics_of(reference).items():
        assert metrics_of(results)[name] == pytest.approx(value, rel=1e-6), name
    assert (
        metrics_of(results)["lib_choice", "acc,none"]
        == metrics_of(reference)["lib_choice", "acc,none"]
    )


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_two_processes_give_the_results_of_one(
    workspace: Path, reference: dict[str, Any], axis: str
) -> None:
    """The command under torchrun gives the metrics of the `hf` model."""
    run_file = workspace / f"{axis}.toml"
    run_file.write_text(
        f'model = "{workspace / "run" / "model"}"\ntasks = {json.dumps(list(TASKS))}\n'
        f'include_path = "{workspace / "tasks"}"\nlayout = {{ {axis} = 2 }}\nbatch_size = 8\n'
        f'output_path = "{workspace / axis}.json"\n'
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "ms_align", "evaluate", str(run_file), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout[result.stdout.index("{") :])
    assert json.loads((workspace / f"{axis}.json").read_text())["results"] == report["results"]
    for (task, metric), value in metrics_of(reference).items():
        assert report["results"][task][metric.partition(",")[0]] == pytest.approx(value, rel=1e-5)


def test_an_exported_model_is_evaluated_in_its_runtime(
    workspace: Path, reference: dict[str, Any]
) -> None:
    """4 bits in onnxruntime: close to the original model's metrics, but not equal."""
    pytest.importorskip("onnxruntime")
    from ms_align.evaluation import harness_model
    from ms_compress import export, open_runtime, qat
    from ms_parallel import load_model

    folder, source = workspace / "ort", workspace / "run" / "model"
    model = load_model(source)
    qat(model, "ort.matmulnbits")
    export(model, folder, target="ort.matmulnbits", tokenizer=source, overwrite=True)
    results = evaluate(harness_model(open_runtime(folder, "ort"), folder, context=128), workspace)
    actual, expected = (
        metrics_of(result)["lib_text", "bits_per_byte,none"] for result in (results, reference)
    )
    assert actual != expected
    assert actual == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ('tasks=["lib_chioce"]', "task 'lib_chioce' is unknown; did you mean 'lib_choice'?"),
        ("tasks=[]", "tasks must be a list of names"),
        ("few_shots=1", "did you mean 'num_fewshot'?"),
        ("runtime=nonsense", "unknown target 'nonsense'"),
    ],
)
def test_a_mistake_is_one_line(workspace: Path, setting: str, line: str) -> None:
    """Exit code 2 and a line with the remedy."""
    run_file = workspace / "mistake.toml"
    run_file.write_text(
        f'model = "{workspace / "run" / "model"}"\ntasks = ["lib_choice"]\n'
        f'include_path = "{workspace / "tasks"}"\n'
    )
    command = [sys.executable, "-m", "ms_align", "evaluate", str(run_file), "--set", setting]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 2, result.stderr
    (message,) = [text for text in result.stderr.splitlines() if text.startswith("ms-align")]
    assert line in message
