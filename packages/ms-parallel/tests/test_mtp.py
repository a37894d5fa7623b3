"""Layers that predict further: loss and gradients against a loop written from the paper.

DeepSeek-V3's report (arXiv:2412.19437, section 2.2): at depth k, M [norm(h_i); norm(E(t_i+k))] for
the positions of one text, a transformer block over them, and the shared head, whose logits predict
t_i+k+1.
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


def settings(family: str, depths: int, **more: Any) -> dict[str, Any]:
    """A tiny model that predicts further."""
    return {**FAMILIES[family], "num_nextn_predict_layers": depths, **more}


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def norm(x: Tensor, module: Any) -> Tensor:
    """A root-mean-square norm by its formula."""
    scaled: Tensor = x / (x.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight
    return scaled


def documents_of(batch: Batch) -> Iterator[dict[str, Tensor]]:
    """Tokens, targets and weights of each document alone."""
    for row, documents in enumerate(batch["documents"]):
        for number in documents.unique().tolist():
            own = documents == number
            yield {name: batch[name][row][own] for name in ("tokens", "targets", "weights")}


def slowly(model: StagedModel, batch: Batch) -> list[Tensor]:
    """The mean loss of each depth, the model's own first, a document and a position at a time."""
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
    return [each / count if count else each for each, count in zip(sums, counts, strict=True)]


def short_documents(batch: Batch) -> dict[str, Tensor]:
    """The same tokens in documents of two, so that nothing can be predicted two further."""
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
    """Within 1e-12 relative in float64; a depth without targets gives 0 and not NaN."""
    engine = Engine(tiny(**settings(family, depths)), device="cpu", microbatch_size=2)
    batch = global_batch(0)
    if packing == "of two tokens":
        batch = short_documents(batch)
    model: Any = engine.module
    first, *further = slowly(model, batch)
    wanted = first + 0.3 * torch.stack(further).mean()
    truth = dict(
        zip(
            engine.parameters,
            torch.autograd.grad(wanted, list(engine.parameters.values()), allow_unused=True),
            strict=True,
        )
    )
    found: dict[str, Tensor] = {}
    engine.trained.apply = lambda gradients, norm, rate: found.update(gradients)  # type: ignore
    update = engine.step(batch, NextTokenLoss())
    assert update.loss == pytest.approx(float(first.detach()), rel=1e-6)
    assert update.mtp_losses == pytest.approx([float(each.detach()) for each in further], rel=1e-6)
    assert (update.mtp_losses[-1] == 0) == (packing == "of two tokens")
    for name, gradient in truth.items():
        expected = torch.zeros_like(found[name]) if gradient is None else gradient
        limit = 1e-12 * max(float(expected.abs().max()), 1e-3)
        assert float((found[name] - expected).abs().max()) <= limit, name


@pytest.mark.parametrize("layout", ["pipeline=2", "tensor=2"])
def test_a_split_model_predicts_further_as_one_process_does(layout: str) -> None:
    """In float64, within 1e-12 of the largest; the last stage's embedding is the first one's."""
    jobs = [
        {"settings": settings("deepseek_v3", 2), "rows": 2},
        {"settings": settings("glm4_moe", 1), "rows": 2},
    ]
    if layout == "pipeline=2":
        # First and last stage on one rank, which holds owner and copy.
        jobs += [{"settings": settings("deepseek_v3", 1, num_hidden_layers=4), "rows": 2}]
    vee = [{}, {}, {"schedule": "zb-v"}]
    many = run_processes(
        2,
        SPLITS,
        "gradients",
        jobs=[
            {**job, "layout": layout, "options": options}
            for job, options in zip(jobs, vee, strict=False)
        ],
        digits="float64",
    )
    alone = [{**job, "layout": "data=1"} for job in jobs]
    (one,) = run_processes(1, SPLITS, "gradients", jobs=alone, digits="float64")
    for place, truth in enumerate(one):
        held: set[str] = set()
        for found in (ranks[place] for ranks in many):
            held |= found.keys()
            for name, gradient in found.items():
                expected = truth.get(name, truth["model.embed_tokens.weight"])
                apart = max(abs(a - b) for a, b in zip(gradient, expected, strict=True))
                assert apart <= 1e-12 * max(map(abs, expected)), name
        assert held >= truth.keys()


def test_targets_of_a_depth_stay_inside_their_document() -> None:
    """Shifted by the depth; what crosses an end, or has none, counts nothing."""
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
        found = mtp_targets(batch, depth)
        assert found[0].tolist() == [targets]
        assert found[1].tolist() == [weights]
    groups: Any = type("One", (), {"place": type("Place", (), {"count": 1})})
    assert mtp_divisors([batch, batch], 2, lambda values: sum_over_rows(values.sum(0), groups)) == [
        28.0,
        16.0,
    ]


def test_without_weight_the_layers_stay_as_they_are() -> None:
    """No loss of theirs, no gradient, and the same first loss."""
    config = tiny(**settings("glm4_moe", 1))
    both = [
        Engine(config, device="cpu").step(global_batch(0), NextTokenLoss(weight))
        for weight in (0.0, 0.3)
    ]
    assert both[0].loss == both[1].loss
    assert both[0].mtp_losses == ()
    assert both[0].grad_norm < both[1].grad_norm


def released(folder: Path, family: str) -> dict[str, Tensor]:
    """A folder as it is released: embedding and head once more for each depth."""
    model = Engine(tiny(**settings(family, 2)), device="cpu").module
    assert isinstance(model, StagedModel)
    save_model(model, folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_a_folder_keeps_what_predicts_further(tmp_path: Path, family: str) -> None:
    """Loaded and saved again it is the same byte for byte; head and embedding may be left out."""
    tensors = released(tmp_path, family)
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


def test_another_embedding_further_on_is_refused(tmp_path: Path) -> None:
    """It would be lost without a word."""
    tensors = released(tmp_path, "deepseek_v3")
    tensors["model.layers.4.embed_tokens.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"layers.4.embed_tokens.weight' that differs"):
        load_model(tmp_path)


def test_a_folder_without_these_layers_loads_without_them(tmp_path: Path) -> None:
    """As transformers saves it; a folder with only some of them is refused."""
    tensors = released(tmp_path, "deepseek_v3")
    some = {name: values for name, values in tensors.items() if ".layers.3." not in name}
    save_file(some, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks .* tensors, first 'model.layers.3"):
        load_model(tmp_path)
    none = {name: values for name, values in some.items() if ".layers.4." not in name}
    save_file(none, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_model(tmp_path).config.mtp_layers == 0


def test_a_tied_head_is_refused() -> None:
    """The embedding of the last stage could not be told from it."""
    with pytest.raises(ConfigError, match="set tie_word_embeddings=false"):
        tiny(**settings("glm4_moe", 1, tie_word_embeddings=True))


def test_hidden_states_of_a_depth_are_like_the_models() -> None:
    """The loss reaches every weight of a layer that predicts further."""
    engine = Engine(tiny(**settings("deepseek_v3", 1, n_group=1, topk_group=1)), device="cpu")
    found: dict[str, Tensor] = {}
    engine.trained.apply = lambda gradients, norm, rate: found.update(gradients)  # type: ignore
    engine.step(global_batch(0), NextTokenLoss())
    own = {name for name in found if name.startswith("model.layers.3.")}
    assert own
    assert all(found[name].any() for name in own)
