"""The update inside DDP's backward pass equals DDP with the same local optimizer, bit for bit."""

import gc
import itertools
import weakref

import device as devices
import pytest
import torch
import torch.distributed as dist
from helpers import (
    assert_bitwise,
    assert_same,
    assert_same_on_all_ranks,
    backward,
    batches,
    ddp_net,
    everywhere,
    gathered,
    heard,
    make_net,
    make_parameters,
    on_ranks,
    ours,
    train,
)
from implementation import (
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    zero_module,
)
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)

HOOKS = {"after": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
every_hook = pytest.mark.parametrize("hook", HOOKS)
every_sharding = pytest.mark.parametrize("sharding", ["parameter", "element"])


class Overlapped:
    """A model updated in its backward pass, beside one under DDP and the local optimizer."""

    def __init__(
        self,
        hook="after",
        optimizer_class=torch.optim.Adam,
        *,
        sharding="parameter",
        exchange="auto",
        shard_buckets=False,
        reduce=allreduce_hook,
        groups=None,
        unused=False,
        ddp=None,
        **defaults,
    ):
        self.ddp, self.reference = (ddp_net(unused=unused, **ddp or {}) for _ in range(2))
        groups = groups or (lambda parameters: parameters)
        defaults = {"lr": 0.05, **defaults}
        self.zero = ZeroRedundancyOptimizer(
            groups(list(self.ddp.parameters())),
            optimizer_class,
            overlap_with_ddp=True,
            sharding=sharding,
            exchange=exchange,
            **defaults,
        )
        self.local = optimizer_class(groups(list(self.reference.parameters())), **defaults)
        overlapping = HOOKS[hook](reduce, self.ddp, self.zero, shard_buckets=shard_buckets)
        self.ddp.register_comm_hook(None, overlapping)
        # Without a hook DDP multiplies by 1/3, with one it divides by 3.
        self.reference.register_comm_hook(None, reduce)

    def run(self, count, seed=0):
        """Trains both on this rank's batches; they agree when backward() has returned."""
        for number, batch in enumerate(batches(count, seed)):
            self.zero.zero_grad()
            loss = backward(self.ddp, batch)
            expected = train(self.reference, self.local, batch)
            try:
                assert torch.equal(loss, expected)
                self.check()
            except AssertionError as error:
                raise AssertionError(f"iteration {number}") from error

    def check(self):
        assert_bitwise(self.ddp.parameters(), self.reference.parameters())


@pytest.mark.part(6)
@ours
@every_hook
@every_sharding
@on_ranks(1, 2, 3, 4)
def test_parity_from_the_first_iteration(hook, sharding):
    """With every combination of DDP's options and of the hook's."""
    for view, static, shard in itertools.product([False, True], repeat=3):
        ddp = {"gradient_as_bucket_view": view, "static_graph": static}
        pair = Overlapped(hook, sharding=sharding, shard_buckets=shard, ddp=ddp)
        pair.run(4)
        assert_same_on_all_ranks(pair.ddp.parameters())


@pytest.mark.part(4)
@ours
@every_hook
@every_sharding
@on_ranks(2, 3)
def test_parity_on_the_backends_own_collectives(hook, sharding):
    """They want one order on every rank, whenever a rank's reductions happen to be done."""
    for view, static in itertools.product([False, True], repeat=2):
        ddp = {"gradient_as_bucket_view": view, "static_graph": static}
        pair = Overlapped(hook, sharding=sharding, exchange="native", ddp=ddp)
        pair.run(4)
        assert_same_on_all_ranks(pair.ddp.parameters())


@ours
@on_ranks(2)
def test_a_grad_scaler_is_refused():
    """The update came before it could unscale."""
    for hook, unscales in itertools.product(HOOKS, (False, True)):
        pair = Overlapped(hook)
        scaler = torch.amp.GradScaler(devices.NAME, init_scale=8.0)
        scaler.scale(pair.ddp(batches(1)[0]).sum()).backward()
        if unscales:
            scaler.unscale_(pair.zero)
        with pytest.raises(ValueError, match=r"updates inside the backward pass.*\(rank"):
            scaler.step(pair.zero)


@ours
@every_hook
@every_sharding
@on_ranks(2)
def test_any_optimizer(hook, sharding):
    for optimizer_class, defaults in [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"maximize": True}),
        (torch.optim.NAdam, {}),  # has no functional twin
        (torch.optim.RAdam, {}),
    ]:
        Overlapped(hook, optimizer_class, sharding=sharding, **defaults).run(4)


