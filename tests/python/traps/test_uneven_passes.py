"""Stage 2: ranks that make different backward passes, forget them, or look at them at other times
than others. They end with the plain result, or with one error on every rank."""

import datetime
import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from helpers import on_ranks
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

REFUSED = "shardstep: expected the same synchronized backward passes and zero_grad"

exchanges = pytest.mark.parametrize("exchange", ["shared_memory", "pairwise", "native"])
# On native all ranks must make the same calls in one order, as with c10d's own collectives.
unordered = pytest.mark.parametrize("exchange", ["shared_memory", "pairwise"])


class Vectors(nn.Module):
    """The gradient of a batch x is x, in both parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(40, dtype=torch.float64))
        self.second = nn.Parameter(torch.zeros(24, dtype=torch.float64))

    def backward(self, value: float) -> None:
        (value * (self.first.sum() + self.second.sum())).backward()

    def check(self, value: float) -> None:
        for parameter in self.parameters():
            torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, value))


def trained(exchange: str) -> tuple[Vectors, ZeroRedundancyOptimizer, bool]:
    """A model, an optimizer that adds the gradient, and whether this is rank 0."""
    net = Vectors()
    options = {"stage": 2, "sharding": "element", "exchange": exchange, "bucket_cap_mb": 1e-4}
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, **options, lr=1.0)
    zero.param_groups[0]["lr"] = -1.0  # which a constructor refuses
    return net, zero, dist.get_rank() == 0


@unordered
@on_ranks(2, timeout=20)
def test_gradients_that_met_forgotten_ones_are_refused_everywhere(exchange):
    net, zero, is_first = trained(exchange)
    if is_first:  # the other's forward has thrown
        net.backward(7.0)
    zero.zero_grad()
    net.backward(2.0)
    with pytest.raises(RuntimeError, match=REFUSED):
        zero.step()
    zero.zero_grad()
    net.backward(2.0)
    zero.step()
    net.check(2.0)


@unordered
@on_ranks(2, timeout=20)
def test_zeros_of_a_rank_that_made_fewer_passes_are_gradients(exchange):
    net, zero, is_first = trained(exchange)
    zero.param_groups[0]["weight_decay"] = 0.5  # which only parameters with a gradient get
    torch.nn.init.ones_(net.first)
    torch.nn.init.ones_(net.second)
    if is_first:  # the other's forward has thrown
        net.backward(7.0)
    zero.zero_grad()
    (2.0 * (net.first if is_first else net.second).sum()).backward()
    zero.zero_grad(set_to_none=False)
    zero.step()
    net.check(1.5)


@unordered
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2, timeout=20)
def test_a_rank_without_a_batch_follows_zero_grad(exchange, set_to_none):
    net, zero, is_first = trained(exchange)
    if is_first:
        net.backward(7.0)
    zero.zero_grad(set_to_none)
    if is_first:
        net.backward(2.0)
    zero.step()
    net.check(1.0)


@unordered
@on_ranks(2, timeout=20)
def test_a_rank_with_fewer_passes_counts_as_zero(exchange):
    net, zero, is_first = trained(exchange)
    net.backward(2.0)
    if is_first:
        net.backward(4.0)
    zero.step()
    net.check(4.0)


@exchanges
@on_ranks(2, timeout=20)
def test_a_rank_that_only_steps_adds_nothing_old(exchange):
    net, zero, is_first = trained(exchange)
    net.backward(2.0)
    zero.step()
    if is_first:
        zero.zero_grad()
        net.backward(4.0)
    zero.step()
    net.check(4.0)


@exchanges
@on_ranks(2, timeout=20)
def test_reading_param_groups_brings_no_gradient_back(exchange):
    net, zero, _ = trained(exchange)
    for _ in range(2):
        net.zero_grad()
        assert zero.param_groups[0]["lr"] == -1.0  # as schedulers do
        net.backward(2.0)
        zero.step()
    net.check(4.0)


@exchanges
@on_ranks(2, timeout=20)
def test_reading_param_groups_shows_no_gradient_of_a_frozen_parameter(exchange):
    net, zero, is_first = trained(exchange)
    net.first.requires_grad_(False)
    if is_first:
        assert zero.param_groups[0]["lr"] == -1.0
    (2.0 * net.second.sum()).backward()
    zero.step()
    assert net.first.grad is None
    torch.testing.assert_close(net.second.detach(), torch.full_like(net.second, 2.0))


@exchanges
@on_ranks(2, timeout=20)
def test_a_rank_without_a_batch_clips_in_the_first_step(exchange):
    net, zero, is_first = trained(exchange)
    if is_first:
        net.backward(4.0)
    clip_grad_value_([p for group in zero.param_groups for p in group["params"]], 1.0)
    zero.step()
    net.check(1.0)


@unordered
@on_ranks(2, timeout=20)
def test_a_group_added_between_forgotten_passes_is_refused_everywhere(exchange):
    """Both ranks have forgotten one pass, and the group that was added took part in that of one."""
    net, zero, is_first = trained(exchange)
    if not is_first:
        net.backward(7.0)
    zero.zero_grad()
    late = nn.Parameter(torch.zeros(8, dtype=torch.float64))
    zero.add_param_group({"params": [late], "lr": -1.0})
    if is_first:
        (9.0 * (late.sum() + net.first.sum() + net.second.sum())).backward()
    zero.zero_grad()
    (2.0 * (late.sum() + net.first.sum() + net.second.sum())).backward()
    with pytest.raises(RuntimeError, match=REFUSED):
        zero.step()
    zero.zero_grad()
    (3.0 * (late.sum() + net.first.sum() + net.second.sum())).backward()
    zero.step()
    net.check(3.0)
    torch.testing.assert_close(late.detach(), torch.full_like(late, 3.0))


@unordered
@pytest.mark.parametrize("way", ["scaler", "norm", "value", "elements"])
@on_ranks(2, timeout=20)
def test_a_group_added_after_a_pass_of_others_alone(exchange, way):
    """The rank without a batch cannot know that the new parameter has no gradient yet."""
    net, zero, is_first = trained(exchange)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=way == "scaler")
    scaler.scale(torch.ones(()))  # of some loss
    if not is_first:
        net.backward(8.0 * scaler.get_scale())
    late = nn.Parameter(torch.ones(8, dtype=torch.float64))
    zero.add_param_group({"params": [late], "lr": 1.0})
    if way == "norm":
        clip_grad_norm_([p for group in zero.param_groups for p in group["params"]], 16.0)
    elif way == "value":
        clip_grad_value_([p for group in zero.param_groups for p in group["params"]], 2.0)
    elif way == "elements":
        for parameter in (p for group in zero.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad.div_(3.0)  # rounds otherwise than a factor
    scaler.step(zero)
    net.check({"scaler": 4.0, "norm": 2.0, "value": 2.0, "elements": 4.0 / 3.0}[way])
    torch.testing.assert_close(late.detach(), torch.ones_like(late))


@unordered
@on_ranks(2, timeout=20)
def test_looking_back_while_another_rank_went_on_is_refused_everywhere(exchange):
    net, zero, is_first = trained(exchange)
    net.backward(2.0)
    zero.clip_grad_norm_(1e6)
    zero.step()
    if is_first:
        net.backward(4.0)
    # The other rank cannot be told from one that looks at the gradients of its last step.
    with pytest.raises(RuntimeError, match=REFUSED):
        clip_grad_norm_(net.parameters(), 1e6)
    zero.zero_grad()
    net.backward(1.0)
    zero.step()
    net.check(3.0)


@exchanges
@pytest.mark.parametrize("first_by", ["ours", "torch"])
@on_ranks(2, timeout=20)
def test_a_gradient_that_was_dropped_counts_in_no_norm(exchange, first_by):
    net, zero, _ = trained(exchange)
    net.backward(2.0)
    if first_by == "ours":
        assert zero.clip_grad_norm_(1e6) == 16.0
    else:
        assert clip_grad_norm_(net.parameters(), 1e6) == 16.0
    net.second.grad = None
    torch.testing.assert_close(zero.clip_grad_norm_(1e6).double().item(), 2.0 * 40**0.5)
    assert clip_grad_norm_(net.parameters(), 1e6).item() == pytest.approx(2.0 * 40**0.5)


@unordered
@pytest.mark.parametrize("way", ["ours", "torch", "value"])
@on_ranks(2, timeout=20)
def test_clipping_again_after_a_pass_of_others_alone(exchange, way):
    """Ours asks again. Torch's has the norms it asked for, and a clip by value asks nothing."""
    net, zero, is_first = trained(exchange)

    def clip() -> None:
        if way == "ours":
            zero.clip_grad_norm_(1.0)
        elif way == "torch":
            clip_grad_norm_(net.parameters(), 1.0)
        else:
            clip_grad_value_(net.parameters(), 1.0)

    net.backward(2.0)
    clip()
    if is_first:
        net.backward(4.0)
    if way == "ours":
        clip()
        zero.step()
        return net.check(64**-0.5)
    with pytest.raises(RuntimeError, match="shardstep: expected the same changes"):
        clip()
        zero.step()
    zero.zero_grad()
    net.backward(3.0)
    zero.step()
    return net.check(3.0)


