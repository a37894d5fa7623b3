"""Router replay: updates route tokens to the experts that sampled them."""

import torch
from small_models import decoder

from ms_align import LocalGenerator, Sampling
from ms_parallel.models import record_experts

MIXTURE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [0],
    "num_hidden_layers": 3,
}


def test_a_generator_records_the_experts_of_prompts_and_responses() -> None:
    """They are those of a forward pass over the entire row; rows wait for one another."""
    model = decoder("qwen3_moe", **MIXTURE)
    prompts = [[5, 6, 7, 8, 9], [11], [20, 22, 24]]
    generator = LocalGenerator(model, max_num_seqs=4, records_experts=True)
    responses = generator(prompts, Sampling(max_new_tokens=6, stop_token_ids=range(60)), count=3)
    assert len(set(responses.lengths.tolist())) > 1
    recorded = responses.routed_experts
    assert recorded is not None
    for row in range(9):
        tokens = [*prompts[row // 3], *responses.row(row)][:-1]
        with torch.no_grad(), record_experts(model) as experts:
            model(torch.tensor([tokens]))
        assert recorded[row, : len(tokens)].tolist() == experts()[0].tolist()
        assert (recorded[row, len(tokens) :] == -1).all()