@pytest.mark.part(4)
@ours
@every_hook
@every_sharding
@on_ranks(2, 4)
def test_several_groups(hook, sharding):
    def groups(parameters):
        return [
            {"params": parameters[1:4], "lr": 0.01},
            {"params": [parameters[0], *parameters[4:]], "weight_decay": 0.1},
        ]

    pair = Overlapped(hook, torch.optim.AdamW, sharding=sharding, groups=groups)
    pair.run(3)
    # A scheduler's changes count from the next backward on.
    for optimizer in (pair.zero, pair.local):
        optimizer.param_groups[0]["lr"] = 0.1
    pair.run(3, seed=1)
    assert_same(everywhere(pair.zero), pair.local.state_dict())


@ours
@every_hook
@every_sharding
@on_ranks(2)
def test_frozen_and_unfrozen_between_iterations(hook, sharding):
    pair = Overlapped(hook, sharding=sharding, ddp={"find_unused_parameters": True})
    for number, frozen in enumerate([set(), {0}, {0, 3}, {3}, set(), {1, 2}, set()]):
        for model in (pair.ddp, pair.reference):
            for index, parameter in enumerate(model.parameters()):
                parameter.requires_grad_(index not in frozen)
        before = [p.detach().clone() for p in pair.ddp.parameters()]
        pair.run(1, seed=number)
        for index, parameter in enumerate(pair.ddp.parameters()):
            assert torch.equal(parameter, before[index]) == (index in frozen)


@pytest.mark.part(4)
@ours
@every_hook
@every_sharding
@on_ranks(2, 4)
def test_a_parameter_that_no_rank_uses(hook, sharding):
    options = {"find_unused_parameters": True}
    pair = Overlapped(
        hook, torch.optim.AdamW, sharding=sharding, unused=True, ddp=options, weight_decay=0.5
    )
    pair.run(4)
    untouched = make_net(unused=True).unused.parameters()
    assert_bitwise(pair.ddp.module.unused.parameters(), untouched)
    assert list(everywhere(pair.zero)["state"]) == [0, 1, 2, 3, 4, 5]


@ours
@every_hook
@every_sharding
@on_ranks(2)
def test_a_parameter_that_one_rank_uses(hook, sharding):
    """Its gradient is the others' zeros averaged with that rank's; everyone updates it."""
    options = {"find_unused_parameters": True}
    pair = Overlapped(hook, sharding=sharding, unused=True, ddp=options)
    with_unused = dist.get_rank() == 1
    for number in range(3):
        for model, optimizer in ((pair.ddp, pair.zero), (pair.reference, pair.local)):
            optimizer.zero_grad()
            net = model.module
            net.forward = (
                (lambda x, net=net: net.layers(x).sum() + net.unused(x[:, :4]).square().sum())
                if with_unused
                else net.layers
            )
            model(batches(1, seed=number)[0]).sum().backward()
        pair.local.step()
        pair.check()
    start = make_net(unused=True).unused.weight
    assert not torch.equal(pair.ddp.module.unused.weight, start)


@ours
@every_hook
@every_sharding
@on_ranks(2)
def test_add_param_group(hook, sharding):
    """A part of the model is added later; until then nothing updates it."""

    def first_two(parameters):
        return [{"params": parameters[:2]}]

    pair = Overlapped(hook, sharding=sharding, groups=first_two)
    pair.run(3)
    start = list(make_net().parameters())
    assert_bitwise(list(pair.ddp.parameters())[2:], start[2:])
    for model, optimizer in ((pair.ddp, pair.zero), (pair.reference, pair.local)):
        optimizer.zero_grad()
        parameters = list(model.parameters())[2:]
        optimizer.add_param_group({"params": parameters, "lr": 0.02})
        for parameter in parameters:  # the optimizers did not know of them, so did not clear them
            parameter.grad = None
    pair.run(4, seed=1)
    assert_same(everywhere(pair.zero), pair.local.state_dict())


