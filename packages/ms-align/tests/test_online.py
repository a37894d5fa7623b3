"""Online trainers: learning, resuming, and errors."""

import contextlib
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from small_models import decoder, vowels
from torch import nn

import ms_align
from ms_align import (
    ConfigError,
    DataError,
    GRPOTrainer,
    LocalEngine,
    ModelError,
    NothingToLearnError,
    PPOTrainer,
    RewardError,
    RewardModel,
    RLOOTrainer,
    Sample,
)
from ms_align.cli import main
from ms_align.errors import CheckpointError
from ms_align.losses.adaptive_kl import AdaptiveKL
from ms_align.models.language_model import copy_of
from ms_align.tokenizer import ByteTokenizer

PROMPTS = ["hello", "a", "what is", "xyz"]


def settings(folder: Path, **overrides: Any) -> dict[str, Any]:
    """Return settings of a run that takes a second."""
    return {
        "policy_model": decoder(),
        "reward_model": vowels,
        "tokenizer": ByteTokenizer(),
        "steps": 2,
        "batch_size": 8,
        "max_new_tokens": 5,
        "output_dir": folder,
        "progress": False,
        **overrides,
    }


def events(folder: Path, event_kind: str) -> list[dict[str, Any]]:
    """Read the events of one kind."""
    lines = (folder / "events.jsonl").read_bytes().splitlines()
    return [event for event in map(msgspec.json.decode, lines) if event["kind"] == event_kind]


@pytest.mark.parametrize("trainer", [PPOTrainer, GRPOTrainer, RLOOTrainer])
def test_training_raises_the_reward(tmp_path: Path, trainer: Any) -> None:
    """The fraction of vowels rises from 2% to more than 25%, also on held-out prompts."""
    groups = (
        {"epochs": 2, "minibatch_size": 32} if trainer is PPOTrainer else {"num_generations": 8}
    )
    options = settings(
        tmp_path, steps=60, batch_size=64, learning_rate=4e-3, kl_coeff=0.0, **groups
    )
    result = trainer(
        **options, held_out=["to be", "or not", "q"], missing_eos_penalty=0.0
    ).optimize(PROMPTS)
    assert result.finished
    rollouts = events(tmp_path, "rollout")
    assert rollouts[0]["reward"] < 0.06
    assert rollouts[-1]["reward"] > 0.25
    assert result.last["reward"] > result.first["reward"]


def test_the_first_update_has_ratio_1_and_kl_0(tmp_path: Path) -> None:
    """The unchanged policy equals itself and its copy up to float32 rounding."""
    PPOTrainer(**settings(tmp_path, steps=1, temperature=0.8)).optimize(PROMPTS)
    (step,) = events(tmp_path, "step")
    assert step["kl_old"] < 1e-10
    assert step["clip_fraction"] == 0.0
    assert abs(step["kl"]) < 1e-4


def test_the_reference_does_not_change_during_training(tmp_path: Path) -> None:
    """KL grows from 0, and the coefficient follows the controller's update rule."""
    options = settings(tmp_path, steps=12, batch_size=16, learning_rate=5e-3, epochs=2)
    PPOTrainer(**options, kl_target=0.01, kl_horizon=100).optimize(PROMPTS)
    rollouts = events(tmp_path, "rollout")
    assert rollouts[-1]["kl"] > 0.01 > abs(rollouts[0]["kl"])
    controller = AdaptiveKL(target=0.01, horizon=100)
    coefficients_and_kls = [(rollout["kl_coeff"], rollout["kl"]) for rollout in rollouts]
    expected = [controller.next(coefficient, kl, 16) for coefficient, kl in coefficients_and_kls]
    assert [coefficient for coefficient, _ in coefficients_and_kls[1:]] == pytest.approx(
        expected[:-1]
    )
    assert (
        coefficients_and_kls[-1][0] > coefficients_and_kls[1][0]
    )  # without a controller it would stay constant


