"""Vision-language models train on packed rows as on separate samples."""

import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from processes import run_processes
from torch import Tensor
from torch.nn.functional import cross_entropy
from vision_language_runs import OPTIMIZER, TEXT, VISION, batch_of, tiny

import ms_data
from ms_data.media.processor import MediaItem
from ms_data.streams.media import _BatchItem, _positions_thw
from ms_parallel import Engine, Layout, ModelError, NextTokenLoss
from ms_parallel.models import MultimodalModel, TransformersModel
from ms_parallel.models.batch import slice_rows

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if 'image' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
]
CHILD = Path(__file__).with_name("vision_language_runs.py")
SIZES = [(56, 56), (90, 40), (30, 120), (200, 150)]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations with zero to two pictures of several sizes."""
    folder = tmp_path_factory.mktemp("vision_language")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["What is this?"], trainer)
    model.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 28 * 28,
        "max_pixels": 112 * 112,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    rng = np.random.default_rng(0)
    rows = []
    (folder / "corpus").mkdir()
    for index in range(12):
        parts: list[dict[str, str]] = [{"type": "text", "text": "What is this? "}]
        for picture in range(index % 3):
            size = SIZES[(index + picture) % len(SIZES)]
            pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            (folder / f"corpus/{index}-{picture}.png").write_bytes(file.getvalue())
            parts.append({"type": "image", "image": f"{index}-{picture}.png"})
            parts.append({"type": "text", "text": " and?"})
        answer = [{"type": "text", "text": f"Noise {index}."}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": messages}))
    (folder / "corpus/rows.jsonl").write_text("\n".join(rows) + "\n")
    out = folder / "shards"
    ms_data.build(folder / "corpus", tokenizer=folder, out=out, chat=folder, processor=folder)
    return out


def separate_samples_loss(model: Any, shards: Path) -> float:
    """Mean loss over all targets, each sample in a separate row, by transformers."""
    samples = ms_data.Samples(shards)
    processor = samples.processor
    assert processor is not None
    total, count = 0.0, 0
    for index in range(len(samples)):
        sample = samples.conversation(index)
        tokens = torch.from_numpy(sample.tokens)[None]
        image_inputs: dict[str, Tensor] = {}
        media = samples.media(index)
        if media:
            items = [medium.item for medium in media]
            image_inputs["pixel_values"] = torch.from_numpy(processor.patches(items))
            image_inputs["image_grid_thw"] = torch.tensor([item.grid for item in items])
        image_mask = (tokens == model.config.image_token_id).int()
        with torch.no_grad():
            logits = model(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                mm_token_type_ids=image_mask,
                use_cache=False,
                **image_inputs,
            ).logits
        model.model.rope_deltas = None
        targets = torch.from_numpy(sample.tokens[1:].copy())
        targets[~torch.from_numpy(sample.loss_mask[1:])] = -100
        total += float(cross_entropy(logits[0, :-1], targets, reduction="sum"))
        count += int((targets >= 0).sum())
    return total / count


@pytest.mark.parametrize("model_type", VISION)
@pytest.mark.parametrize("size", [None, 1])
def test_the_loss_of_packed_rows_equals_that_of_separate_samples(
    shards: Path, model_type: str, size: int | None
) -> None:
    """Before and after some updates, compared with transformers' model with the same weights."""
    torch.set_num_threads(1)
    reference, model = tiny(model_type, shards), MultimodalModel(tiny(model_type, shards))
    engine = Engine(
        model,
        Layout(),
        device="cpu",
        plan=model.plan,
        optimizer=OPTIMIZER,
        microbatch_size=size,
    )
    losses = []
    assert (batch_of(shards)["documents"].max(1) > 1).any()
    for _ in range(3):
        weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        assert reference.load_state_dict(weights, strict=False).unexpected_keys == []
        expected = separate_samples_loss(reference, shards)
        losses.append(engine.step(batch_of(shards), NextTokenLoss()).loss)
        assert losses[-1] == pytest.approx(expected, abs=1e-5)
    assert losses[-1] < losses[0]
    changed = {name for name, value in model.named_parameters() if (value != weights[name]).any()}
    assert any(name.startswith("model.visual.") for name in changed)


@pytest.mark.parametrize("size", [None, 1])
def test_two_processes_have_the_losses_of_one_process(shards: Path, size: int | None) -> None:
    """Also if a process's rows, or a microbatch, have no picture."""
    torch.set_num_threads(1)
    model = MultimodalModel(tiny("qwen3_vl", shards))
    engine = Engine(model, Layout(), device="cpu", plan=model.plan, optimizer=OPTIMIZER)
    expected = [engine.step(batch_of(shards), NextTokenLoss()).loss for _ in range(3)]
    ranks = run_processes(
        2, CHILD, "train_model", model_type="qwen3_vl", shards=str(shards), size=size, timeout_s=200
    )
    for losses in ranks:
        assert losses == pytest.approx(expected, abs=1e-5)  # sums over rows in a different order


