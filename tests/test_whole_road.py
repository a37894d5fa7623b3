"""The whole road in small, by the commands alone: from raw text to an answer from each runtime.

Two processes pre-train on text; conversations tune the model; a reward model and PPO follow; it is
trained with rounded weights on conversations, and written for three targets. After each step the
folder opens in transformers, answers through its chat template, and stops by itself.
"""

import json
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

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
ROOM = 40
"""Tokens that an answer may have; the longest right one has fewer than ten."""

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
    """What a user asks."""
    return f"What color is {thing}?"


def answer(thing: str) -> str:
    """What the model is to say."""
    return f"{thing} is {COLORS[thing]}."


def write_lines(path: Path, rows: list[Any]) -> None:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def chat(thing: str) -> list[dict[str, str]]:
    """The conversation up to the answer."""
    return [{"role": "user", "content": question(thing)}]


def run(place: Path, *words: str, processes: int = 1) -> str:
    """Run a command of ours as a user does, and return what it printed."""
    command = [sys.executable, "-m", *words]
    if processes > 1:
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
        command = [sys.executable, "-m", *launcher, *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_recorded(place: Path, *words: str, processes: int = 1) -> None:
    """Run a training command under ms-profile's recorder, which must see its steps."""
    output = place / "profiles" / words[1]
    launcher = ["--nproc-per-node", str(processes)] if processes > 1 else []
    script = ["--train-script", str(MODULE), "--output-dir", str(output), "--overwrite"]
    run(place, "ms_profile", "run", *script, *launcher, "--", *words)
    ranks = [json.loads(path.read_text()) for path in (output / "ranks").iterdir()]
    assert len(ranks) == processes
    assert all(rank["steps"] > 2 for rank in ranks), ranks


def settings(place: Path, name: str, text: str) -> str:
    """Write a run file and return its name."""
    (place / name).write_text(text)
    return name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The raw material: texts, conversations, pairs, prompts, and a chat template."""
    place = tmp_path_factory.mktemp("road")
    things = random.Random(0).choices(list(COLORS), k=400)
    write_lines(place / "corpus.jsonl", [{"text": f"{question(t)} {answer(t)}"} for t in things])
    said = [{"role": "assistant", "content": answer(t)} for t in things]
    chats = [{"messages": [*chat(t), s]} for t, s in zip(things, said, strict=True)]
    write_lines(place / "chats.jsonl", chats)
    pairs = [
        {"prompt": question(t), "chosen": answer(t), "rejected": f"{t} is {COLORS[w]}."}
        for t, w in pairwise(things[:80])
        if t != w
    ]
    write_lines(place / "pairs.jsonl", pairs)
    write_lines(place / "prompts.jsonl", [{"prompt": chat(t)} for t in COLORS])
    (place / "chat.jinja").write_text(TEMPLATE)
    return place


@pytest.fixture(scope="module")
def base(place: Path) -> Path:
    """Text, tokenized and pre-trained on by two processes."""
    run(place, "ms_data", "tokenizer", "corpus.jsonl", "--vocab-size=400", "--out=tokenizer.json")
    shards = ("--tokenizer=tokenizer.json", "--out=shards")
    run(place, "ms_data", "build", "corpus.jsonl", *shards)
    run_recorded(place, "ms_parallel", "train", settings(place, "train.toml", TRAIN), processes=2)
    return place / "runs" / "base" / "model"


@pytest.fixture(scope="module")
def tuned(place: Path, base: Path) -> Path:
    """The model, tuned on conversations."""
    assert base.is_dir()
    template = ("--tokenizer=tokenizer.json", "--chat-template=chat.jinja")
    run(place, "ms_data", "build", "chats.jsonl", *template, "--out=chats")
    run_recorded(place, "ms_align", "sft", settings(place, "sft.toml", SFT))
    return place / "runs" / "sft" / "model"


@pytest.fixture(scope="module")
def judge(place: Path, tuned: Path) -> Path:
    """A reward model of pairs."""
    assert tuned.is_dir()
    template = ("--tokenizer=tokenizer.json", "--chat-template=chat.jinja")
    run(place, "ms_data", "build", "pairs.jsonl", "--pairs", *template, "--out=pairs")
    run(place, "ms_align", "reward", settings(place, "reward.toml", REWARD))
    return place / "runs" / "reward" / "model"


@pytest.fixture(scope="module")
def optimized(place: Path, judge: Path) -> Path:
    """The tuned model, optimized for the reward model by PPO."""
    assert judge.is_dir()
    run_recorded(place, "ms_align", "ppo", settings(place, "ppo.toml", PPO))
    return place / "runs" / "optimized" / "model"


def deployed(place: Path, scheme: str, *, verify: bool) -> Path:
    """The model, trained with rounded weights on conversations, and written for its runtime."""
    text = QAT.format(scheme=scheme, verify=str(verify).lower())
    run_recorded(place, "ms_compress", "qat", settings(place, f"{scheme}.toml", text))
    return place / "deploy" / scheme


def answers(folder: Path) -> dict[str, str]:
    """What transformers generates through the folder's template, up to its end or `ROOM`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    said = {}
    for thing in COLORS:
        prompt = tokenizer.apply_chat_template(
            chat(thing), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            out = model.generate(**prompt, max_new_tokens=ROOM)
        said[thing] = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :])
    return said


EXPECTED = {thing: answer(thing) + END for thing in COLORS}