@unordered
@pytest.mark.parametrize("joins", [True, False])
@on_ranks(2, timeout=20)
def test_a_gradient_that_all_ranks_dropped_before_a_pass_of_some(exchange, joins):
    """The rank that makes no other pass has dropped it too, so it begins again on both."""
    net, zero, is_first = trained(exchange)
    net.backward(2.0)
    net.second.grad = None
    if joins:
        with Join([zero]):
            if not is_first:
                net.backward(6.0)
                zero.step()
    else:
        if not is_first:
            net.backward(6.0)
        zero.step()
    torch.testing.assert_close(net.first.detach(), torch.full_like(net.first, 5.0))
    torch.testing.assert_close(net.second.detach(), torch.full_like(net.second, 3.0))


@unordered
@pytest.mark.parametrize("set_to_none", [True, False])
@on_ranks(2, timeout=20)
def test_a_joined_rank_forgets_what_was_left_of_gradients_of_which_some_were_dropped(
    exchange, set_to_none
):
    net, zero, is_first = trained(exchange)
    net.backward(2.0)
    net.second.grad = None
    with Join([zero]):
        for value in () if is_first else (6.0, 4.0):
            zero.zero_grad(set_to_none)
            net.backward(value)
            zero.step()
    net.check(5.0)


@unordered
@on_ranks(2, timeout=20)
def test_a_joined_rank_repeats_zeros_of_gradients_that_it_has_forgotten(exchange):
    """Reading param_groups, as schedulers do, shows gradients that are forgotten."""
    net, zero, is_first = trained(exchange)
    net.backward(2.0)
    zero.zero_grad()
    with Join([zero]):
        for value in () if is_first else (6.0, 4.0):
            assert len(zero.param_groups) == 1
            net.zero_grad(set_to_none=False)
            net.backward(value)
            zero.step()
    net.check(5.0)


