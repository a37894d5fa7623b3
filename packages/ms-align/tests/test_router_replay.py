"""Router replay: updates use the experts that were selected during sampling."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import decoder
from torch import Tensor, nn

from ms_align import (
    ConfigError,
    GRPOTrainer,
    LocalEngine,
    LocalGenerator,
    PPOTrainer,
    RLOOTrainer,
    Sampling,
    ServerError,
)
from ms_align.losses.policy import PolicyLoss
from ms_align.models.folder import save_model
from ms_align.rollouts.rows import logprobs_of, sequences
from ms_parallel.models import record_experts

from .test_online import PROMPTS, events
from .test_online import settings as local_settings
from .test_vllm import FakeServer, spread
from .test_vllm import settings as server_settings

MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [0],
    "num_hidden_layers": 3,
}
SAMPLER: dict[str, Any] = {"max_new_tokens": 6, "stop_token_ids": range(60)}


def mixture(seed: int = 0) -> nn.Module:
    """Build a small model with experts in two of three layers."""
    return decoder("qwen3_moe", seed=seed, **MIXTURE)


def experts_of(model: nn.Module, tokens: list[int]) -> Tensor:
    """Experts of a forward pass over a row, (S, L, k)."""
    with torch.no_grad(), record_experts(model) as experts:
        model(torch.tensor([tokens]))
    return experts()[0]


def test_a_generator_records_the_experts_of_prompts_and_responses() -> None:
    """A forward pass over the entire row selects the same experts; rows wait for free slots."""
    model = mixture()
    prompts = [[5, 6, 7, 8, 9], [11], [20, 22, 24]]
    generator = LocalGenerator(model, max_num_seqs=4, records_experts=True)
    responses = generator(prompts, Sampling(**SAMPLER), count=3)
    assert len(set(responses.lengths.tolist())) > 1
    recorded = responses.routed_experts
    assert recorded is not None
    for row in range(9):
        tokens = [*prompts[row // 3], *responses.row(row)][:-1]
        assert recorded[row, : len(tokens)].tolist() == experts_of(model, tokens).tolist()
        assert (recorded[row, len(tokens) :] == -1).all()


def test_a_learner_with_other_routers_differs_only_without_replay() -> None:
    """Log-probabilities of the sampler are repeated, and the differing selections counted."""
    model = mixture()
    prompts = [[5, 6, 7], [11, 12]]
    responses = LocalGenerator(model, records_experts=True)(prompts, Sampling(**SAMPLER))
    rows = sequences(prompts, responses)
    sampled = rows["targets"] != -100
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):  # the best experts become the worst
                parameter.neg_()
    engine = LocalEngine(model)
    replayed = logprobs_of(engine, rows, 1.0)
    free = {name: column for name, column in rows.items() if name != "routed_experts"}
    other = logprobs_of(engine, free, 1.0)
    assert (replayed - other)[sampled].abs().max() > 1e-3
    batch = {**rows, "advantages": sampled.float()}
    loss = PolicyLoss(clip_low=0.2, clip_high=0.2)
    report = engine.step(batch, loss)
    assert report.statistics["router_difference"] > 0.5
    assert (
        "router_difference"
        not in engine.step({**free, "advantages": sampled.float()}, loss).statistics
    )


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "trainer",
    [GRPOTrainer, pytest.param(PPOTrainer, marks=SLOW), pytest.param(RLOOTrainer, marks=SLOW)],
)
def test_trainers_replay_the_experts_of_their_generator(tmp_path: Path, trainer: Any) -> None:
    """The first update of a rollout repeats the selections; a later rollout's experts are new."""
    groups = {} if trainer is PPOTrainer else {"num_generations": 4}
    options = local_settings(
        tmp_path,
        policy_model=mixture(),
        reward_model=spread,
        router_replay=True,
        learning_rate=1e-2,
        epochs=2,
        steps=4,
        **groups,
    )
    assert trainer(**options).optimize(PROMPTS).finished
    steps = events(tmp_path, "step")
    assert [steps[0]["router_difference"], steps[2]["router_difference"]] == [0.0, 0.0]
    assert steps[1]["router_difference"] > 0  # the routers have been updated since


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [{}, {"max_staleness": 2, "max_resample_times": 1}])
def test_a_run_with_replay_resumes_bit_for_bit(tmp_path: Path, overrides: dict[str, Any]) -> None:
    """Checkpoints contain the experts of the current rollout and of pending rollouts."""
    for folder, stops in (("single", [4]), ("split", [3, 4])):
        for steps in stops:
            options = local_settings(
                tmp_path / folder,
                policy_model=mixture(),
                reward_model=spread,
                router_replay=True,
                num_generations=4,
                minibatch_size=4,
                steps=steps,
                **overrides,
            )
            GRPOTrainer(**options).optimize(PROMPTS)
    model = Path("model", "model.safetensors")
    assert (tmp_path / "split" / model).read_bytes() == (tmp_path / "single" / model).read_bytes()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server whose answers have the experts of each token, as vLLM's on a GPU."""
    folder = tmp_path_factory.mktemp("vllm") / "start"
    save_model(mixture(seed=1), folder)
    server = FakeServer(folder)
    yield server
    server.close()


def with_server(folder: Path, server: Any, **overrides: Any) -> list[dict[str, Any]]:
    """Train with the server's rollouts; return the events of the updates."""
    options = server_settings(
        folder,
        server,
        policy_model=mixture(),
        reward_model=spread,
        router_replay=True,
        num_generations=4,
        **overrides,
    )
    GRPOTrainer(**options).optimize(PROMPTS)
    return events(folder, "step")


@pytest.mark.slow
def test_experts_of_a_server_are_replayed(tmp_path: Path, server: Any) -> None:
    """The server has the policy's weights, so the experts are equal; dense layers are skipped."""
    server.fail("none", times=0)
    for number, step in enumerate(with_server(tmp_path / "run", server)):
        assert step["router_difference"] == 0.0, number
        assert step["sampler_difference"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("no_experts", "must have the experts of each token but has none; start the server with"),
        ("malformed_experts", "has experts that are not a .npy file"),
        ("few_experts", r"2 layers and 2 experts per token but has (1, 3, 2)"),
        ("foreign_expert", "must have experts below 8 but has others"),
    ],
)
def test_unusable_experts_stop_the_run(
    tmp_path: Path, server: Any, fault: str, problem: str
) -> None:
    """The error is one line, and no part of the answer enters an update."""
    server.fail(fault)
    with pytest.raises(ServerError, match=re.escape(problem)) as error:
        with_server(tmp_path / "run", server)
    assert "\n" not in str(error.value)
    assert events(tmp_path / "run", "step") == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({}, "router_replay needs a model of ms-parallel with experts, and llama has none"),
        ({"generator": lambda *_, **__: None}, "router_replay needs responses of one turn"),
    ],
)
def test_settings_without_experts_are_rejected(
    tmp_path: Path, overrides: dict[str, Any], problem: str
) -> None:
    """A dense model, and a generator that returns no experts."""
    options = local_settings(tmp_path, router_replay=True, num_generations=4, **overrides)
    with pytest.raises(ConfigError, match=problem):
        GRPOTrainer(**options).optimize(PROMPTS)
