"""`shardstep convert run model.safetensors` writes weights that transformers loads."""

import shardstep
import torch
import torch.distributed as dist
from shardstep.__main__ import main


def test_transformers_loads_converted_weights(tmp_path):
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        model = GPT2LMHeadModel(config)  # its output layer is tied to its embedding
        optimizer = shardstep.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, stage=2, sharding="element", lr=1e-3
        )
        tokens = torch.randint(64, (2, 12))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.save_checkpoint(tmp_path / "run", module=model)
    finally:
        dist.destroy_process_group()
    folder = tmp_path / "model"
    folder.mkdir()
    assert main(["convert", str(tmp_path / "run"), str(folder / "model.safetensors")]) == 0
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(folder)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected, found = model.state_dict(), loaded.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