class DisableableShift(nn.Module):
    """Policy with a trainable shift that can be disabled like an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = decoder()
        self.config = self.body.config
        self.enabled = True
        self.shift = nn.Parameter(torch.zeros(32))
        self.body.requires_grad_(False)

    @property
    def head_weight(self) -> torch.Tensor:
        """Return the head weight of the body."""
        return self.body.head_weight  # type: ignore[return-value]

    blocks = True

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Disable the shift, like peft's models."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def save_pretrained(self, folder: Path) -> None:
        """Write only the model."""

    def forward(self, tokens: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """Return hidden states, shifted if enabled."""
        hidden: torch.Tensor = self.body(tokens, **arguments)
        return hidden + self.shift if self.enabled else hidden


def test_disabled_adapters_are_the_reference(tmp_path: Path) -> None:
    """Equal losses as with a frozen copy, and the frozen weights never change."""
    shared, copied = DisableableShift(), DisableableShift()
    before = shared.body.state_dict()["model.norm.weight"].clone()
    common = {"steps": 4, "learning_rate": 1e-2, "kl_coeff": 0.5, "value_model": decoder()}
    PPOTrainer(
        **settings(tmp_path / "off", policy_model=shared, reference_model="adapter_off", **common)
    ).optimize(PROMPTS)
    common["value_model"] = decoder()
    PPOTrainer(**settings(tmp_path / "copy", policy_model=copied, **common)).optimize(PROMPTS)
    shared_steps, copied_steps = events(tmp_path / "off", "step"), events(tmp_path / "copy", "step")
    assert [e["loss"] for e in shared_steps] == [e["loss"] for e in copied_steps]
    assert torch.equal(shared.shift, copied.shift)
    assert shared.shift.abs().max() > 0
    assert torch.equal(before, shared.body.state_dict()["model.norm.weight"])
    with pytest.raises(ConfigError, match="disable_adapter"):
        PPOTrainer(**settings(tmp_path, reference_model="adapter_off")).optimize(PROMPTS)


def test_a_skipped_sample_has_no_influence(tmp_path: Path) -> None:
    """Its tokens are masked, also within a group."""

    def failing_reward(samples: Sequence[Sample]) -> list[float]:
        return [
            float("nan") if s.prompt == "a" else v
            for s, v in zip(samples, vowels(samples), strict=True)
        ]

    for trainer, group in ((PPOTrainer, 1), (GRPOTrainer, 4)):
        folder = tmp_path / trainer.__name__
        options = settings(
            folder,
            reward_model=failing_reward,
            on_reward_failure="skip",
            num_generations=group,
            batch_size=16,
        )
        assert trainer(**options).optimize(PROMPTS).finished
        assert events(folder, "rollout")[0]["left_out"] == 4
        assert all(torch.isfinite(torch.tensor(e["loss"])) for e in events(folder, "step"))
    with pytest.raises(RewardError, match="prompt 'a'"):
        PPOTrainer(**settings(tmp_path / "stop", reward_model=failing_reward)).optimize(PROMPTS)


def test_a_group_is_used_if_its_first_response_is_skipped(tmp_path: Path) -> None:
    """The other rewards differ, so the run does not fail with equal rewards."""
    counter = iter(range(1000))

    def failing_reward(samples: Sequence[Sample]) -> list[float]:
        numbers = [next(counter) for _ in samples]
        return [float("nan") if number % 4 == 0 else float(number % 4) for number in numbers]

    options = settings(
        tmp_path, reward_model=failing_reward, on_reward_failure="skip", num_generations=4
    )
    assert GRPOTrainer(**options, equal_rewards_limit=1).optimize(PROMPTS).finished


def test_runs_without_anything_to_learn_are_rejected(tmp_path: Path) -> None:
    """Equal rewards in every group, an empty mask, and a run without remaining steps."""
    equal = settings(tmp_path / "equal", reward_model=lambda samples: [1.0] * len(samples))
    with pytest.raises(NothingToLearnError, match=r"3 rollouts in a row .*last reward: 1\)"):
        GRPOTrainer(**{**equal, "steps": 9}, num_generations=4, equal_rewards_limit=3).optimize(
            PROMPTS
        )
    all_failed = settings(
        tmp_path / "empty",
        reward_model=lambda samples: [float("nan")] * len(samples),
        on_reward_failure="skip",
    )
    with pytest.raises(NothingToLearnError, match="no response token is left"):
        PPOTrainer(**all_failed).optimize(PROMPTS)
    PPOTrainer(**settings(tmp_path / "done")).optimize(PROMPTS)
    with pytest.raises(ConfigError, match=r"the step of .*, got 1"):
        PPOTrainer(**settings(tmp_path / "done", steps=1)).optimize(PROMPTS)


def test_bad_input_is_reported_before_training(tmp_path: Path) -> None:
    """Mismatched datasets, answers, tokenizers, contexts and settings."""

    def check_refused(
        error: type[Exception],
        text: str,
        prompts: Any = PROMPTS,
        answers: Any = None,
        **overrides: Any,
    ) -> None:
        with pytest.raises(error, match=text):
            PPOTrainer(**settings(tmp_path, **overrides)).optimize(prompts, answers)

    check_refused(DataError, "prompt_dataset is empty", [])
    check_refused(DataError, "3 entries and prompt_dataset has 4", answers=["x"] * 3)
    check_refused(DataError, "entry 0 is a string, which needs a tokenizer", tokenizer=None)
    check_refused(DataError, "no 'prompt'", [{"question": "x"}])
    check_refused(DataError, "token 999", [[999]], tokenizer=None)
    check_refused(ConfigError, "minibatch_size", minibatch_size=3)
    check_refused(ConfigError, "kl_estimator must be k1, k2, k3 .*got 'k9'", kl_estimator="k9")
    check_refused(ConfigError, "kl_target=0.5 needs kl_coeff > 0", kl_target=0.5, kl_coeff=0)
    check_refused(ConfigError, "policy_model must be a path, got 3", policy_model=3)
    check_refused(
        ConfigError, "model must be a torch.nn.Module, .*got object", policy_model=object()
    )

    class LargerTokenizer(ByteTokenizer):
        vocabulary_size = 300

    check_refused(
        ModelError,
        "the model must have the tokenizer's 300 tokens, and has 258",
        tokenizer=LargerTokenizer(),
    )
    assert not list(tmp_path.glob("checkpoints/*"))


def test_a_run_does_not_resume_from_another_initial_model(tmp_path: Path) -> None:
    """The checkpoint identifies the initial weights, which the reference copies."""
    PPOTrainer(**settings(tmp_path)).optimize(PROMPTS)
    with pytest.raises(ms_align.CheckpointError, match="whose weights was"):
        PPOTrainer(**settings(tmp_path, steps=4, policy_model=decoder(seed=1))).optimize(PROMPTS)


def test_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    """One flipped bit: a warning, the previous checkpoint is used, and the result is the same."""
    reference = PPOTrainer(**settings(tmp_path / "reference", steps=4, checkpoint_every=1))
    reference.optimize(PROMPTS)
    PPOTrainer(**settings(tmp_path / "damaged", steps=3, checkpoint_every=1)).optimize(PROMPTS)
    weights_file = tmp_path / "damaged" / "checkpoints" / "step-00000003" / "rank-00000.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[len(content) // 2] ^= 1
    weights_file.write_bytes(content)
    PPOTrainer(**settings(tmp_path / "damaged", steps=4, checkpoint_every=1)).optimize(PROMPTS)
    assert events(tmp_path / "damaged", "damaged_checkpoint")
    model = Path("model", "model.safetensors")
    assert (tmp_path / "damaged" / model).read_bytes() == (
        tmp_path / "reference" / model
    ).read_bytes()


def test_a_model_that_was_not_written_is_written_by_the_next_launch(tmp_path: Path) -> None:
    """A run that ended after its last checkpoint makes no further update."""
    PPOTrainer(**settings(tmp_path)).optimize(PROMPTS)
    model_file = tmp_path / "model" / "model.safetensors"
    before = model_file.read_bytes()
    shutil.rmtree(model_file.parent)
    assert PPOTrainer(**settings(tmp_path)).optimize(PROMPTS).finished
    assert model_file.read_bytes() == before
    assert len(events(tmp_path, "step")) == 2


def test_microbatches_do_not_change_training(tmp_path: Path) -> None:
    """One row, three rows or all rows at a time: float32 sums in another order."""
    losses = {}
    for size in (1, 3, None):
        folder = tmp_path / str(size)
        PPOTrainer(**settings(folder, microbatch_size=size, learning_rate=1e-3)).optimize(PROMPTS)
        losses[size] = [event["loss"] for event in events(folder, "step")]
    assert losses[1] == pytest.approx(losses[None], rel=1e-5, abs=1e-5)
    assert losses[3] == pytest.approx(losses[None], rel=1e-5, abs=1e-5)


def test_a_copied_model_shares_no_weights() -> None:
    """Also for a decoder whose operators are a Python module."""
    model = decoder()
    copied = copy_of(model)
    tokens = torch.tensor([[5, 6, 7]])
    assert torch.equal(model(tokens), copied(tokens))
    assert not {p.data_ptr() for p in model.parameters()} & {
        p.data_ptr() for p in copied.parameters()
    }
    assert isinstance(LocalEngine(copied).state_dict(), dict)


def run_file(folder: Path, reward: str) -> Path:
    """Write a run file for two updates of a small decoder."""
    ms_align.models.folder.save_model(decoder(), folder / "start")  # type: ignore[attr-defined]
    (folder / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": "a"}\n')
    run = folder / "RUN.toml"
    run.write_text(
        f'policy_model = "{folder}/start"\ntokenizer = "bytes"\n'
        f'prompt_dataset = "{folder}/prompts.jsonl"\nreward_model = "{reward}"\n'
        f'output_dir = "{folder}/out"\nsteps = 2\nbatch_size = 4\nmax_new_tokens = 4\n'
    )
    return run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("reward_model=':f'", "reward_model ':f' cannot be imported"),
        ("reward_model='.x:f'", "reward_model '.x:f' cannot be imported"),
        ("reward_model='no_python:f'", "reward_model 'no_python:f' cannot be imported"),
        ("prompt_dataset=5", "prompt_dataset must be a path, got 5"),
        ("response_dataset=5", "response_dataset must be a path, got 5"),
        ("held_out=5", "held_out must be a path, got 5"),
        ("prompt_dataset=[[true]]", "prompt_dataset entry 0"),
        (
            "prompt_dataset=[[-3, 4]]",
            "entry 0 has the token id -3; use ids of the tokenizer's vocabulary",
        ),
        ("prompt_dataset=[[9223372036854775807]]", "entry 0 has the token id 9223372036854775807"),
        ("prompt_dataset='{0}/latin.jsonl'", "latin.jsonl line 1: not UTF-8 text"),
        ("tokenizer=5", "tokenizer must be a path, got 5"),
        ("tokenizer='{0}/tokenizer'", "tokenizer cannot be read"),
        ("generator=x", "generator 'x' is unknown; known: policy"),
        ("reward_failure_penalty=x", "reward_failure_penalty must be a number"),
        (
            "stop_token_ids=1.5",
            "stop_token_ids must be token ids from 0 to below 2147483648, got 1.5",
        ),
        ("stop_strings=5", "stop_strings must be non-empty texts, got 5"),
    ],
)
def test_bad_settings_are_one_line_and_exit_2(
    tmp_path: Path, change: str, message: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Problem, location and remedy, before anything is trained."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "no_python.py").write_text("def f(:")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xff"}')
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text("{")
    run = run_file(tmp_path, "small_models:vowels")
    assert main(["ppo", str(run), "--set", change.replace("{0}", str(tmp_path))]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out" / "checkpoints").exists()


def asks_to_stop(samples: Sequence[Sample]) -> list[float]:
    """Return the fraction of vowels, and send a stop signal to the run."""
    signal.raise_signal(signal.SIGTERM)
    return vowels(samples)


def test_a_stopped_command_does_not_succeed(tmp_path: Path) -> None:
    """Exit code 1 and no model, so that a script does not continue without one."""
    run = run_file(tmp_path, "test_online:asks_to_stop")
    assert main(["ppo", str(run)]) == 1
    assert not (tmp_path / "out" / "model").exists()


def test_two_runs_do_not_share_an_output_folder(tmp_path: Path) -> None:
    """The second is rejected while the first runs; afterwards the folder is free."""
    options = settings(tmp_path / "out", steps=1)
    errors = []

    def start_second_run(samples: Sequence[Sample]) -> list[float]:
        if not errors:
            with pytest.raises(CheckpointError, match="is in use by") as error:
                PPOTrainer(**settings(tmp_path / "out", steps=1)).optimize(PROMPTS)
            errors.append(error)
        return vowels(samples)

    PPOTrainer(**{**options, "reward_model": start_second_run}).optimize(PROMPTS)
    assert errors
    PPOTrainer(**settings(tmp_path / "out", steps=2)).optimize(PROMPTS)


def test_the_commands_train_resume_and_generate(tmp_path: Path, capsys: Any) -> None:
    """From a model folder and JSON Lines to a trained model and responses; mistakes exit with 2."""
    ms_align.models.folder.save_model(decoder(), tmp_path / "start")  # type: ignore[attr-defined]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello", "answer": "x"}\n{"prompt": "a", "answer": "y"}\n')
    run = tmp_path / "RUN.toml"
    run.write_text(
        f'policy_model = "{tmp_path}/start"\ntokenizer = "bytes"\nprompt_dataset = "{prompts}"\n'
        f'reward_model = "small_models:vowels"\noutput_dir = "{tmp_path}/out"\n'
        "steps = 2\nbatch_size = 4\nmax_new_tokens = 4\n"
    )
    assert main(["ppo", str(run)]) == 0
    assert main(["ppo", str(run)]) == 0
    assert "finished: all 2 steps" in capsys.readouterr().out
    assert main(["ppo", str(run), "--set", "steps=3"]) == 0
    assert main(["ppo", str(run), "--set", "kl_coef=0.1"]) == 2
    assert "did you mean 'kl_coeff'?" in capsys.readouterr().err
    assert (
        main(
            ["grpo", str(run), "--set", "reward_model=nowhere:at_all", "--set", "num_generations=2"]
        )
        == 2
    )
    assert "nowhere:at_all" in capsys.readouterr().err
    reward_model = RewardModel(decoder())
    torch.nn.init.normal_(reward_model.head.weight)
    reward_model.save(tmp_path / "judge")
    overrides = [
        "--set",
        f"output_dir={tmp_path}/judged",
        "--set",
        f"reward_model={tmp_path}/judge",
    ]
    assert main(["ppo", str(run), *overrides]) == 0
    assert main(["ppo", str(run), *overrides, "--set", f"reward_model={tmp_path}/start"]) == 2
    assert "is not a reward model" in capsys.readouterr().err
    generation = tmp_path / "GENERATE.toml"
    generation.write_text(
        f'model = "{tmp_path}/out/model"\n'
        f'dataset = "{prompts}"\noutput_path = "{tmp_path}/responses.jsonl"\nmax_new_tokens = 3\n'
    )
    assert main(["generate", str(generation), "--set", "output_path="]) == 2
    assert "output_path must be a path, got ''" in capsys.readouterr().err
    assert main(["generate", str(generation), "--set", "num_generations=2"]) == 0
    lines = (tmp_path / "responses.jsonl").read_bytes().splitlines()
    rows = [msgspec.json.decode(line) for line in lines]
    assert [row["prompt"] for row in rows] == ["hello", "hello", "a", "a"]
    assert all(len(row["tokens"]) == len(row["logprobs"]) == 3 for row in rows)