def test_a_pretrained_model_continues_a_text_and_ends_it(base: Path) -> None:
    """It answers a question that stood in its corpus, and then gives the end of text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    prompt = tokenizer(question("snow"), return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=ROOM)
    assert out.shape[1] < prompt["input_ids"].shape[1] + ROOM
    assert tokenizer.decode(out[0]).endswith(END)


def test_a_tuned_model_answers_through_its_template_and_stops(tuned: Path) -> None:
    """Every question is answered rightly, and nothing follows the answer's end."""
    assert answers(tuned) == EXPECTED


def test_a_reward_model_prefers_what_is_right(judge: Path) -> None:
    """Its folder opens in transformers, which scores right answers above wrong ones."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(judge)
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(judge).eval()

    def score(thing: str, said: str) -> float:
        turns = [*chat(thing), {"role": "assistant", "content": said}]
        row = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            return float(model(**row).logits)

    assert score("snow", answer("snow")) > score("snow", "snow is black.")
    assert score("coal", answer("coal")) > score("coal", "coal is white.")


def test_a_model_optimized_by_ppo_still_answers_and_stops(place: Path, optimized: Path) -> None:
    """It opens as the tuned one does, and its rollouts ended by themselves."""
    assert answers(optimized) == EXPECTED
    events = (place / "runs" / "optimized" / "events.jsonl").read_text().splitlines()
    rollouts = [event for event in map(json.loads, events) if event.get("kind") == "rollout"]
    assert rollouts
    assert all(event["stopped"] > 0.9 for event in rollouts)


def test_compressed_tensors_answer_in_transformers(place: Path, optimized: Path) -> None:
    """The rounded model's folder opens and chats as the float one's does."""
    assert optimized.is_dir()
    assert answers(deployed(place, "ct.int4_g32", verify=True)) == EXPECTED


def test_an_onnx_file_answers_in_onnxruntime(place: Path, optimized: Path) -> None:
    """Greedy steps through its key-value inputs give the answer and the end of text."""
    onnxruntime = pytest.importorskip("onnxruntime")
    assert optimized.is_dir()
    folder = deployed(place, "ort.matmulnbits", verify=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    for thing, expected in EXPECTED.items():
        ids = tokenizer.apply_chat_template(
            chat(thing), add_generation_prompt=True, return_tensors="np", return_dict=True
        )["input_ids"]
        said = greedy(session, ids, {ends} if isinstance(ends, int) else set(ends))
        assert tokenizer.decode(said) == expected


def greedy(session: Any, ids: Any, ends: set[int]) -> list[int]:
    """Decode one row until an end token, or `ROOM` tokens, feeding each step's keys and values."""
    import numpy as np

    names = [each.name for each in session.get_inputs()]
    outputs = [each.name for each in session.get_outputs()]
    held = {
        each.name: np.zeros([1, each.shape[1], 0, each.shape[3]], np.float32)
        for each in session.get_inputs()
        if each.name.startswith("past_key_values")
    }
    said: list[int] = []
    total = ids.shape[1]
    while len(said) < ROOM and not (said and said[-1] in ends):
        fed = {"input_ids": ids, "attention_mask": np.ones((1, total), np.int64), **held}
        given = dict(zip(outputs, session.run(None, {n: fed[n] for n in names}), strict=True))
        said.append(int(given["logits"][0, -1].argmax()))
        held = {n: given[n.replace("past_key_values", "present")] for n in held}
        ids, total = np.array([[said[-1]]]), total + 1
    return said


def test_a_gguf_file_chats_in_llama_cpp(place: Path, optimized: Path) -> None:
    """llama.cpp's own chat completion applies the file's template, and stops by itself."""
    llama_cpp = pytest.importorskip("llama_cpp")
    assert optimized.is_dir()
    folder = deployed(place, "gguf.q4_0", verify=True)
    llama = llama_cpp.Llama(model_path=str(folder / "model.gguf"), n_ctx=128, verbose=False)
    for thing in COLORS:
        done = llama.create_chat_completion(chat(thing), temperature=0.0, max_tokens=ROOM)
        (choice,) = done["choices"]
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


def run_script(place: Path, name: str, text: str, *, processes: int = 1) -> None:
    """Run a user's script, alone or under torchrun."""
    (place / name).write_text(text)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else ()), name]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_trainers_face_trains_a_transformer_xl_on_raw_text(place: Path) -> None:
    """As ARCHITECTURE writes it, in the paper's spelling of the name, on two processes."""
    run_script(place, "xl.py", XL, processes=2)
    assert (place / "runs" / "xl" / "model" / "model.safetensors").is_file()


def test_the_face_of_ppo_takes_folders(place: Path, judge: Path) -> None:
    """Policy and reward model by path, the tokenizer from the policy's folder, known responses."""
    assert judge.is_dir()
    run_script(place, "align.py", ALIGN)
    assert answers(place / "runs" / "ppo" / "model").keys() == COLORS.keys()


def test_the_profilers_face_profiles_a_script_that_knows_nothing_of_it(place: Path) -> None:
    """A page is written for the metrics that were asked for."""
    (place / "steps.py").write_text(STEPS)
    metrics = "--metrics=communication_time,compute_time"
    places = ("--train-script", "steps.py", "--output-dir", "./profile_results")
    run(place, "ms_profile", "run", *places, metrics)
    run(place, "ms_profile", "report", "./profile_results")
    assert list((place / "profile_results").rglob("*.html"))
