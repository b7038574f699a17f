"""Keys of a param group that are shardstep's own options are refused; others are kept."""

import pytest
import torch
from helpers import Twins, make_parameters, on_ranks
from shardstep import ZeroRedundancyOptimizer

OURS = {
    "stage": 2,
    "exchange": "native",
    "bucket_cap_mb": 1.0,
    "process_group": None,
    "parameters_as_bucket_view": True,
    "overlap_with_ddp": False,
    "share_parameters": True,
    "overlap_forward": None,
    "gradient_dtype": torch.bfloat16,
    "master_dtype": torch.float32,
    "elementwise": True,
}


@pytest.mark.parametrize("key", OURS)
@on_ranks(2)
def test_our_options_have_no_effect_in_a_group_and_are_refused(key):
    group = {"params": make_parameters(9, 7), key: OURS[key]}
    with pytest.raises(ValueError, match=f"got '{key}' in param group 0"):
        ZeroRedundancyOptimizer([group], torch.optim.AdamW, lr=0.1)


@on_ranks(2)
def test_an_added_group_is_refused_too_and_the_optimizer_goes_on():
    twins = Twins()
    group = {"params": make_parameters(4), "exchange": "native"}
    with pytest.raises(ValueError, match="'exchange' in param group 1"):
        twins.zero.add_param_group(group)
    twins.step(2)


@on_ranks(2)
def test_keys_of_frameworks_stay():
    groups = [{"count": 2, "name": "decay", "lr_scale": 0.5}, {"count": 2, "name": "no_decay"}]
    twins = Twins(groups=groups)
    twins.step(1)
    assert [group["name"] for group in twins.zero.param_groups] == ["decay", "no_decay"]
    assert twins.zero.param_groups[0]["lr_scale"] == 0.5
