"""Tiny models and data for the runs of the arrays."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from ms_data import build, train_tokenizer
from ms_parallel.models import architecture, build_model
from ms_parallel.weights import initialize, save_model

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "packages" / "ms-align" / "tests"))

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,  # two pipeline stages of two chunks each
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen3_moe": {**SIZES, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "deepseek_v3": {
        **{key: value for key, value in SIZES.items() if key != "head_dim"},
        **EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "gemma3_text": {**SIZES, "sliding_window": 8, "sliding_layers": [0]},
    "gpt_oss": {
        **SIZES,
        **EXPERTS,
        "num_local_experts": 4,
        "sliding_window": 8,
        "sliding_layers": [0],
    },
}
FEW_LAYERS = {"num_hidden_layers": 2}
"""Layers of models without pipeline chunks."""
VOCABULARY = 320
BYTES = 258


def write_inputs(folder: Path) -> Path:
    """Write all inputs; `@name` in `axes.VALUES` is a path in `folder`."""
    import transformers as t
    from instruction_sets import write_sets

    t.utils.logging.disable_progress_bar()
    write_sets(folder)
    texts = folder / "texts"
    texts.mkdir()
    for i in range(24):
        line = f"the number {i} comes after {i - 1} and before {i + 1}. "
        (texts / f"{i}.txt").write_text(line * 12)
    tokenizer = folder / "text_tokenizer.json"
    train_tokenizer(texts, vocab_size=VOCABULARY, out=tokenizer)
    build(texts, tokenizer=tokenizer, out=folder / "shards", held_out_fraction=0.2)
    prompts = [{"prompt": word * (1 + i % 3)} for i, word in enumerate(("ab", "cde", "fgh", "ij"))]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    torch.manual_seed(0)
    for name in ("llama", "qwen3_moe"):
        sizes = {**MODELS[name], **FEW_LAYERS}
        model = build_model(architecture(name, {**sizes, "vocab_size": BYTES}))
        initialize(model, seed=0)
        save_model(model, folder / name)  # type: ignore[arg-type]
        # Rows of 256 weights, the largest group of any scheme.
        wider = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
        model = build_model(architecture(name, {**sizes, **wider, "vocab_size": VOCABULARY}))
        initialize(model, seed=0)
        for prefix in ("", "pruned_"):
            save_model(model, folder / f"compress_{prefix}{name}")  # type: ignore[arg-type]
            shutil.copy(tokenizer, folder / f"compress_{prefix}{name}" / "tokenizer.json")
            for module in model.modules():
                if isinstance(module, torch.nn.Linear):
                    module.weight.data.reshape(-1, 4)[:, :2] = 0  # two of four
    sizes = {"vocab_size": BYTES, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    t.GPT2LMHeadModel(t.GPT2Config(**sizes, **ids)).save_pretrained(folder / "gpt2")
    olmo = t.Olmo2Config(**SIZES, vocab_size=VOCABULARY, pad_token_id=0, **ids)
    t.Olmo2ForCausalLM(olmo).save_pretrained(folder / "foreign")
    rows = torch.randint(0, BYTES, (16, 33), generator=torch.Generator().manual_seed(0))
    (folder / "tokens.json").write_text(json.dumps(rows.tolist()))
    return folder
