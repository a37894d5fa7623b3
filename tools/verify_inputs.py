"""Input files for `verify_device.py`: texts, conversations, run files and scripts."""

import json
from pathlib import Path

SETTINGS = """
model = "llama"
dataset = "corpus"
steps = 6
sequence_length = 64
batch_size = 8
learning_rate = 1e-3
vocab_size = 400
held_out_fraction = 0.1
log_every = 1
[model_config]
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2
"""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TUNING = """
model = "cpu/model"
dataset = "chats"
steps = 6
sequence_length = 64
batch_size = 8
learning_rate = 1e-3
log_every = 1
output_dir = "tuning"
"""
PPO = """
policy_model = "cpu-tuning/model"
dataset = "prompts.jsonl"
steps = 4
batch_size = 16
max_new_tokens = 8
output_dir = "ppo"
[reward_model]
digits = "rewards:digits"
"""
REWARD = """
def digits(samples):
    texts = [sample.response for sample in samples]
    return [sum(letter.isdigit() for letter in text) / max(len(text), 1) for text in texts]
"""
QUANTIZED = """
model = "cpu/model"
dataset = "cpu/shards"
scheme = "ct.int4_g32"
output_dir = "quantized"
verify = false
[tuning]
steps = 4
batch_size = 8
sequence_length = 64
"""
LAYERS = """
import torch

device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
model = torch.nn.Linear(256, 256).to(device)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(40):
    model(torch.ones(64, 256, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FILES = {
    "run.toml": SETTINGS,
    "chat.jinja": TEMPLATE,
    "tuning.toml": TUNING,
    "ppo.toml": PPO,
    "rewards.py": REWARD,
    "quantized.toml": QUANTIZED,
    "layers.py": LAYERS,
}


def write_inputs(folder: Path) -> None:
    """Write the corpus, conversations, prompts and run files into the shared work folder."""
    for n in range(200):
        text = f"The square of {n} is {n * n}, and its cube is {n**3}.\n" * 8
        (folder / "corpus" / f"{n:03d}.txt").write_text(text)
    chats, prompts = [], []
    for n in range(200):
        question = {"role": "user", "content": f"What is the square of {n}?"}
        answer = {"role": "assistant", "content": f"The square of {n} is {n * n}."}
        chats.append(json.dumps({"messages": [question, answer]}) + "\n")
        prompts.append(json.dumps({"prompt": [question]}) + "\n")
    (folder / "chats.jsonl").write_text("".join(chats))
    (folder / "prompts.jsonl").write_text("".join(prompts))
    for name, text in FILES.items():
        (folder / name).write_text(text)
