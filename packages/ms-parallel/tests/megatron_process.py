"""Script for Megatron-Core's Python: save a small GPT model as `torch_dist`, and its logits.

    python megatron_process.py FOLDER

Megatron-Core needs a GPU to save. To run without one, the script replaces three functions in its
process: the number of the current GPU, its synchronization and the fork of its random state.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

SIZES = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 48,
}
VOCABULARY, PADDED = 40, 44


def main(folder: Path) -> None:
    """Write the checkpoint to `folder` and the logits next to it."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    cuda: Any = torch.cuda
    cuda.synchronize, cuda.current_device = lambda *_: None, lambda: "cpu"
    random.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
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
    ).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = float(parameter.ndim == 1)
            parameter.normal_(mean, 0.1, generator=generator)
    folder.mkdir()
    dist_checkpointing.save({**model.sharded_state_dict(), "iteration": 100}, str(folder))
    tokens = torch.randint(VOCABULARY, (2, 16), generator=generator)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model(tokens, torch.arange(16).expand(2, 16), mask)
    torch.save({"tokens": tokens, "logits": logits}, folder.with_suffix(".pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
