"""A stage can be changed between its split and its sharding."""

from pathlib import Path

import torch
from torch import Tensor, nn

from ms_parallel import Engine, Layout, NextTokenLoss, load_model, save_model
from ms_parallel.models import DecoderConfig, StagedModel

CONFIG = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)


class Scaled(nn.Linear):
    """A linear layer times exp of a learned number."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return super().forward(x) * self.get_parameter("gain").exp()


class Doubled(nn.Embedding):
    """An embedding that computes with a different weight than it stores."""

    def effective_weight(self) -> Tensor:
        """Twice the weight."""
        return 2 * self.weight


def prepare(stage: StagedModel) -> None:
    """Add a gain to each layer's down projection."""
    for name, layer in stage.named_modules():
        if name.endswith("down_proj"):
            layer.__class__ = Scaled
            layer.register_parameter("gain", nn.Parameter(torch.empty(1)))


def test_parameters_added_by_prepare_start_at_zero_and_learn(tmp_path: Path) -> None:
    """exp(0) is 1, so the first loss is unchanged; then the added parameters are trained."""
    tokens = torch.arange(2 * 17).reshape(2, 17) % 64
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    plain = Engine(CONFIG, Layout(), device="cpu")
    engine = Engine(CONFIG, Layout(), device="cpu", prepare=prepare)
    loss = NextTokenLoss()
    assert engine.step(batch, loss).loss == plain.step(batch, loss).loss
    engine.step(batch, loss)
    added = [p for name, p in engine.parameters.items() if name.endswith("gain")]
    assert len(added) == 2
    assert all(bool(p.ne(0).all()) for p in added)
    save_model(list(engine.stages.values()), tmp_path)
    assert all(name.endswith("weight") for name, _ in load_model(tmp_path).named_parameters())
    reloaded = Engine(tmp_path, Layout(), device="cpu", prepare=prepare)
    assert all(bool(p.eq(0).all()) for n, p in reloaded.parameters.items() if n.endswith("gain"))


def test_the_head_uses_the_effective_weight_of_a_prepared_layer() -> None:
    """The head uses `effective_weight` of a layer that has it."""

    def double(stage: StagedModel) -> None:
        stage.model.embed_tokens.__class__ = Doubled  # type: ignore[union-attr]

    engine = Engine(CONFIG, Layout(), device="cpu", prepare=double)
    (stage,) = engine.stages.values()
    assert torch.equal(stage.head_weight, 2 * stage.model.embed_tokens.weight)  # type: ignore[union-attr]
