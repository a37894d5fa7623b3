"""The output of a run loads elsewhere, chats and stops."""

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ms_align import (
    DPOTrainer,
    LoraOptions,
    NonFiniteError,
    PPOTrainer,
    RewardModel,
    RewardTrainer,
    Sample,
    SFTTrainer,
    add_lora,
)
from ms_align.cli import main
from ms_align.errors import ConfigError, DataError, FolderError
from ms_align.generation.sampling import Sampling
from ms_align.tokenizer import ByteTokenizer
from ms_data import InstructionStream, PreferenceStream
from ms_parallel import load_model

from .instruction_sets import byte_tokenizer
from .small_models import decoder, llama, vowels
from .test_offline import run_file

sys.path.insert(0, str(Path(__file__).parent))  # run files refer to rewards by module name

CHAT = [{"role": "user", "content": "copy red 0"}]


def open_with_transformers(folder: Path) -> tuple[Any, Any]:
    """Open a folder with transformers: model and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def check_opens(folder: Path, *, chats: bool) -> None:
    """Check that config.json, tokenizer and generation_config.json agree on the end of text."""
    model, tokenizer = open_with_transformers(folder)
    assert tokenizer.eos_token == "<|endoftext|>"
    end = tokenizer.eos_token_id
    assert model.config.eos_token_id == end
    assert model.generation_config.eos_token_id == end
    assert model.config.pad_token_id is not None
    assert tokenizer.decode(tokenizer("a b").input_ids) == "a b"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["pad_token"]
    if chats:
        text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        assert text == "<user>copy red 0<|endoftext|><assistant>"
        assert config["chat_template"]
    prompt = tokenizer("ab", return_tensors="pt").input_ids

    def bias(module: torch.nn.Module, inputs: object, logits: torch.Tensor) -> torch.Tensor:
        forced = torch.zeros_like(logits)
        forced[..., end] = 100.0  # forces the end token for any weights
        return logits + forced

    handle = model.get_output_embeddings().register_forward_hook(bias)
    generated = model.generate(prompt, max_new_tokens=40, do_sample=True)
    handle.remove()
    assert generated.shape[1] == prompt.shape[1] + 1
    assert generated[0, -1] == end


def instructions(sets: Path) -> InstructionStream:
    """Open both tasks, packed."""
    sources = {"copy": sets / "copy", "reverse": sets / "reverse"}
    return InstructionStream(sources, sequence_length=64, batch_size=4)


def pairs(sets: Path) -> PreferenceStream:
    """Open the preference pairs."""
    return PreferenceStream(sets / "pairs", sequence_length=64, batch_size=4)


def quiet(model: Any, folder: Path, steps: int) -> dict[str, Any]:
    """Settings of a run without progress output."""
    quick = {"learning_rate": 3e-3, "progress": False}
    return {"model": model, "output_dir": folder, "steps": steps, **quick}


def test_sft_in_python_writes_the_same_as_its_command(sets: Path, tmp_path: Path) -> None:
    """The same files, and a model that loads, chats and stops."""
    assert main(["sft", str(run_file(sets, tmp_path, "sft", steps=2))]) == 0
    model = load_model(sets / "model")
    SFTTrainer(**quiet(model, tmp_path / "python", 2)).train(instructions(sets))
    for folder in (tmp_path / "sft" / "model", tmp_path / "python" / "model"):
        check_opens(folder, chats=True)
    names = [
        sorted(path.name for path in (tmp_path / run / "model").iterdir())
        for run in ("sft", "python")
    ]
    assert names[0] == names[1]


@pytest.mark.parametrize("build", [decoder, llama])
def test_ppo_in_python_saves_the_tokenizer(tmp_path: Path, build: Callable[[], nn.Module]) -> None:
    """Includes the byte tokenizer, which has no file."""
    PPOTrainer(
        policy_model=build(),
        reward_model=vowels,
        tokenizer=ByteTokenizer(),
        steps=1,
        batch_size=4,
        max_new_tokens=4,
        output_dir=tmp_path,
        progress=False,
    ).optimize(["hello", "a"])
    check_opens(tmp_path / "model", chats=False)
    _, tokenizer = open_with_transformers(tmp_path / "model")
    text = "every byte: \x00 é 漢 \n\t"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_dpo_with_adapters_saves_the_merged_model_and_the_adapter(
    sets: Path, tmp_path: Path
) -> None:
    """The caller's model is trained with the adapters in place."""
    adapted = add_lora(decoder(), LoraOptions(rank=2))
    DPOTrainer(**quiet(adapted, tmp_path, 2)).train(pairs(sets))
    check_opens(tmp_path / "model", chats=True)
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        expected, actual = adapted(tokens), load_model(tmp_path / "model")(tokens)
    # W + s·B·A rounds once more.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert adapted.adapters()


