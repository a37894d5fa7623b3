"""Plans cover every parameter of their model and split what can be split."""

import pytest
import torch

from ms_parallel.errors import ModelError
from ms_parallel.models import ModelConfig, architecture, build_model, model_plan
from ms_parallel.models.registry import architectures

BIASED = {"attention_bias": True, "mlp_bias": True}
CONFIGS = [*(architecture(name) for name in architectures()), architecture("llama", BIASED)]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_plan_covers_every_parameter(config: ModelConfig) -> None:
    """Every parameter has a style, and split dims are even."""
    plan = model_plan(config)
    with torch.device("meta"):
        model = build_model(config)
    for name, parameter in model.named_parameters():
        dim = plan.split_dim(name)
        assert dim is None or parameter.shape[dim] % 2 == 0


@pytest.mark.parametrize("config", CONFIGS)
def test_every_pattern_of_a_plan_matches_a_parameter(config: ModelConfig) -> None:
    """Every pattern matches a module, except the head's in a tied model."""
    plan = model_plan(config)
    with torch.device("meta"):
        names = [name for name, _ in build_model(config).named_parameters()]
    for pattern in plan.tensor:
        single_pattern = type(plan)(tensor={pattern: "row"}, blocks=plan.blocks, cuts=plan.cuts)
        covered = [name for name in names if _covers(single_pattern, name)]
        assert covered or (pattern == "lm_head" and config.tie_word_embeddings)


def _covers(plan: object, name: str) -> bool:
    try:
        plan.style(name)  # type: ignore[attr-defined]
    except ModelError:
        return False
    return True


@pytest.mark.parametrize("config", CONFIGS)
def test_blocks_are_the_layers(config: ModelConfig) -> None:
    """The pattern of blocks matches each layer and nothing inside one."""
    plan = model_plan(config)
    with torch.device("meta"):
        blocks = [n for n, _ in build_model(config).named_modules() if plan.is_block(n)]
    assert blocks == [f"model.layers.{i}" for i in range(config.num_hidden_layers)]
    assert plan.cuts == tuple(range(config.num_hidden_layers))


def test_the_bias_of_a_row_parallel_layer_is_not_split() -> None:
    """Its output is summed, so a split bias would be wrong."""
    plan = model_plan(architecture("llama", BIASED))
    assert plan.split_dim("model.layers.0.mlp.down_proj.weight") == 1
    assert plan.split_dim("model.layers.0.mlp.down_proj.bias") is None
    assert plan.split_dim("model.layers.0.mlp.up_proj.bias") == 0


def test_a_parameter_that_no_pattern_covers_is_named() -> None:
    """A missing parameter is an error and not silently replicated."""
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.extra\.weight'"):
        model_plan(architecture("llama")).style("model.layers.0.extra.weight")