@pytest.mark.parametrize("model_type", ["qwen2_vl", "qwen2_5_vl"])
def test_a_video_after_an_image_has_the_logits_and_gradients_of_transformers(
    shards: Path, model_type: str
) -> None:
    """The grid is higher than its time positions, where the positions of transformers agree."""
    torch.set_num_threads(1)
    reference, model = tiny(model_type, shards), MultimodalModel(tiny(model_type, shards))
    config = reference.config
    image, video = (1, 4, 6), (2, 6, 8)  # patches in time, height and width
    image_ids, video_ids = [config.image_token_id] * 6, [config.video_token_id] * 24
    tokens = torch.tensor([[10, 20, *image_ids, 21, 11, 20, *video_ids, 21, 12, 13, 14]])
    kinds = (tokens == config.image_token_id) + 2 * (tokens == config.video_token_id)
    inputs = {
        "pixel_values": torch.randn(24, 1176),
        "image_grid_thw": torch.tensor([image]),
        "pixel_values_videos": torch.randn(96, 1176),
        "video_grid_thw": torch.tensor([video]),
    }
    timing: dict[str, Tensor] = {}
    step = Fraction(1)
    if model_type == "qwen2_5_vl":
        step = Fraction(2)
        timing["second_per_grid_ts"] = torch.tensor([2 / config.vision_config.tokens_per_second])
    items = [
        _BatchItem(MediaItem("image", b"", 6, image), (0, 2, 8)),
        _BatchItem(MediaItem("video", b"", 24, video), (0, 11, 35), step),
    ]
    positions = np.arange(tokens.shape[1])[None]
    media = {**inputs, "positions_thw": torch.from_numpy(_positions_thw(positions, items, 2))}
    logits = model(tokens, documents=torch.zeros_like(tokens, dtype=torch.int32), media=media)
    expected = reference(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        mm_token_type_ids=kinds.int(),
        use_cache=False,
        **inputs,
        **timing,
    ).logits
    assert (logits - expected).abs().max() < 1e-5  # float32 sums in another order
    logits.square().mean().backward()
    expected.square().mean().backward()
    grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        scale = max(1.0, float(grads[name].abs().max()))
        assert float((parameter.grad - grads[name]).abs().max()) < 1e-5 * scale, name


def test_other_positions_give_another_loss(shards: Path) -> None:
    """Text positions for pictures, or swapped pictures, fail the comparison above."""
    torch.set_num_threads(1)
    model = MultimodalModel(tiny("qwen2_5_vl", shards))
    engine = Engine(model, Layout(), device="cpu", plan=model.plan)
    batch = batch_of(shards)

    def loss(**changed: Any) -> float:
        weights = {name: value.clone() for name, value in engine.state_dict().items()}
        changed_loss = engine.step({**batch, **changed}, NextTokenLoss()).loss
        engine.load_state_dict(weights)
        return changed_loss

    expected = loss()
    text_positions = np.broadcast_to(batch["positions"], batch["positions_thw"].shape).copy()
    assert abs(loss(positions_thw=text_positions) - expected) > 1e-4
    assert abs(loss(pixel_values=batch["pixel_values"][::-1].copy()) - expected) > 1e-4


def test_microbatches_have_the_pictures_of_their_rows(shards: Path) -> None:
    """In their order, and no others."""
    batch = {name: torch.as_tensor(value) for name, value in batch_of(shards).items()}
    parts = [slice_rows(batch, at, at + 1) for at in range(len(batch["tokens"]))]
    for name in ("pixel_values", "image_grid_thw"):
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    for part in parts:
        marked = torch.zeros_like(part["tokens"], dtype=torch.bool)
        for row, start, stop in part["image_places"].tolist():
            marked[row, start:stop] = True
        assert len(part["tokens"][marked].unique()) <= 1
        assert part["positions_thw"].shape == (3, 1, 192)


def test_a_text_only_model_refuses_pictures(shards: Path) -> None:
    """It would otherwise train on placeholders of pictures it does not see."""
    config = transformers.Qwen2Config(**{**TEXT, "vocab_size": 300, "rope_parameters": None})
    engine = Engine(TransformersModel(config.to_dict()), Layout(), device="cpu")
    with pytest.raises(ModelError, match="is a text-only model; use a MultimodalModel"):
        engine.step(batch_of(shards), NextTokenLoss())
    with pytest.raises(ModelError, match="model_type must be one of qwen2_vl"):
        MultimodalModel(torch.nn.Linear(2, 2))
