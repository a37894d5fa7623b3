"""The full pipeline at small scale, with commands only: from raw text to answers in each runtime.

Pre-training in two processes, SFT on conversations, a reward model, PPO, quantization-aware
training and export to three targets. After each step the model folder opens in transformers,
answers through its chat template, and stops at the end token.
"""

import json
import os
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from processes import run_command

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODULE = Path(__file__).parents[1] / "examples" / "road" / "module.py"
COLORS = {
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "blood": "red",
    "the sky": "blue",
    "the sun": "yellow",
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
END = "<|endoftext|>"
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
IMPORTS = ("ms_parallel.training.trainer", "ms_align.trainers.ppo", "ms_data", "transformers")
"""Modules that the fork server imports once for all commands; `nox -s road` starts new ones."""
MAX_ANSWER_TOKENS = 40
"""Token limit of an answer; the longest correct one has fewer than ten."""

TRAIN = """
model = "llama"
dataset = "shards"
steps = 60
sequence_length = 64
batch_size = 8
learning_rate = 3e-3
output_dir = "runs/base"
[model_config]
hidden_size = 64
intermediate_size = 160
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
[layout]
data = 2
"""
SFT = """
model = "runs/base/model"
dataset = "chats"
sequence_length = 64
batch_size = 8
steps = 120
learning_rate = 3e-3
output_dir = "runs/sft"
"""
REWARD = """
model = "runs/sft/model"
dataset = "pairs"
sequence_length = 64
batch_size = 16
steps = 40
learning_rate = 1e-3
output_dir = "runs/reward"
"""
PPO = """
policy_model = "runs/sft/model"
reward_model = "runs/reward/model"
dataset = "prompts.jsonl"
steps = 3
batch_size = 16
max_new_tokens = 16
kl_coeff = 0.2
output_dir = "runs/optimized"
"""
QAT = """
model = "runs/optimized/model"
dataset = "chats.jsonl"
scheme = "{scheme}"
output_dir = "deploy/{scheme}"
verify = {verify}
[tuning]
steps = 10
learning_rate = 1e-4
"""


def question(thing: str) -> str:
    """The user's question about a thing."""
    return f"What color is {thing}?"


def answer(thing: str) -> str:
    """The expected answer."""
    return f"{thing} is {COLORS[thing]}."


def write_lines(path: Path, rows: list[Any]) -> None:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chat(thing: str) -> list[dict[str, str]]:
    """The conversation up to the answer."""
    return [{"role": "user", "content": question(thing)}]


def run(workspace: Path, *arguments: str) -> str:
    """Run one of our commands in a forked process and return its output."""
    result = run_command(
        ["-m", *arguments], folder=workspace, environment=ENVIRONMENT, imports=IMPORTS
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout


def run_recorded(workspace: Path, *arguments: str, processes: int = 1) -> None:
    """Run a training command under `ms-profile run`, which must detect its steps."""
    output = workspace / "profiles" / arguments[1]
    launcher = ["--nproc-per-node", str(processes)] if processes > 1 else []
    script = ["--train-script", str(MODULE), "--output-dir", str(output), "--overwrite"]
    run(workspace, "ms_profile", "run", *script, *launcher, "--", *arguments)
    ranks = [json.loads(path.read_text()) for path in (output / "ranks").iterdir()]
    assert len(ranks) == processes
    assert all(rank["steps"] > 2 for rank in ranks), ranks


def settings(workspace: Path, name: str, text: str) -> str:
    """Write a run file and return its name."""
    (workspace / name).write_text(text)
    return name


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with texts, conversations, pairs, prompts, and a chat template."""
    workspace = tmp_path_factory.mktemp("road")
    things = random.Random(0).choices(list(COLORS), k=400)
    write_lines(
        workspace / "corpus.jsonl", [{"text": f"{question(t)} {answer(t)}"} for t in things]
    )
    replies = [{"role": "assistant", "content": answer(t)} for t in things]
    chats = [{"messages": [*chat(t), reply]} for t, reply in zip(things, replies, strict=True)]
    write_lines(workspace / "chats.jsonl", chats)
    pairs = [
        {"prompt": question(t), "chosen": answer(t), "rejected": f"{t} is {COLORS[w]}."}
        for t, w in pairwise(things[:80])
        if t != w
    ]
    write_lines(workspace / "pairs.jsonl", pairs)
    write_lines(workspace / "prompts.jsonl", [{"prompt": chat(t)} for t in COLORS])
    (workspace / "chat.jinja").write_text(TEMPLATE)
    return workspace


@pytest.fixture(scope="module")
def base(workspace: Path) -> Path:
    """Model pre-trained on the text by two processes."""
    run(
        workspace,
        "ms_data",
        "tokenizer",
        "corpus.jsonl",
        "--vocab-size=400",
        "--out=tokenizer.json",
    )
    shards = ("--tokenizer=tokenizer.json", "--out=shards")
    run(workspace, "ms_data", "build", "corpus.jsonl", *shards)
    run_recorded(
        workspace, "ms_parallel", "train", settings(workspace, "train.toml", TRAIN), processes=2
    )
    return workspace / "runs" / "base" / "model"


@pytest.fixture(scope="module")
def tuned(workspace: Path, base: Path) -> Path:
    """The model after SFT on conversations."""
    assert base.is_dir()
    template = ("--tokenizer=tokenizer.json", "--chat-template=chat.jinja")
    run(workspace, "ms_data", "build", "chats.jsonl", *template, "--out=chats")
    run_recorded(workspace, "ms_align", "sft", settings(workspace, "sft.toml", SFT))
    return workspace / "runs" / "sft" / "model"


@pytest.fixture(scope="module")
def reward_model(workspace: Path, tuned: Path) -> Path:
    """Reward model trained on the pairs."""
    assert tuned.is_dir()
    template = ("--tokenizer=tokenizer.json", "--chat-template=chat.jinja")
    run(workspace, "ms_data", "build", "pairs.jsonl", "--pairs", *template, "--out=pairs")
    run(workspace, "ms_align", "reward", settings(workspace, "reward.toml", REWARD))
    return workspace / "runs" / "reward" / "model"


@pytest.fixture(scope="module")
def optimized(workspace: Path, reward_model: Path) -> Path:
    """The tuned model after PPO with the reward model."""
    assert reward_model.is_dir()
    run_recorded(workspace, "ms_align", "ppo", settings(workspace, "ppo.toml", PPO))
    return workspace / "runs" / "optimized" / "model"


def quantized_export(workspace: Path, scheme: str, *, verify: bool) -> Path:
    """Run QAT on conversations and export the model for its runtime."""
    text = QAT.format(scheme=scheme, verify=str(verify).lower())
    run_recorded(workspace, "ms_compress", "qat", settings(workspace, f"{scheme}.toml", text))
    return workspace / "deploy" / scheme


def answers(folder: Path) -> dict[str, str]:
    """Answers generated by transformers through the folder's template, with end tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    responses = {}
    for thing in COLORS:
        prompt = tokenizer.apply_chat_template(
            chat(thing), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            output = model.generate(**prompt, max_new_tokens=MAX_ANSWER_TOKENS)
        responses[thing] = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    return responses


EXPECTED = {thing: answer(thing) + END for thing in COLORS}


def test_a_pretrained_model_continues_a_text_and_stops(base: Path) -> None:
    """It answers a question from its corpus and generates the end token."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    prompt = tokenizer(question("snow"), return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=MAX_ANSWER_TOKENS)
    assert output.shape[1] < prompt["input_ids"].shape[1] + MAX_ANSWER_TOKENS
    assert tokenizer.decode(output[0]).endswith(END)


def test_a_tuned_model_answers_through_its_template_and_stops(tuned: Path) -> None:
    """Every answer is correct and ends with the end token."""
    assert answers(tuned) == EXPECTED


def test_a_reward_model_prefers_correct_answers(reward_model: Path) -> None:
    """In transformers it scores correct answers above wrong ones."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(reward_model)
    model_class = transformers.AutoModelForSequenceClassification
    model = model_class.from_pretrained(reward_model).eval()

    def score(thing: str, response: str) -> float:
        turns = [*chat(thing), {"role": "assistant", "content": response}]
        row = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            return float(model(**row).logits)

    assert score("snow", answer("snow")) > score("snow", "snow is black.")
    assert score("coal", answer("coal")) > score("coal", "coal is white.")


def test_a_model_optimized_by_ppo_still_answers_and_stops(workspace: Path, optimized: Path) -> None:
    """Its answers are correct, and its rollouts ended with the end token."""
    assert answers(optimized) == EXPECTED
    events = (workspace / "runs" / "optimized" / "events.jsonl").read_text().splitlines()
    rollouts = [event for event in map(json.loads, events) if event.get("kind") == "rollout"]
    assert rollouts
    assert all(event["stopped"] > 0.9 for event in rollouts)


def test_a_compressed_tensors_folder_answers_in_transformers(
    workspace: Path, optimized: Path
) -> None:
    """The quantized model gives the answers of the float model."""
    assert optimized.is_dir()
    assert answers(quantized_export(workspace, "ct.int4_g32", verify=True)) == EXPECTED


def test_an_onnx_file_answers_in_onnxruntime(workspace: Path, optimized: Path) -> None:
    """Greedy decoding with its key-value inputs gives the answer and the end token."""
    onnxruntime = pytest.importorskip("onnxruntime")
    assert optimized.is_dir()
    folder = quantized_export(workspace, "ort.matmulnbits", verify=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    end_ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    for thing, expected in EXPECTED.items():
        ids = tokenizer.apply_chat_template(
            chat(thing), add_generation_prompt=True, return_tensors="np", return_dict=True
        )["input_ids"]
        tokens = greedy(session, ids, {end_ids} if isinstance(end_ids, int) else set(end_ids))
        assert tokenizer.decode(tokens) == expected


def greedy(session: Any, ids: Any, end_ids: set[int]) -> list[int]:
    """Decode one sequence greedily with a key-value cache; stop at an end token."""
    import numpy as np

    names = [node.name for node in session.get_inputs()]
    outputs = [node.name for node in session.get_outputs()]
    cache = {
        node.name: np.zeros([1, node.shape[1], 0, node.shape[3]], np.float32)
        for node in session.get_inputs()
        if node.name.startswith("past_key_values")
    }
    tokens: list[int] = []
    total = ids.shape[1]
    while len(tokens) < MAX_ANSWER_TOKENS and not (tokens and tokens[-1] in end_ids):
        feeds = {"input_ids": ids, "attention_mask": np.ones((1, total), np.int64), **cache}
        step_outputs = dict(
            zip(outputs, session.run(None, {n: feeds[n] for n in names}), strict=True)
        )
        tokens.append(int(step_outputs["logits"][0, -1].argmax()))
        cache = {n: step_outputs[n.replace("past_key_values", "present")] for n in cache}
        ids, total = np.array([[tokens[-1]]]), total + 1
    return tokens


def test_a_gguf_file_chats_in_llama_cpp(workspace: Path, optimized: Path) -> None:
    """llama.cpp's chat completion applies the file's template and stops at the end token."""
    llama_cpp = pytest.importorskip("llama_cpp")
    assert optimized.is_dir()
    folder = quantized_export(workspace, "gguf.q4_0", verify=True)
    llama = llama_cpp.Llama(model_path=str(folder / "model.gguf"), n_ctx=128, verbose=False)
    for thing in COLORS:
        completion = llama.create_chat_completion(
            chat(thing), temperature=0.0, max_tokens=MAX_ANSWER_TOKENS
        )
        (choice,) = completion["choices"]
        assert choice["message"]["content"].strip() == answer(thing)
        assert choice["finish_reason"] == "stop"


XL = """
from ms_parallel import DistributedTrainer

DistributedTrainer(
    model_arch="Transformer-XL",
    parallel_config={"tensor_parallel": 2, "data_parallel": 1},
    optimizer="AdamW",
    mixed_precision=True,
    model_config={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    sequence_length=32,
    batch_size=8,
    vocab_size=300,
    output_dir="runs/xl",
).train(dataset_path="corpus.jsonl", epochs=1)
"""
ALIGN = """
from ms_align import PPOTrainer

prompts = ["What color is snow?", "What color is coal?"]
responses = ["snow is white.", "coal is black."]
trainer = PPOTrainer(
    policy_model="runs/sft/model",
    reward_model="runs/reward/model",
    kl_coeff=0.2,
    steps=1,
    batch_size=4,
    max_new_tokens=12,
)
assert trainer.optimize(prompts, responses).finished
"""
STEPS = """
import torch

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(16):
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run_script(workspace: Path, name: str, text: str, *, processes: int = 1) -> None:
    """Run a user's script directly or under torchrun."""
    (workspace / name).write_text(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    words = [*(launcher if processes > 1 else ()), name]
    result = run_command(words, folder=workspace, environment=ENVIRONMENT, imports=IMPORTS)
    assert result.returncode == 0, result.stderr[-3000:]


def test_distributed_trainer_trains_a_transformer_xl_on_raw_text(workspace: Path) -> None:
    """`model_arch` accepts the paper's spelling; runs on two processes."""
    run_script(workspace, "xl.py", XL, processes=2)
    assert (workspace / "runs" / "xl" / "model" / "model.safetensors").is_file()


def test_ppo_trainer_accepts_folders(workspace: Path, reward_model: Path) -> None:
    """Policy and reward model by path, tokenizer from the policy's folder, given responses."""
    assert reward_model.is_dir()
    run_script(workspace, "align.py", ALIGN)
    assert answers(workspace / "runs" / "ppo" / "model").keys() == COLORS.keys()


def test_ms_profile_profiles_an_unmodified_script(workspace: Path) -> None:
    """It writes a page for the requested metrics."""
    (workspace / "steps.py").write_text(STEPS)
    metrics = "--metrics=communication_time,compute_time"
    paths = ("--train-script", "steps.py", "--output-dir", "./profile_results")
    run(workspace, "ms_profile", "run", *paths, metrics)
    run(workspace, "ms_profile", "report", "./profile_results")
    assert list((workspace / "profile_results").rglob("*.html"))