@unordered
@on_ranks(2, timeout=20)
def test_a_gradient_that_one_rank_dropped_before_its_pass_is_refused_everywhere(exchange):
    net, zero, is_first = trained(exchange)
    net.backward(2.0)
    if not is_first:
        net.second.grad = None
        net.backward(6.0)
    with pytest.raises(RuntimeError, match=REFUSED):
        zero.step()
    zero.zero_grad()
    net.backward(3.0)
    zero.step()
    net.check(3.0)


@unordered
@on_ranks(2, timeout=20)
def test_state_is_gathered_while_gradients_travel(exchange):
    net, zero, is_first = trained(exchange)
    zero.param_groups[0]["momentum"] = 0.5
    net.backward(2.0)
    zero.step()
    zero.zero_grad()
    if is_first:
        net.backward(4.0)
    state = zero.consolidate_state_dict(1)
    if not is_first:
        torch.testing.assert_close(
            state["state"][0]["momentum_buffer"], torch.full((40,), 2.0, dtype=torch.float64)
        )
    zero.step()
    net.check(5.0)


@exchanges
@on_ranks(2, timeout=20)
def test_join_with_gradients_left_over(exchange):
    net, zero, is_first = trained(exchange)
    if exchange != "native":  # where a rank that has joined would be a collective behind
        net.backward(9.0)
        zero.clip_grad_norm_(1e6)  # nobody steps with these
    with Join([zero]):
        for value in (2.0, 4.0) if is_first else ():
            zero.zero_grad()
            net.backward(value)
            zero.step()
    net.check(3.0)


@exchanges
@on_ranks(2, timeout=20)
def test_a_rank_zeroes_gradients_alone_after_join(exchange):
    """Torch's Join goes on asking who has inputs; a rank that has a stand-in to set to zero, where
    another has gradients of its own, must not answer alone."""
    net, zero, is_first = trained(exchange)
    with Join([zero]):
        for value in (2.0,) if is_first else ():
            net.backward(value)
            zero.step()
    with zero.no_sync():
        if is_first:
            net.backward(7.0)
        else:
            (7.0 * net.first.sum()).backward()
    net.zero_grad(set_to_none=False)
    zero.consolidate_state_dict()
    zero.zero_grad()
    net.backward(3.0)
    zero.step()
    net.check(4.0)


