"""Trains torchtitan's own Llama 3 on CPU with gloo, from and to its own checkpoints.

Runs in an environment of torchtitan: `python torchtitan_process.py FOLDER FIRST LAST STEPS`. Loads
`FOLDER/checkpoint/step-FIRST` unless FIRST is 0, trains to LAST, saves `step-LAST` and writes the
losses as JSON. Model, optimizer, schedule and checkpoint manager are torchtitan's.
"""

import json
import os
import sys

import torch
import torch.distributed as dist

VOCABULARY, DIM, HEADS, GROUPS, HIDDEN, LAYERS = 96, 32, 4, 2, 64, 2
LEARNING_RATE, WARMUP, MIN_LR_FACTOR = 3e-3, 3, 0.1
THETA = 5e5


def tokens_of(step: int) -> torch.Tensor:
    """Rows (4, 33) of a step, counted from 1; the last column is a target only."""
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(VOCABULARY, (4, 1), generator=generator)
    # A learnable sequence with noise.
    noise = torch.randint(2, (4, 33), generator=generator)
    return (start + 3 * torch.arange(33) + noise) % VOCABULARY


def main(folder: str, first: int, last: int, steps: int) -> None:
    """Train from one step to another."""
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    rope = ComplexRoPE.Config(dim=DIM // HEADS, max_seq_len=256, theta=THETA)
    config = llama3.Llama3Model.Config(
        dim=DIM,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=DIM, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=DIM, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=DIM,
            out_features=VOCABULARY,
            param_init=llama3._output_linear_init(DIM),
        ),
        layers=llama3._build_llama3_layers(
            n_layers=LAYERS,
            dim=DIM,
            n_heads=HEADS,
            n_kv_heads=GROUPS,
            hidden_dim=HIDDEN,
            rope=rope,
            attn_backend="varlen",
        ),
    )
    for layer in config.layers:  # varlen needs a GPU; rows are single documents, so causal is equal
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_states()

    class TrainState:
        """Step and tokens, which torchtitan's Trainer saves as `train_state`."""

        step, ntokens_seen = 0, 0

        def state_dict(self) -> dict:
            return {"step": self.step, "ntokens_seen": self.ntokens_seen}

        def load_state_dict(self, state: dict) -> None:
            self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    train_state = TrainState()
    optimizers = default_adamw(lr=LEARNING_RATE).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config(
        warmup_steps=WARMUP, decay_type="cosine", min_lr_factor=MIN_LR_FACTOR
    ).build(optimizers=optimizers, training_steps=steps)
    manager = CheckpointManager.Config(
        enable=True, interval=1, last_save_model_only=False, exclude_from_loading=["dataloader"]
    ).build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedule,
        states={"train_state": train_state},
        sd_adapter=None,
        base_folder=folder,
    )
    if first:
        assert manager.load(step=first)
        assert train_state.step == first, train_state.step
    losses = []
    for step in range(first + 1, last + 1):
        tokens = tokens_of(step)
        optimizers.zero_grad()
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        schedule.step()
        train_state.step, train_state.ntokens_seen = step, step * tokens[:, 1:].numel()
        losses.append(loss.item())
        if step == last or step == 10:
            manager.save(step)
    sys.stdout.write(f"{json.dumps(losses)}\n")


if __name__ == "__main__":
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    main(sys.argv[1], *map(int, sys.argv[2:]))
    dist.destroy_process_group()
