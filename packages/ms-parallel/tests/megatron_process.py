"""Trains a small GPT model with Megatron-Core on a CPU, and saves it as `torch_dist`.

    python megatron_process.py FOLDER

Runs in an environment of Megatron-Core. For each format, it trains 20 steps, saves
`FOLDER/FORMAT/iter_0000020` with logits in `FOLDER/FORMAT/logits.pt`, trains 20 more steps and
writes the losses of all 40 to `FOLDER/FORMAT/losses.json`. Formats:

- `plain`: Adam without the distributed optimizer, with stacked layers
- `fully_reshardable`: the distributed optimizer with `--dist-ckpt-optim-fully-reshardable`, and
  separate layers and projections, as Megatron-LM saves them since 0.14
- `dp_reshardable`: the default of the distributed optimizer

Model, optimizers and checkpoints are Megatron's. It needs a GPU, so the script replaces functions
in its process: the number of the current GPU, its synchronization and the fork of its random state;
and torch sees tensors of the CPU where Megatron asks for a GPU's.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
}
VOCABULARY, PADDED = 40, 44
LEARNING_RATE, BETAS, WEIGHT_DECAY = 3e-3, (0.9, 0.95), 0.1
STEPS = 20
FORMATS = ("fully_reshardable", "plain", "dp_reshardable")


def tokens_of(step: int) -> torch.Tensor:
    """Rows (4, 17) of a step, counted from 1; the last column is a target only."""
    generator = torch.Generator().manual_seed(1000 + step)
    start = torch.randint(VOCABULARY, (4, 1), generator=generator)
    # A learnable sequence with noise.
    noise = torch.randint(2, (4, 17), generator=generator)
    return (start + 3 * torch.arange(17) + noise) % VOCABULARY


class OnCpu(TorchFunctionMode):
    """Creates tensors on the CPU, which look like a GPU's to checks of their type."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function of torch with another device."""
        options = dict(kwargs or {})
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **options)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def main(folder: Path) -> None:
    """Train and save in each format."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    cuda: Any = torch.cuda
    cuda.synchronize, cuda.current_device = lambda *_: None, lambda: "cpu"
    random.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    for saved_format in FORMATS:
        (folder / saved_format).mkdir()
        with OnCpu():
            run(folder / saved_format, saved_format)


def run(folder: Path, saved_format: str) -> None:
    """Train and save in one format."""
    from megatron.core import dist_checkpointing
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        **SIZES,
        use_cpu_initialization=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=PADDED,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = float(parameter.ndim == 1)
            parameter.normal_(mean, 0.1, generator=generator)
    distributed = saved_format != "plain"
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
    wrapped = DistributedDataParallel(config, ddp, model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        clip_grad=0.0,
        use_distributed_optimizer=distributed,
    )
    # The chain of optimizers has one member.
    (optimizer,) = get_megatron_optimizer(settings, [wrapped]).chained_optimizers
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    positions = torch.arange(16).expand(4, 16)

    def train(first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last + 1):
            tokens = tokens_of(step)
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            logits = wrapped(tokens[:, :-1], positions, mask)[..., :VOCABULARY]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            wrapped.finish_grad_sync()
            optimizer.step()
            losses.append(loss.item())
        return losses

    losses = train(1, STEPS)
    metadata: dict[str, Any] = {}
    if distributed:
        metadata = {
            "distrib_optim_sharding_type": saved_format,
            "distrib_optim_fully_reshardable_mem_efficient": True,  # gathers with gloo
            "singleton_local_shards": True,
        }
    weights = model.sharded_state_dict(metadata=metadata)
    states = optimizer.sharded_state_dict(weights, metadata=metadata)
    checkpoint = folder / f"iter_{STEPS:07d}"
    checkpoint.mkdir()
    saved = {**weights, "optimizer": states, "iteration": STEPS}
    dist_checkpointing.save(saved, str(checkpoint))
    tokens = tokens_of(1)[:, :-1]
    with torch.no_grad():
        logits = model(tokens, positions, mask)
    torch.save({"tokens": tokens, "logits": logits}, folder / "logits.pt")
    losses += train(STEPS + 1, 2 * STEPS)
    (folder / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