@exchanges
@on_ranks(2, timeout=20)
def test_gradients_are_zeroed_after_the_last_step_inside_join(exchange):
    net, zero, is_first = trained(exchange)
    with Join([zero]):
        for value in (2.0, 4.0) if is_first else (6.0,):
            net.backward(value)
            zero.step()
            net.zero_grad(set_to_none=False)
    net.check(6.0)


def abandons_a_pass(exchange, ranks):
    os.environ["SHARDSTEP_TEST_HOSTS"] = "a,b" if exchange == "hierarchical" else "a"
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    parameter = torch.nn.Parameter(torch.ones(3))
    zero = ZeroRedundancyOptimizer(
        [parameter], torch.optim.SGD, lr=1.0, stage=2, exchange=exchange, process_group=group
    )
    rank = dist.get_rank()
    time.sleep(0.5 * rank)  # the first has dropped its optimizer when the second sends
    if rank in ranks:
        parameter.sum().backward()
    del zero, parameter
    gc.collect()
    time.sleep(3.5)  # beyond the group's timeout, which a forgotten wait would reach
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    assert torch.equal(ones, torch.full((3,), 2.0))


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
@pytest.mark.parametrize("exchange", ["pairwise", "shared_memory", "hierarchical"])
def test_an_optimizer_that_is_dropped_after_a_pass_leaves_the_group_usable(exchange, ranks):
    run_ranks(2, abandons_a_pass, exchange, ranks)


@unordered
@pytest.mark.parametrize("forget_by_module", [False, True])
@on_ranks(2, timeout=20)
def test_a_rank_without_a_batch_steps_with_nothing_if_the_others_forgot_theirs(
    exchange, forget_by_module
):
    net, zero, is_first = trained(exchange)
    zero.param_groups[0]["weight_decay"] = 0.5
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(3.0)
    if not is_first:
        net.backward(7.0)
    net.zero_grad() if forget_by_module else zero.zero_grad()
    zero.step()
    net.check(3.0)


OWN_CLIPS = {
    "norm": lambda zero: zero.clip_grad_norm_(1.0),
    "norm of type 1": lambda zero: zero.clip_grad_norm_(1.0, norm_type=1.0),
    "value": lambda zero: zero.clip_grad_value_(1.0),
}


@unordered
@pytest.mark.parametrize("forgets", [True, False])
@pytest.mark.parametrize("clip", OWN_CLIPS)
@on_ranks(2, timeout=20)
def test_a_rank_without_a_batch_clips_again_with_the_others(exchange, forgets, clip):
    net, zero, is_first = trained(exchange)
    OWN_CLIPS[clip](zero)  # nothing yet, so that it has nothing to change
    if not is_first:
        net.backward(0.002)
    if forgets:
        net.zero_grad()
    OWN_CLIPS[clip](zero)
    dist.barrier()  # as a program that averages its losses would
    zero.step()
    net.check(0.0 if forgets else 0.001)


@unordered
@pytest.mark.parametrize("forget_by_module", [False, True])
@pytest.mark.parametrize("again", [False, True])
@on_ranks(2, timeout=20)
def test_a_rank_that_forgot_its_pass_finds_the_gradients_of_others(
    exchange, forget_by_module, again
):
    net, zero, is_first = trained(exchange)
    if not is_first or again:
        net.backward(7.0)
    net.zero_grad() if forget_by_module else zero.zero_grad()
    if is_first:  # after what the other rank has forgotten, if that was not a pass of both
        net.backward(0.002)
    parameters = zero.param_groups[0]["params"]
    if again:
        clip_grad_value_(parameters, 1.0)
    else:
        with pytest.raises(RuntimeError, match=REFUSED):
            clip_grad_value_(parameters, 1.0)
    dist.barrier()
    zero.step()
    net.check(0.001 if again else 0.0)


@exchanges
@on_ranks(2, timeout=20)
def test_a_parameter_that_was_frozen_from_the_start_is_shown_and_trained_later(exchange):
    net = Vectors()
    net.first.requires_grad_(False)
    options = {"stage": 2, "sharding": "element", "exchange": exchange}
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, **options, lr=1.0)
    net.first.requires_grad_(True)
    zero.param_groups[0]["lr"] = -1.0  # reading the groups shows gradients
    with zero.no_sync():
        net.backward(1.0)
    net.backward(2.0)
    zero.step()
    net.check(3.0)