@ours
@every_hook
@every_sharding
@on_ranks(2)
def test_state_is_saved_and_goes_on(hook, sharding):
    pair = Overlapped(hook, sharding=sharding)
    # Also before the first iteration.
    assert_same(everywhere(pair.zero), pair.local.state_dict())
    pair.run(3)
    state = everywhere(pair.zero)
    assert_same(state, pair.local.state_dict())
    again = Overlapped(hook, sharding=sharding)
    for model in (again.ddp, again.reference):
        model.load_state_dict(pair.ddp.state_dict())
    again.zero.load_state_dict(state)
    again.local.load_state_dict(everywhere(pair.zero))
    again.run(3, seed=1)


@ours
@every_hook
@on_ranks(2)
def test_the_given_hook_reduces(hook):
    """fp16 compression: other gradients, the same parity."""
    Overlapped(hook, torch.optim.SGD, reduce=fp16_compress_hook).run(4)


@ours
@every_hook
@on_ranks(2, 4)
def test_a_group_other_than_the_default(hook):
    members = [1, 0] if dist.get_world_size() == 2 else [1, 3]
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    model, reference = (ddp_net(process_group=group) for _ in range(2))
    zero = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, group, overlap_with_ddp=True, lr=0.05
    )
    local = torch.optim.Adam(reference.parameters(), lr=0.05)
    model.register_comm_hook(group, HOOKS[hook](allreduce_hook, model, zero))
    for batch in batches(3):
        zero.zero_grad()
        backward(model, batch)
        train(reference, local, batch)
        assert_bitwise(model.parameters(), reference.parameters())


@ours
@every_hook
@on_ranks(2)
def test_accumulating_without_sync(hook):
    pair = Overlapped(hook)
    for first, second in zip(batches(3), batches(3, seed=1), strict=True):
        for model, optimizer in ((pair.ddp, pair.zero), (pair.reference, pair.local)):
            optimizer.zero_grad()
            before = [p.detach().clone() for p in model.parameters()]
            with model.no_sync():
                backward(model, first)
            assert_bitwise(model.parameters(), before)
            backward(model, second)
        pair.local.step()
        pair.check()


@ours
@every_hook
@on_ranks(2)
def test_iterations_without_backward(hook):
    """Evaluating between iterations changes nothing."""
    pair = Overlapped(hook)
    pair.run(2)
    for model in (pair.ddp, pair.reference):
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 5))
        model.train()
    pair.run(2, seed=1)


@ours
@every_hook
@every_sharding
@on_ranks(2, timeout=30)
def test_an_exception_in_backward_leaves_it_usable(hook, sharding):
    pair = Overlapped(hook, sharding=sharding)
    pair.run(2)

    def fail(_gradient):
        raise RuntimeError("not today")

    for model, optimizer in ((pair.ddp, pair.zero), (pair.reference, pair.local)):
        optimizer.zero_grad()
        output = model(torch.ones(2, 5))
        output.register_hook(fail)  # before any bucket is ready
        with pytest.raises(RuntimeError, match="not today"):
            output.sum().backward()
        optimizer.zero_grad()
    pair.check()
    pair.run(2, seed=1)


@every_hook
@on_ranks(2)
def test_an_optimizer_without_overlap_is_refused(hook):
    ddp = ddp_net()
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="overlap_with_ddp"):
        HOOKS[hook](allreduce_hook, ddp, zero)


