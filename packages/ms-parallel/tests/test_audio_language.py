"""Audio-language models train on packed rows as transformers computes separate samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from attrs import frozen
from audio_language_runs import OPTIMIZER, RATE_HZ, batch_of, write_corpus, write_model
from processes import run_processes
from torch import Tensor
from torch.nn.functional import cross_entropy

import ms_data
from ms_parallel import Engine, Layout, LayoutError, ModelError, NextTokenLoss
from ms_parallel.models import MultimodalModel
from ms_parallel.models.batch import MEDIA, media_of, slice_rows

CHILD = Path(__file__).with_name("audio_language_runs.py")
IGNORED = -100


@frozen
class AudioData:
    """A model folder, shards, and what transformers' processor makes of the same conversations."""

    model: Path
    shards: Path
    inputs: list[dict[str, Tensor]]
    """Output of the processor for each conversation."""
    targets: list[Tensor]
    """Tokens of the assistant's turns, shifted, (S - 1,)."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> AudioData:
    folder = tmp_path_factory.mktemp("audio_language")
    model = folder / "model"
    processor = write_model(model)
    rows, clips = write_corpus(folder / "corpus")
    shards = folder / "shards"
    ms_data.build(folder / "corpus", tokenizer=model, out=shards, chat=model, processor=model)
    samples = ms_data.Samples(shards)
    inputs, targets = [], []
    for index, (row, row_clips) in enumerate(zip(rows, clips, strict=True)):
        text = processor.apply_chat_template(row["messages"], tokenize=False)
        output = processor(
            text=text, audio=row_clips or None, sampling_rate=RATE_HZ, return_tensors="pt"
        )
        inputs.append(dict(output))
        sample = samples.conversation(index)
        assert sample.tokens.tolist() == output["input_ids"][0].tolist()
        target = torch.from_numpy(sample.tokens[1:].copy())
        target[~torch.from_numpy(sample.loss_mask[1:])] = IGNORED
        answer = processor.tokenizer.decode(target[target != IGNORED])
        assert answer.strip() == f"Tone {index}.<|im_end|>"
        targets.append(target)
    return AudioData(model, shards, inputs, targets)


def reference_loss(model: Any, data: AudioData) -> Tensor:
    """Mean loss over all targets, each conversation in a row alone, by transformers."""
    losses = [
        cross_entropy(model(**inputs, use_cache=False).logits[0, :-1], target, reduction="sum")
        for inputs, target in zip(data.inputs, data.targets, strict=True)
    ]
    count = sum(int((target != IGNORED).sum()) for target in data.targets)
    return torch.stack(losses).sum() / count


def reference_model(folder: Path) -> Any:
    return transformers.Qwen2AudioForConditionalGeneration.from_pretrained(folder).eval()


def _find(batch: dict[str, Tensor], ids: Tensor) -> tuple[int, int]:
    """Row and first token of a conversation; the answers make all conversations different."""
    (place,) = (
        (row, start)
        for row, positions in enumerate(batch["positions"])
        for start in torch.nonzero(positions == 0).flatten().tolist()
        if torch.equal(batch["tokens"][row, start : start + len(ids)], ids)
    )
    return place


def test_logits_and_gradients_of_packed_rows_equal_transformers(data: AudioData) -> None:
    """Every conversation in the packed rows, and every parameter of tower and text model."""
    torch.set_num_threads(1)
    reference, model = reference_model(data.model), MultimodalModel.load(data.model)
    batch = {name: torch.as_tensor(value) for name, value in batch_of(data.shards).items()}
    assert (batch["documents"].amax(1) > 1).any()
    starts = [_find(batch, inputs["input_ids"][0]) for inputs in data.inputs]
    # The processor's own spectrograms, in the order of the rows: ours are computed in float64.
    order = sorted(range(len(starts)), key=starts.__getitem__)
    for name in MEDIA["audio"].items:
        values = [data.inputs[index][name] for index in order if name in data.inputs[index]]
        batch[name] = torch.cat(values)
    logits = model(
        batch["tokens"],
        positions=batch["positions"],
        documents=batch["documents"],
        media=media_of(batch),
    )
    compared = 0
    for inputs, (row, start) in zip(data.inputs, starts, strict=True):
        with torch.no_grad():
            expected = reference(**inputs, use_cache=False).logits[0]
        # float32 sums in another order, of values near 1
        assert (logits[row, start : start + len(expected)] - expected).abs().max() < 1e-5
        compared += len(expected)
    assert compared > 400
    targets = batch["targets"].flatten()
    loss = cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED)
    expected_loss = reference_loss(reference, data)
    assert float(loss) == pytest.approx(float(expected_loss), abs=1e-5)
    loss.backward()
    expected_loss.backward()
    expected_grads = {n: p.grad for n, p in reference.named_parameters() if p.requires_grad}
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert grads.keys() == expected_grads.keys()
    assert any(name.startswith("model.audio_tower.") for name in grads)
    for name, grad in grads.items():
        # float32 sums in another order: relative to the largest entry, and to rounding where the
        # gradient is 0 up to rounding, as that of a key's bias.
        scale = max(1.0, float(expected_grads[name].abs().max()))
        assert float((grad - expected_grads[name]).abs().max()) < 1e-5 * scale, name


def test_a_folder_trains_saves_and_opens_in_transformers(data: AudioData, tmp_path: Path) -> None:
    """`Engine(folder)`; the state also resumes, and the losses fall."""
    torch.set_num_threads(1)
    batch = batch_of(data.shards)
    engine = Engine(data.model, Layout(), device="cpu", optimizer=OPTIMIZER, microbatch_size=1)
    losses = [engine.step(batch, NextTokenLoss()).loss for _ in range(3)]
    assert losses[0] == pytest.approx(
        float(reference_loss(reference_model(data.model), data).detach()), abs=1e-5
    )
    assert losses[-1] < losses[0]
    engine.save(tmp_path / "saved", tokenizer=data.model)
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    expected = [engine.step(batch, NextTokenLoss()).loss for _ in range(2)]
    saved = reference_model(tmp_path / "saved")
    assert float(reference_loss(saved, data)) == pytest.approx(expected[0], abs=1e-5)
    processor = transformers.AutoProcessor.from_pretrained(tmp_path / "saved")
    assert processor.audio_token == "<|AUDIO|>"
    resumed = Engine(tmp_path / "saved", device="cpu", optimizer=OPTIMIZER, microbatch_size=1)
    resumed.load_state_dict(state)
    assert [resumed.step(batch, NextTokenLoss()).loss for _ in range(2)] == expected


def test_clips_of_one_token_each_are_no_placeholders(data: AudioData) -> None:
    """Its forward expands single placeholders again; ours have been expanded already."""
    model = MultimodalModel.load(data.model)
    config = model.config
    tokens = torch.tensor([[1, config.audio_token_id, 2, 3]])
    features, mask = torch.randn(1, 16, 200), torch.zeros(1, 200, dtype=torch.int64)
    mask[:, :4] = 1
    media = {"input_features": features, "feature_attention_mask": mask}
    positions = torch.arange(4)[None]
    assert model(tokens, positions=positions, media=media).shape == (1, 4, 300)
    with pytest.raises(ModelError, match="one audio token for each output"):
        model(torch.ones_like(tokens), positions=positions, media=media)


def test_microbatches_have_the_clips_of_their_rows(data: AudioData) -> None:
    batch = {name: torch.as_tensor(value) for name, value in batch_of(data.shards).items()}
    parts = [slice_rows(batch, at, at + 1) for at in range(len(batch["tokens"]))]
    for name in MEDIA["audio"].items:
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    assert [len(part["audio_places"]) for part in parts] == [
        int((batch["audio_places"][:, 0] == row).sum()) for row in range(len(parts))
    ]


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context", "expert"])
def test_layouts_that_split_the_model_are_refused_in_one_line(data: AudioData, axis: str) -> None:
    with pytest.raises(LayoutError, match=axis) as error:
        Engine(data.model, Layout.parse(f"{axis}=2,data=1"), device="cpu")
    assert "\n" not in str(error.value)


def test_a_damaged_folder_is_refused_in_one_line(data: AudioData, tmp_path: Path) -> None:
    config = json.loads((data.model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "audio_config": {"d_model": "x"}}))
    with pytest.raises(ModelError, match="cannot be read") as error:
        MultimodalModel.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 1])
def test_two_processes_have_the_losses_of_one_process(
    data: AudioData, tmp_path: Path, size: int | None
) -> None:
    """Also if a microbatch has no clip; the saved models are equal up to rounding."""
    torch.set_num_threads(1)
    engine = Engine(data.model, Layout(), device="cpu", optimizer=OPTIMIZER)
    batch = batch_of(data.shards)
    expected = [engine.step(batch, NextTokenLoss()).loss for _ in range(3)]
    saved = tmp_path / "saved"
    ranks = run_processes(
        2,
        CHILD,
        "train_folder",
        model=str(data.model),
        shards=str(data.shards),
        size=size,
        saved=str(saved),
        timeout_s=300,
    )
    for losses in ranks:
        assert losses == pytest.approx(expected, abs=1e-5)  # sums over rows in a different order
    loss = float(reference_loss(reference_model(saved), data))
    assert loss == pytest.approx(engine.step(batch, NextTokenLoss()).loss, abs=1e-4)


def test_silence_and_other_clips_change_the_loss(data: AudioData) -> None:
    """The comparisons above would fail for clips in another order."""
    engine = Engine(data.model, device="cpu")
    batch = batch_of(data.shards)
    weights = {name: value.clone() for name, value in engine.state_dict().items()}
    expected = engine.step(batch, NextTokenLoss()).loss
    engine.load_state_dict(weights)
    other = {**batch, "input_features": np.roll(batch["input_features"], 1, 0)}
    assert abs(engine.step(other, NextTokenLoss()).loss - expected) > 1e-4
