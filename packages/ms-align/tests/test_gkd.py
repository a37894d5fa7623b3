"""GKD: divergences and gradients, learning, layouts, exact resume and rejected teachers."""

import json
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Command, run_command
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from ms_align import ConfigError, GKDTrainer, ModelError
from ms_align.cli import main
from ms_align.engines.local import LocalEngine
from ms_align.losses import gkd
from ms_align.losses.gkd import divergences
from ms_align.losses.protocol import Batch, Output
from ms_align.streams.text_ends import TextEnds
from ms_align.trainers.base.offline import TrainingData
from ms_data import InstructionStream
from ms_parallel import save_model

from .small_models import decoder

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def plain_divergences(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """Compute the divergence of each row by its definition."""
    log_q = F.log_softmax(student / temperature, 1)
    log_p = F.log_softmax(teacher / temperature, 1)
    if beta == 0:
        return (log_p.exp() * (log_p - log_q)).sum(1)
    if beta == 1:
        return (log_q.exp() * (log_q - log_p)).sum(1)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    forward = (log_p.exp() * (log_p - log_m)).sum(1)
    return beta * forward + (1 - beta) * (log_q.exp() * (log_q - log_m)).sum(1)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_divergences_and_gradients_equal_the_definition(
    beta: float, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of two tokens, float32 against float64: sums of 40 terms of size 1, 2e-6."""
    monkeypatch.setattr(gkd, "CHUNK_BYTES", 2 * 4 * 40)
    generator = torch.Generator().manual_seed(0)
    student, teacher = 2 * torch.randn(2, 9, 40, generator=generator)
    student.requires_grad_()
    tokens = torch.tensor([0, 2, 3, 5, 8])
    upstream = torch.rand(5, generator=generator)
    values = divergences(student, teacher, tokens, beta=beta, temperature=temperature)
    (grad,) = torch.autograd.grad(values, student, upstream)
    exact = student.detach().double().requires_grad_()
    expected = plain_divergences(exact[tokens], teacher[tokens].double(), beta, temperature)
    (expected_grad,) = torch.autograd.grad(expected, exact, upstream.double())
    torch.testing.assert_close(values.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=2e-6, atol=2e-6)
    assert (expected > 0.05).all()


@pytest.mark.parametrize("beta", BETAS)
def test_several_teachers_add_their_weighted_divergences(beta: float) -> None:
    """Loss and gradient of three teachers, float32 against a float64 loop over tokens: 2e-6."""
    generator = torch.Generator().manual_seed(0)
    student = 2 * torch.randn(2, 6, 20, generator=generator)
    teachers = 2 * torch.randn(2, 4, 3, 20, generator=generator)  # of columns 1 to 4
    targets = torch.tensor([[-100, 1, 2, -100, 3, -100], [-100, 4, -100, -100, -100, -100]])
    token_weights = torch.rand(2, 6, generator=generator)
    weights = (0.5, 0.2, 1.3)
    student.requires_grad_()

    class Logits:
        """Output of a model with given logits."""

        def logits(self, columns: slice) -> Tensor:
            """Return the logits of some columns."""
            return student[:, columns]

    loss = gkd.GKDLoss(beta=beta, temperature=0.7, teacher_weights=weights, first=1)
    batch = {"targets": targets, "teacher_logits": teachers, "weights": token_weights}
    total, _ = loss(Logits(), batch)  # type: ignore[arg-type]
    (grad,) = torch.autograd.grad(total, student)
    exact = student.detach().double().requires_grad_()
    expected = torch.zeros((), dtype=torch.float64)
    for row, column in (targets != -100).nonzero().tolist():
        for weight, teacher in zip(weights, teachers[row, column - 1].double(), strict=True):
            divergence = plain_divergences(exact[row, [column]], teacher[None], beta, 0.7)
            expected = expected + token_weights[row, column].double() * weight * divergence.sum()
    (expected_grad,) = torch.autograd.grad(expected, exact)
    torch.testing.assert_close(total.double(), expected, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=2e-6, atol=2e-6)
    assert expected_grad.abs().max() > 0.01


def target_logits(output: Output, _: Batch, *, columns: slice) -> Tensor:
    """Return the logits of some columns."""
    return output.logits(columns)


def test_each_teacher_teaches_its_own_dataset(sets: Path, tmp_path: Path) -> None:
    """Every row has the logits of the teacher of its source, and weights apply to all rows."""
    teachers = {"second": decoder(seed=2), "first": decoder(seed=1)}
    sources = {"first": sets / "copy", "second": sets / "copy"}
    sizes = {"sequence_length": 64, "batch_size": 4, "open_rows": 0}
    rows_seen = {"first": 0, "second": 0}
    for weights in (None, {"first": 0.25, "second": 0.75}):
        settings = {"teacher_model": teachers, "teacher_weights": weights, "steps": 4}
        run = trainer(tmp_path / str(weights is None), lmbda=0.5, **settings)
        stream = InstructionStream(sources, **sizes)
        engine = run.engine()
        learner = run.learner(engine, TrainingData(stream=stream), TextEnds.of(None))
        for _ in range(4):
            copy = InstructionStream(sources, **sizes)
            copy.load_state_dict(stream.state_dict())
            task = next(copy)["task"]
            batch = learner.next_batch()
            inputs = {"tokens": batch["tokens"], "targets": batch["targets"]}
            first, width = learner.loss().first, batch["teacher_logits"].shape[1]
            read = partial(target_logits, columns=slice(first, first + width))
            for index, (name, model) in enumerate(teachers.items()):
                logits = LocalEngine(model).evaluate(inputs, read)
                is_own = torch.as_tensor(task) == stream.names.index(name)
                rows_seen[name] += int(is_own.sum())
                position = 0 if weights is None else index
                chosen = is_own if weights is None else torch.ones_like(is_own)
                actual = batch["teacher_logits"][chosen, :, position]
                torch.testing.assert_close(actual, logits[chosen])
            engine.step(batch, learner.loss())
        assert batch["teacher_logits"].shape[2] == (1 if weights is None else 2)
        assert learner.loss().teacher_weights == ((1.0,) if weights is None else (0.75, 0.25))
    assert min(rows_seen.values()) >= 8


@pytest.mark.parametrize("beta", BETAS)
def test_padded_vocabularies_are_compared_on_common_tokens(beta: float) -> None:
    """Logits beyond the smaller vocabulary have no influence and no gradient."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 4, 12, generator=generator)
    student.requires_grad_()
    tokens = torch.arange(4)
    values = divergences(student, teacher[:, :9], tokens, beta=beta, temperature=1.0)
    expected = divergences(
        student[:, :9].detach(), teacher[:, :9], tokens, beta=beta, temperature=1.0
    )
    torch.testing.assert_close(values, expected)
    (grad,) = torch.autograd.grad(values.sum(), student)
    assert not grad[:, 9:].any()
    assert grad[:, :9].any()


def stream(sets: Path, **options: Any) -> InstructionStream:
    """Open conversations, one per row."""
    sizes = {"sequence_length": 64, "batch_size": 4, "open_rows": 0}
    return InstructionStream(sets / "copy", **{**sizes, **options})


def trainer(folder: Path, **overrides: Any) -> GKDTrainer:
    """Build a trainer of small models without progress output."""
    settings = {
        "model": decoder(),
        "teacher_model": decoder(seed=1),
        "steps": 20,
        "max_new_tokens": 8,
        "learning_rate": 3e-3,
        "output_dir": folder,
        "progress": False,
        **overrides,
    }
    return GKDTrainer(**settings)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Read the events of one kind."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


@pytest.mark.parametrize(
    ("options", "on_policy"),
    [
        ({"lmbda": 1.0, "beta": 1.0}, {1.0}),
        ({"lmbda": 0.5, "beta": 0.5}, {0.0, 1.0}),
        ({"lmbda": 0.0, "beta": 0.0}, {0.0}),
        ({"lmbda": 0.0, "beta": 0.0, "seq_kd": True}, {0.0}),
    ],
)
def test_the_student_approaches_its_teacher(
    sets: Path, tmp_path: Path, options: dict[str, Any], on_policy: set[float]
) -> None:
    """The divergence at held-out answers falls for every source of training responses."""
    result = trainer(tmp_path, **options).train(
        stream(sets), held_out=lambda: stream(sets, split="held_out", epochs=1)
    )
    assert result.last["held_out_loss"] < 0.9 * result.first["held_out_loss"]
    assert {event["on_policy"] for event in events(tmp_path, "step")} == on_policy


def test_losses_do_not_depend_on_the_microbatch(sets: Path, tmp_path: Path) -> None:
    """Float32 sums in another order: 1e-5 relative, after Adam's first steps 1e-4."""
    losses = []
    for size in (None, 1, 3):
        folder = tmp_path / str(size)
        trainer(folder, steps=3, microbatch_size=size, lmbda=0.7).train(stream(sets))
        losses.append([event["loss"] for event in events(folder, "step")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


@pytest.fixture(scope="module")
def teacher(sets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a teacher with the tokenizer of the datasets."""
    folder = tmp_path_factory.mktemp("teacher") / "teacher"
    save_model(decoder(seed=1, vocab_size=258), folder)  # type: ignore[arg-type]
    shutil.copy(sets / "tokenizer.json", folder)
    return folder


def run_file(sets: Path, teacher: Path, folder: Path, **overrides: Any) -> Path:
    """Write a run file of `ms-align gkd`."""
    settings = {
        "model": str(sets / "model"),
        "teacher_model": str(teacher),
        "dataset": str(sets / "copy"),
        "sequence_length": 64,
        "batch_size": 4,
        "steps": 4,
        "max_new_tokens": 8,
        "checkpoint_every": 1,
        "keep_checkpoints": 10,
        "learning_rate": 1e-3,
        "output_dir": str(folder / "gkd"),
        "progress": False,
        **overrides,
    }
    path = folder / "gkd.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    return path


@pytest.fixture(scope="module")
def one_process(sets: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output folder of a run in one process, on the student's own and on given responses."""
    folder = tmp_path_factory.mktemp("gkd")
    assert main(["gkd", str(run_file(sets, teacher, folder))]) == 0
    assert {event["on_policy"] for event in events(folder / "gkd", "step")} == {0.0, 1.0}
    return folder / "gkd"


@pytest.mark.parametrize(
    "layout",
    [
        ["layout.data=2"],
        pytest.param(["layout.tensor=2"], marks=pytest.mark.slow),
        pytest.param(["layout.pipeline=2"], marks=pytest.mark.slow),
        ["layout.tensor=2", "teacher_layout.pipeline=2"],
    ],
    ids="-".join,
)
def test_losses_equal_those_of_one_process(
    sets: Path, teacher: Path, tmp_path: Path, one_process: Path, layout: list[str]
) -> None:
    """The same generated responses, and losses within float32 rounding, 1e-5; norms 1e-4."""
    run = run_file(sets, teacher, tmp_path)
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*runner, "-m", "ms_align", "gkd", str(run), *layout, "microbatch_size=2"]
    process = run_command(words, imports=("ms_align.trainers.gkd", "ms_parallel.engine.engine"))
    assert process.returncode == 0, process.stderr[-3000:]
    pairs = list(zip(events(tmp_path / "gkd", "step"), events(one_process, "step"), strict=True))
    assert len(pairs) == 4
    for event, expected in pairs:
        assert event["on_policy"] == expected["on_policy"]
        assert event["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
        assert event["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    held_out = [
        events(path, "evaluate")[-1]["held_out_loss"] for path in (tmp_path / "gkd", one_process)
    ]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)


def test_kill_9_then_the_same_command_ends_in_the_same_bits(
    sets: Path, teacher: Path, tmp_path: Path, one_process: Path
) -> None:
    """Model and last checkpoint match an undisturbed run."""
    run = run_file(sets, teacher, tmp_path)
    process = Command(["-m", "ms_align", "gkd", str(run)], imports=("ms_align.trainers.gkd",))
    checkpoint = tmp_path / "gkd" / "checkpoints" / "step-00000002" / "manifest.json"
    deadline = time.monotonic() + 240
    while process.poll() is None and not checkpoint.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert checkpoint.exists()
    assert not (tmp_path / "gkd" / "model").exists()
    assert main(["gkd", str(run)]) == 0
    assert events(tmp_path / "gkd", "resume")[-1]["step"] >= 2
    for file in ("model/model.safetensors", "checkpoints/step-00000004/rank-00000.safetensors"):
        resumed, expected = (load_file(path / file) for path in (tmp_path / "gkd", one_process))
        assert resumed.keys() == expected.keys()
        assert all(torch.equal(resumed[key], expected[key]) for key in expected)


def test_an_unsuitable_teacher_is_rejected_in_one_line(
    sets: Path, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another tokenizer, another vocabulary in memory, and rows beyond the context."""
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    student = tmp_path / "student"
    shutil.copytree(sets / "model", student)
    shutil.copy(sets / "tokenizer.json", student)
    run = run_file(sets, other, tmp_path)
    for model in (student, sets / "model"):  # the latter has only the data's tokenizer
        assert main(["gkd", str(run), f"model={model}"]) == 2
        error = capsys.readouterr().err
        assert "use a teacher of the same model family" in error
        assert error.count("\n") == 1
    assert main(["gkd", str(run), f"teacher_model={teacher}", "max_new_tokens=1000000"]) == 2
    assert "sequence_length + max_new_tokens must be at most" in capsys.readouterr().err
    assert main(["gkd", str(run), f"teacher_model={tmp_path / 'none'}"]) == 2
    assert "teacher_model" in capsys.readouterr().err
    two = {"copy": decoder(seed=1), "other": decoder(seed=2)}
    for options, text in (
        (
            {"teacher_model": two},
            r"one teacher for each dataset \['copy'\], got \['copy', 'other'\]",
        ),
        ({"teacher_weights": {"a": 1.0}}, "teacher_weights needs several teachers"),
        ({"teacher_model": {}}, "teacher_model is an empty table"),
        ({"teacher_model": two, "seq_kd": True}, "seq_kd needs one teacher"),
        ({"teacher_model": two, "teacher_weights": {"copy": 1.0}}, "must have a weight for each"),
        ({"teacher_model": two, "teacher_weights": dict.fromkeys(two, 0.0)}, "not all 0"),
    ):
        with pytest.raises(ConfigError, match=text):
            trainer(tmp_path / "b", **options).train(stream(sets))
    with pytest.raises(ModelError, match="must have the student's tokenizer"):
        trainer(tmp_path / "a", teacher_model=decoder(vocab_size=300)).train(stream(sets))