@on_ranks(2)
def test_step_warns_and_does_nothing():
    parameters = make_parameters(9, 7)
    zero = ZeroRedundancyOptimizer(parameters, torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with heard() as texts:
        assert zero.step() is None
        assert zero.step(closure=lambda: 1.0) is None
    assert any("step()" in text for text in texts), texts
    assert_bitwise(parameters, make_parameters(9, 7))


@ours
@every_hook
@on_ranks(2)
def test_what_the_hook_knows_of_ddps_buckets(hook):
    pair = Overlapped(hook, ddp={"gradient_as_bucket_view": True})
    zero, info = pair.zero, pair.zero._overlap_info
    assert info.status == zero_module._OverlapStatus.UNINITIALIZED
    assert info.params_per_bucket == []
    pair.run(3)
    assert info.status == zero_module._OverlapStatus.INITIALIZED
    parameters = list(pair.ddp.parameters())
    assert len(info.params_per_bucket) > 1
    seen = [p for bucket in info.params_per_bucket for p in bucket]
    assert {id(p) for p in seen} == {id(p) for p in parameters}
    assert len(seen) == len(parameters)
    assert info.total_size == sum(p.numel() for p in parameters)
    assert info.shard_buckets is False
    assert info.broadcast_handles == []
    # Whoever owns a parameter updates it, and every rank says the same.
    assert len(info.assigned_ranks_per_bucket) == len(info.params_per_bucket)
    for index, bucket in enumerate(info.params_per_bucket):
        owners = {zero._param_to_rank[p] for p in bucket}
        assert info.assigned_ranks_per_bucket[index] == owners
        assert zero._get_assigned_rank(index) in owners
    for rank, assignments in enumerate(zero._bucket_assignments_per_rank):
        assigned = [p for index in sorted(assignments) for p in assignments[index].parameters]
        assert [id(p) for p in assigned] == [id(p) for p in info.params_per_rank[rank]]
        assert all(zero._param_to_rank[p] == rank for p in assigned)
        for index, assignment in assignments.items():
            assert isinstance(assignment, zero_module._DDPBucketAssignment)
            assert assignment.bucket_index == index
            assert assignment.device == devices.current()
            first = info.params_per_bucket[index][assignment.offset]
            assert first is assignment.parameters[0]
    mine = info.params_per_rank[zero.rank]
    for index, offset in info.offsets.items():
        assert any(mine[offset] is p for p in info.params_per_bucket[index])
    assert set(info.offsets) == set(zero._bucket_assignments_per_rank[zero.rank])
    numbers = [
        [len(r) for r in info.params_per_rank],
        sorted(map(sorted, info.assigned_ranks_per_bucket)),
    ]
    assert gathered(numbers) == [numbers] * 2


@ours
@every_hook
@on_ranks(2)
def test_status_after_the_first_bucket(hook):
    statuses = []

    def watching(state, bucket):
        statuses.append(pair.zero._overlap_info.status)
        return allreduce_hook(state, bucket)

    # With this option DDP has several buckets from the start.
    pair = Overlapped(hook, reduce=watching, ddp={"find_unused_parameters": True})
    backward(pair.ddp, batches(1)[0])
    assert len(statuses) > 1
    assert statuses[0] == zero_module._OverlapStatus.UNINITIALIZED
    assert set(statuses[1:]) == {zero_module._OverlapStatus.INITIALIZED}


@ours
@on_ranks(2)
def test_it_works_in_every_order_of_buckets():
    """Rank 1's reductions end in an order of their own."""
    pair = Overlapped("interleaved", ddp={"bucket_cap_mb": 1e-5})
    pair.run(5)
    assert len(pair.zero._overlap_info.params_per_bucket) >= 3


@ours
@every_hook
@on_ranks(2, timeout=30)
def test_the_model_and_the_hook_can_be_dropped(hook):
    """Nothing keeps them alive, and ranks continue with the next."""
    for _ in range(3):
        pair = Overlapped(hook)
        pair.run(2)
        del pair
    dist.barrier()


@ours
@on_ranks(2)
def test_what_is_under_way_outlives_the_optimizer():
    zero = ZeroRedundancyOptimizer(
        make_parameters(9, 7), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    pending = zero.engine.after_partial_step([(0, torch.ones(9)), (1, torch.ones(7))], 0)
    engine = weakref.ref(zero.engine)
    del zero
    gc.collect()
    assert engine() is not None
    pending.wait()
    del pending
    assert engine() is None
