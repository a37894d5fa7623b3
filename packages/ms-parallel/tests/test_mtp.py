"""Multi-token prediction: loss and gradients against a loop that follows the paper.

DeepSeek-V3's report (arXiv:2412.19437, section 2.2): depth k applies a transformer block to
M [norm(h_i); norm(E(t_i+k))] for the positions of a document, and the shared head predicts t_i+k+1.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_processes
from runs import FAMILIES, global_batch, tiny
from safetensors.torch import load_file, save_file
from torch import Tensor

from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.engine.microbatches import sum_over_rows
from ms_parallel.engine.mtp import mtp_divisors, mtp_targets
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.batch import Batch
from ms_parallel.models.parts.block import Block
from ms_parallel.models.staged import StagedModel
from ms_parallel.weights import load_model, save_model

SPLITS = Path(__file__).parent / "splits.py"


def settings(family: str, depths: int, **overrides: Any) -> dict[str, Any]:
    """Settings of a tiny model with MTP layers."""
    return {**FAMILIES[family], "num_nextn_predict_layers": depths, **overrides}


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def norm(x: Tensor, module: Any) -> Tensor:
    """RMS norm by its formula."""
    scaled: Tensor = x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight
    return scaled


def documents_of(batch: Batch) -> Iterator[dict[str, Tensor]]:
    """Tokens, targets and weights of each document."""
    for row, documents in enumerate(batch["documents"]):
        for document_id in documents.unique().tolist():
            mask = documents == document_id
            yield {name: batch[name][row][mask] for name in ("tokens", "targets", "weights")}


def reference_losses(model: StagedModel, batch: Batch) -> list[Tensor]:
    """Mean loss of each depth, the main model first, in loops over documents and positions."""
    depths = model.config.mtp_layers
    sums = [torch.zeros(()) for _ in range(depths + 1)]
    counts = [0.0] * (depths + 1)
    for text in documents_of(batch):
        tokens, length = text["tokens"], len(text["tokens"])
        states = model(tokens[None], logits=False)[0]
        for depth in range(depths + 1):
            if depth:
                layer: Any = model.model.layers[str(model.config.num_hidden_layers + depth - 1)]  # type: ignore[index]
                joined = [
                    torch.cat(
                        (
                            norm(model.embed(tokens[None, i + depth])[0], layer.enorm),
                            norm(states[i], layer.hnorm),
                        )
                    )
                    @ layer.eh_proj.weight.T
                    for i in range(length - depth)
                ]
                if not joined:
                    break
                context = model.context(torch.arange(len(joined))[None], None, None)
                out = Block.forward(layer, torch.stack(joined)[None], context=context)[0]
                states = norm(out, layer.shared_head.norm)
            for i in range(length - depth):
                target = int(text["targets"][i + depth])
                if target >= 0:
                    logits = model.head_weight @ states[i]
                    weight = float(text["weights"][i + depth])
                    sums[depth] = sums[depth] - weight * logits.log_softmax(0)[target]
                    counts[depth] += weight
    return [total / count if count else total for total, count in zip(sums, counts, strict=True)]


def short_documents(batch: Batch) -> dict[str, Tensor]:
    """The same tokens in documents of two, so that depth 2 has no targets."""
    at = torch.arange(batch["tokens"].shape[1])
    last = at % 2 == 1
    return {
        **batch,
        "documents": (at // 2).int().expand_as(batch["documents"]).contiguous(),
        "positions": (at % 2).expand_as(batch["tokens"]).contiguous(),
        "targets": batch["targets"].masked_fill(last, -100),
    }


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("depths", [1, 2])
@pytest.mark.parametrize("packing", ["two a row", "of two tokens"])
def test_losses_and_gradients_equal_a_loop_over_documents(
    family: str, depths: int, packing: str
) -> None:
    """Within 1e-12 relative in float64; a depth without targets has loss 0, not NaN."""
    engine = Engine(tiny(**settings(family, depths)), device="cpu", microbatch_size=2)
    batch = global_batch(0)
    if packing == "of two tokens":
        batch = short_documents(batch)
    model: Any = engine.module
    first, *mtp_losses = reference_losses(model, batch)
    total = first + 0.3 * torch.stack(mtp_losses).mean()
    truth = dict(
        zip(
            engine.parameters,
            torch.autograd.grad(total, list(engine.parameters.values()), allow_unused=True),
            strict=True,
        )
    )
    grads: dict[str, Tensor] = {}
    engine.trained.apply = lambda gradients, norm, rate: grads.update(gradients)  # type: ignore
    update = engine.step(batch, NextTokenLoss())
    assert update.loss == pytest.approx(float(first.detach()), rel=1e-6)
    assert update.mtp_losses == pytest.approx([float(x.detach()) for x in mtp_losses], rel=1e-6)
    assert (update.mtp_losses[-1] == 0) == (packing == "of two tokens")
    for name, gradient in truth.items():
        expected = torch.zeros_like(grads[name]) if gradient is None else gradient
        limit = 1e-12 * max(float(expected.abs().max()), 1e-3)
        assert float((grads[name] - expected).abs().max()) <= limit, name


@pytest.mark.parametrize("layout", ["pipeline=2", "tensor=2"])
def test_mtp_gradients_of_a_split_model_equal_one_process(layout: str) -> None:
    """In float64, within 1e-12 of the maximum; the last stage's embedding is a copy."""
    jobs = [
        {"settings": settings("deepseek_v3", 2), "rows": 2},
        {"settings": settings("glm4_moe", 1), "rows": 2},
    ]
    if layout == "pipeline=2":
        # First and last stage on one rank, which has both owner and copy.
        jobs += [{"settings": settings("deepseek_v3", 1, num_hidden_layers=4), "rows": 2}]
    options_list = [{}, {}, {"schedule": "zb-v"}]
    ranks_results = run_processes(
        2,
        SPLITS,
        "gradients",
        jobs=[
            {**job, "layout": layout, "options": options}
            for job, options in zip(jobs, options_list, strict=False)
        ],
        digits="float64",
    )
    single_jobs = [{**job, "layout": "data=1"} for job in jobs]
    (expected_grads,) = run_processes(1, SPLITS, "gradients", jobs=single_jobs, digits="float64")
    for index, expected_by_name in enumerate(expected_grads):
        seen: set[str] = set()
        for grads in (ranks[index] for ranks in ranks_results):
            seen |= grads.keys()
            for name, gradient in grads.items():
                expected = expected_by_name.get(name, expected_by_name["model.embed_tokens.weight"])
                error = max(abs(a - b) for a, b in zip(gradient, expected, strict=True))
                assert error <= 1e-12 * max(map(abs, expected)), name
        assert seen >= expected_by_name.keys()