@pytest.mark.parametrize("build", [decoder, llama])
def test_a_reward_model_is_a_classifier_of_transformers(
    sets: Path, tmp_path: Path, build: Callable[[], nn.Module]
) -> None:
    """Equal scores, single and in a padded batch, also for texts with an end token."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    RewardTrainer(**quiet(build(), tmp_path, 3)).train(pairs(sets))
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    texts = ["Say red 0<|endoftext|>", "Say blue 1 and long<|endoftext|>", "a"]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    reward_model = RewardModel.load(tmp_path / "model")
    with torch.no_grad():
        actual = classifier(**batch).logits[:, 0]
        expected = reward_model(batch["input_ids"], batch["attention_mask"].sum(1))
        single = [classifier(**tokenizer(text, return_tensors="pt")).logits[0, 0] for text in texts]
    assert expected.std() > 1e-3
    # The two libraries sum in different orders.
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.stack(single), expected, rtol=1e-4, atol=1e-5)


def test_ppo_uses_the_tokenizer_and_end_tokens_of_its_policy(sets: Path, tmp_path: Path) -> None:
    """SFT, reward model and PPO given only folder names; reference answers reach the reward."""
    quiet = {"progress": False, "steps": 12, "checkpoint_every": 50, "learning_rate": 1e-2}
    assert main(["sft", str(run_file(sets, tmp_path, "sft", **quiet))]) == 0
    assert main(["reward", str(run_file(sets, tmp_path, "reward", **{**quiet, "steps": 2}))]) == 0
    prompts = [[{"role": "user", "content": f"copy red {n}"}] for n in range(4)]
    scored: list[Sample] = []

    def record(samples: Any) -> list[float]:
        scored.extend(samples)
        return [0.0] * len(samples)

    common: dict[str, Any] = {
        "policy_model": tmp_path / "sft" / "model",
        "kl_coeff": 0.2,
        "steps": 1,
        "epochs": 1,
        "batch_size": 64,
        "max_new_tokens": 64,
        "progress": False,
    }
    rewards = {"judge": str(tmp_path / "reward" / "model"), "look": record}
    trainer = PPOTrainer(reward_model=rewards, output_dir=tmp_path / "ppo", **common)
    trainer.optimize(prompts, ["red"] * 4)
    assert any(sample.stopped for sample in scored)
    assert all(sample.answer == "red" for sample in scored)
    _, tokenizer = open_with_transformers(tmp_path / "ppo" / "model")
    stopped = [sample for sample in scored if sample.stopped]
    assert all(sample.response_tokens[-1] == tokenizer.eos_token_id for sample in stopped)
    assert tokenizer.chat_template
    check_opens(tmp_path / "ppo" / "model", chats=True)


def test_a_special_token_works_as_a_stop_string(tmp_path: Path) -> None:
    """Decoded text never contains it; a longer string that includes it is rejected."""
    from ms_align.generation.stops import with_stops
    from ms_align.tokenizer_files import files_of

    bytes_ = ByteTokenizer()
    files = files_of("bytes", bytes_)
    sampling = Sampling(stop_strings=("<|endoftext|>", "\n"))
    resolved = with_stops(sampling, (), bytes_, files)
    assert (resolved.stop_token_ids, resolved.stop_strings) == ((256,), ("\n",))
    assert with_stops(Sampling(), None, bytes_, files).stop_token_ids == (256,)
    with pytest.raises(ConfigError, match="decoded text never contains the special token"):
        with_stops(Sampling(stop_strings=("a<|endoftext|>",)), (), bytes_, files)


def test_a_model_without_an_end_of_text_token_is_reported(caplog) -> None:
    """Otherwise all responses would silently run to max_new_tokens."""
    from ms_align.generation.stops import with_stops

    class NoEnd:
        """Tokenizer without an end of text."""

        def encode(self, text: str) -> list[int]:
            """Return one token per byte."""
            return list(text.encode())

        def decode(self, tokens: Sequence[int]) -> str:
            """Return the text of bytes."""
            return bytes(tokens).decode()

    assert with_stops(Sampling(), None, NoEnd(), None).stop_token_ids == ()
    assert "names an end-of-text token" in caplog.text
    caplog.clear()
    with_stops(Sampling(), (), NoEnd(), None)  # explicit, so no warning
    with_stops(Sampling(), None, ByteTokenizer(), None)
    assert not caplog.text


def test_answers_without_a_known_column_are_refused() -> None:
    """They must not be taken for prompts without an answer."""
    from ms_align.rollouts.prompts import read_prompts

    tokenizer = ByteTokenizer()
    for row in ({"answer": "4"}, {"response": "4"}):
        assert read_prompts(["2+2="], tokenizer, [row])[0].answer == "4"
    for row, message in (({"label": "4"}, "'label'"), ({}, "no columns")):
        with pytest.raises(
            DataError, match=f"entry 0 must have 'answer' or 'response', got {message}"
        ):
            read_prompts(["2+2="], tokenizer, [row])


def test_the_token_that_ends_a_turn_ends_generation(tmp_path: Path) -> None:
    """A template with its own end-of-turn token: generation stops at both tokens."""
    from ms_data import build

    document = json.loads(byte_tokenizer())
    end_of_turn = {**document["added_tokens"][0], "id": 257, "content": "<|im_end|>"}
    document["added_tokens"].append(end_of_turn)
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|im_end|>\n{% endfor %}"
    generation_prompt = "{% if add_generation_prompt %}<assistant>{% endif %}"
    (tmp_path / "chat.jinja").write_text(template + generation_prompt)
    rows = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]
        for n in range(40)
    ]
    (tmp_path / "chat.jsonl").write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in rows)
    )
    build(
        tmp_path / "chat.jsonl",
        tokenizer=tmp_path / "tokenizer.json",
        out=tmp_path / "chat",
        chat=tmp_path / "chat.jinja",
        held_out_fraction=0.1,
    )
    stream = InstructionStream(tmp_path / "chat", sequence_length=64, batch_size=2)
    SFTTrainer(**quiet(decoder(), tmp_path / "sft", 1)).train(stream)
    model, tokenizer = open_with_transformers(tmp_path / "sft" / "model")
    assert set(model.generation_config.eos_token_id) == {tokenizer.eos_token_id, 257}


@pytest.mark.parametrize("command", ["sft", "dpo", "reward", "ppo"])
def test_weights_that_are_not_finite_are_never_saved(
    sets: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tensor is named, even if no batch uses the NaN row."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(sets / "model", tmp_path / "start")
    weights = load_file(tmp_path / "start" / "model.safetensors")
    weights["model.embed_tokens.weight"][257, 3] = float("nan")
    save_file(weights, tmp_path / "start" / "model.safetensors", {"format": "pt"})
    if command == "ppo":
        (tmp_path / "p.jsonl").write_text('"hello"\n')
        run = tmp_path / "ppo.toml"
        run.write_text(
            f'model = "{tmp_path}/start"\ndataset = "{tmp_path}/p.jsonl"\ntokenizer = "bytes"\n'
            f'reward_model = "small_models:vowels"\noutput_dir = "{tmp_path}/ppo"\n'
        )
    else:
        run = run_file(sets, tmp_path, command, model=str(tmp_path / "start"), steps=1)
    assert main([command, str(run)]) == 2
    assert "'model.embed_tokens.weight'" in capsys.readouterr().err
    assert not (tmp_path / command / "model").exists()


def test_a_run_that_diverges_saves_no_model(sets: Path, tmp_path: Path) -> None:
    """Weights that become infinite are detected when the model is written."""
    model = decoder()

    def on_event(event_kind: str, fields: Any) -> None:
        if event_kind == "step":  # after the update
            with torch.no_grad():
                model.get_submodule("model.norm").weight[0] = float("inf")

    with pytest.raises(NonFiniteError, match=r"model\.norm\.weight"):
        SFTTrainer(**quiet(model, tmp_path, 1), on_event=on_event).train(instructions(sets))
    assert not (tmp_path / "model").exists()


def test_each_skipped_update_is_an_event(sets: Path, tmp_path: Path) -> None:
    """With its step and its reason."""
    model = decoder()
    skipped = []

    def on_event(kind: str, fields: Any) -> None:
        if kind == "skipped":
            skipped.append(dict(fields))
        if kind == "step" and fields["step"] == 1:
            with torch.no_grad():
                model.get_submodule("model.norm").weight[0] = float("inf")

    with pytest.raises(NonFiniteError, match="2 of 3 updates were skipped"):
        SFTTrainer(**quiet(model, tmp_path, 3), on_event=on_event).train(instructions(sets))
    assert skipped == [{"step": step, "reason": "nonfinite"} for step in (2, 3)]


def test_no_run_overwrites_a_model_or_another_run(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another command, another model, a model in the same folder: the error names the owner."""
    run = run_file(sets, tmp_path, "sft", steps=1)
    assert main(["sft", str(run)]) == 0
    model = tmp_path / "sft" / "model" / "model.safetensors"
    before = model.read_bytes()
    (tmp_path / "p.jsonl").write_text('"hello"\n')
    ppo = tmp_path / "ppo.toml"
    ppo.write_text(
        f'model = "{tmp_path}/sft/model"\ndataset = "{tmp_path}/p.jsonl"\n'
        f'reward_model = "small_models:vowels"\noutput_dir = "{tmp_path}/sft"\n'
        "steps = 1\nbatch_size = 2\nmax_new_tokens = 2\n"
    )
    assert main(["ppo", str(ppo)]) == 2
    assert "is in the output_dir" in capsys.readouterr().err
    assert main(["ppo", str(ppo), "--set", f"model={sets}/model", "--set", "tokenizer=bytes"]) == 2
    assert "belongs to a run of 'ms-align sft'" in (error := capsys.readouterr().err)
    assert "and this is 'ms-align ppo'" in error
    shutil.copytree(sets / "model", tmp_path / "other")
    assert main(["sft", str(run), "--set", f"model={tmp_path}/other"]) == 2
    assert "whose model was" in capsys.readouterr().err
    assert (
        main(["dpo", str(run_file(sets, tmp_path, "dpo", output_dir=str(tmp_path / "sft")))]) == 2
    )
    assert "belongs to a run of 'ms-align sft'" in capsys.readouterr().err
    assert model.read_bytes() == before
    shutil.copytree(sets / "model", tmp_path / "mine" / "model")
    assert main(["sft", str(run), "--set", f"output_dir={tmp_path}/mine"]) == 2
    assert "contains 'model' but no record" in capsys.readouterr().err