def test_targets_of_a_depth_stay_inside_their_document() -> None:
    """Shifted by the depth; targets past the end of a document are ignored."""
    batch = {
        "targets": torch.tensor([[1, 2, 3, -100, 5, 6, 7]]),
        "documents": torch.tensor([[0, 0, 0, 0, 1, 1, 1]], dtype=torch.int32),
        "weights": torch.arange(7.0)[None],
    }
    for depth, targets, weights in (
        (1, [2, 3, -100, -100, 6, 7, -100], [1, 2, 0, 0, 5, 6, 0]),
        (2, [3, -100, -100, -100, 7, -100, -100], [2, 0, 0, 0, 6, 0, 0]),
        (9, [-100] * 7, [0] * 7),
    ):
        shifted = mtp_targets(batch, depth)
        assert shifted[0].tolist() == [targets]
        assert shifted[1].tolist() == [weights]
    groups: Any = type("One", (), {"place": type("Place", (), {"count": 1})})
    assert mtp_divisors([batch, batch], 2, lambda values: sum_over_rows(values.sum(0), groups)) == [
        28.0,
        16.0,
    ]


def test_with_weight_zero_mtp_layers_are_not_trained() -> None:
    """No MTP loss, no gradients, and the same main loss."""
    config = tiny(**settings("glm4_moe", 1))
    updates = [
        Engine(config, device="cpu").step(global_batch(0), NextTokenLoss(weight))
        for weight in (0.0, 0.3)
    ]
    assert updates[0].loss == updates[1].loss
    assert updates[0].mtp_losses == ()
    assert updates[0].grad_norm < updates[1].grad_norm


def published_folder(folder: Path, family: str) -> dict[str, Tensor]:
    """A model folder as published, with copies of embedding and head for each depth."""
    model = Engine(tiny(**settings(family, 2)), device="cpu").module
    assert isinstance(model, StagedModel)
    save_model(model, folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_folder_keeps_its_mtp_layers(tmp_path: Path, family: str) -> None:
    """A load and a save give the same bytes; copies of head and embedding may be missing."""
    tensors = published_folder(tmp_path, family)
    for depth in (3, 4):
        layer = f"model.layers.{depth}."
        assert torch.equal(
            tensors[f"{layer}embed_tokens.weight"], tensors["model.embed_tokens.weight"]
        )
        assert torch.equal(tensors[f"{layer}shared_head.head.weight"], tensors["lm_head.weight"])
        for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "input_layernorm"):
            assert f"{layer}{name}.weight" in tensors
    save_model(load_model(tmp_path), tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    fewer = {
        name: values
        for name, values in tensors.items()
        if not name.endswith(("embed_tokens.weight", "head.weight"))
        or not name.startswith("model.layers")
    }
    save_file(fewer, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path)
    assert torch.equal(model.head_weight, tensors["lm_head.weight"])


def test_a_different_mtp_embedding_is_refused(tmp_path: Path) -> None:
    """Otherwise a save would lose it silently."""
    tensors = published_folder(tmp_path, "deepseek_v3")
    tensors["model.layers.4.embed_tokens.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers.4.embed_tokens.weight' that differs"):
        load_model(tmp_path)


def test_a_folder_without_mtp_layers_loads_without_them(tmp_path: Path) -> None:
    """As saved by transformers; an incomplete set is refused."""
    tensors = published_folder(tmp_path, "deepseek_v3")
    some = {name: values for name, values in tensors.items() if ".layers.3." not in name}
    save_file(some, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks .* tensors, first 'model.layers.3"):
        load_model(tmp_path)
    none = {name: values for name, values in some.items() if ".layers.4." not in name}
    save_file(none, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_model(tmp_path).config.mtp_layers == 0


def test_a_tied_head_is_refused() -> None:
    """It would be confused with the last stage's copy of the embedding."""
    with pytest.raises(ConfigError, match="set tie_word_embeddings=false"):
        tiny(**settings("glm4_moe", 1, tie_word_embeddings=True))


def test_all_weights_of_an_mtp_layer_get_gradients() -> None:
    """The loss reaches every weight of an MTP layer."""
    engine = Engine(tiny(**settings("deepseek_v3", 1, n_group=1, topk_group=1)), device="cpu")
    grads: dict[str, Tensor] = {}
    engine.trained.apply = lambda gradients, norm, rate: grads.update(gradients)  # type: ignore
    engine.step(global_batch(0), NextTokenLoss())
    mtp_names = {name for name in grads if name.startswith("model.layers.3.")}
    assert mtp_names
    assert all(grads[name].any() for name in mtp_names)