def test_a_resumed_run_reports_changed_settings(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new learning rate is reported; a new seed is rejected."""
    run = run_file(sets, tmp_path, "sft", steps=1, progress=True)
    assert main(["sft", str(run)]) == 0
    capsys.readouterr()
    assert main(["sft", str(run), "--set", "steps=2", "--set", "learning_rate=5e-4"]) == 0
    output = capsys.readouterr().out
    assert "changed: learning_rate is 0.0005, was 0.001" in output
    assert "changed: steps is 2, was 1" in output
    assert main(["sft", str(run), "--set", "steps=3", "--set", "seed=5"]) == 2
    assert "cannot resume with changed settings: seed is 5, was 0" in capsys.readouterr().err


def test_a_run_that_saved_nothing_does_not_block_its_folder(
    sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a failed first attempt, other settings can be used."""
    run = run_file(sets, tmp_path, "sft", steps=1)
    overrides = ["--set", "sequence_length=4", "--set", "seed=3"]
    assert main(["sft", str(run), *overrides]) == 2
    (tmp_path / "sft").mkdir(exist_ok=True)
    (tmp_path / "sft" / "events.jsonl").write_text("")
    assert main(["sft", str(run)]) == 0


def test_a_run_does_not_overwrite_the_models_it_reads(tmp_path: Path) -> None:
    """Neither the policy nor the reference."""
    from ms_align.models.folder import save_model

    save_model(decoder(), tmp_path / "out" / "model")
    settings: dict[str, Any] = {"reward_model": vowels, "tokenizer": ByteTokenizer(), "steps": 1}
    for name in ("policy_model", "reference_model", "value_model"):
        models = {"policy_model": decoder(), name: tmp_path / "out" / "model"}
        trainer = PPOTrainer(**models, **settings, output_dir=tmp_path / "out", progress=False)
        with pytest.raises(FolderError, match=f"{name} is .* would be overwritten"):
            trainer.optimize(["a"])
