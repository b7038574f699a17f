"""Stage 2: gradients reduced by the optimizer. Two ranks agree with DDP and the plain optimizer bit
for bit, since a sum of two terms has one order, and halving is exact."""

import resource

import device as devices
import pytest
import torch
import torch.distributed as dist
from dying import train_until_death
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

EXCHANGES = ["pairwise", "shared_memory"]


class Net(torch.nn.Module):
    """Tied weights, a module that is called twice, a parameter that rank 0 alone uses, and one that
    nobody does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(13, 17)
        self.twice = torch.nn.Linear(17, 17)
        self.sometimes = torch.nn.Linear(17, 17)
        self.never = torch.nn.Linear(5, 5)
        self.last = torch.nn.Linear(17, 13)
        self.tied = torch.nn.Linear(13, 17, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        x = self.twice(torch.tanh(self.twice(x)))
        if dist.get_rank() == 0:
            x = self.sometimes(x)
        return self.tied(self.last(torch.tanh(x)))


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 13, generator=generator)


def make(exchange="auto", optimizer=torch.optim.Adam, model=Net, **kwargs):
    net, plain = model(), DistributedDataParallel(model(), find_unused_parameters=True)
    kwargs = {"sharding": "element", "lr": 1e-2, **kwargs}
    zero = ZeroRedundancyOptimizer(
        net.parameters(), optimizer, stage=2, exchange=exchange, **kwargs
    )
    ours = ("sharding", "bucket_cap_mb", "share_parameters", "gradient_dtype")
    defaults = {k: v for k, v in kwargs.items() if k not in ours}
    return net, zero, plain, optimizer(plain.parameters(), **defaults)


def assert_same(net, plain):
    for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), f"{name} differs by {(ours - theirs).abs().max()}"


def iterate(net, zero, plain, optimizer, steps=8, reentrant=False):
    for step in range(steps):
        for model, optim in ((net, zero), (plain, optimizer)):
            optim.zero_grad()
            model(batch(step)).square().mean().backward()
            if optim is zero and not reentrant:  # there the end of the pass is not seen
                assert all(p.grad is None or p.grad.is_sharded for p in net.parameters())
            optim.step()
        assert_same(net, plain)


def equals_ddp(exchange, sharding, optimizer, bucket_cap_mb):
    iterate(*make(exchange, optimizer, sharding=sharding, bucket_cap_mb=bucket_cap_mb))


@pytest.mark.part(2)
@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("sharding", ["parameter", "element"])
def test_equals_ddp_with_the_plain_optimizer(exchange, sharding):
    for optimizer in (torch.optim.Adam, torch.optim.SGD):
        for cap in (None, 0, 1e-5, 1e-3):
            run_ranks(2, equals_ddp, exchange, sharding, optimizer, cap)


def close_to_ddp(exchange):
    net, zero, plain, optimizer = make(exchange)
    for step in range(8):
        for model, optim in ((net, zero), (plain, optimizer)):
            optim.zero_grad()
            model(batch(step)).square().mean().backward()
            optim.step()
    # DDP's ring sums four terms in another order.
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_more_ranks_than_cores(exchange):
    run_ranks(4, close_to_ddp, exchange)


def same_by_both_exchanges():
    results = []
    for exchange in EXCHANGES:
        net, zero, _, _ = make(exchange)
        for step in range(8):
            zero.zero_grad()
            net(batch(step)).square().mean().backward()
            zero.step()
        results.append([p.detach().clone() for p in net.parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.cpu("it is about exchanges of CPU tensors")
def test_exchanges_agree_to_the_bit():
    run_ranks(4, same_by_both_exchanges)


def accumulates(exchange):
    net, zero, plain, optimizer = make(exchange)
    for step in range(4):
        zero.zero_grad()
        with zero.no_sync():
            net(batch(3 * step)).square().mean().backward()
        assert type(net.first.weight.grad) is torch.Tensor
        net(batch(3 * step + 1)).square().mean().backward()
        assert net.first.weight.grad.is_sharded
        zero.step()
        optimizer.zero_grad()
        with plain.no_sync():
            plain(batch(3 * step)).square().mean().backward()
        plain(batch(3 * step + 1)).square().mean().backward()
        optimizer.step()
        assert_same(net, plain)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_no_sync_accumulates(exchange):
    run_ranks(2, accumulates, exchange)


def clips(exchange):
    net, zero, plain, optimizer = make(exchange, torch.optim.SGD)
    for step in range(3):
        zero.zero_grad()
        optimizer.zero_grad()
        net(batch(step)).square().mean().backward()
        plain(batch(step)).square().mean().backward()
        ours = zero.clip_grad_norm_(0.01)
        theirs = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        zero.step()
        optimizer.step()
    for mine, other in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)
    net(batch(0)).square().mean().mul(float("nan")).backward()
    with pytest.raises(RuntimeError, match="finite"):
        zero.clip_grad_norm_(1.0, error_if_nonfinite=True)
    zero.zero_grad()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_clip_grad_norm(exchange):
    run_ranks(2, clips, exchange)


def scales(exchange):
    net, zero, plain, optimizer = make(exchange)
    ours, theirs = (torch.amp.GradScaler(devices.NAME, init_scale=1024.0) for _ in range(2))
    for step in range(8):
        for model, optim, scaler in ((net, zero, ours), (plain, optimizer, theirs)):
            optim.zero_grad()
            loss = model(batch(step)).square().mean()
            if step == 3 and dist.get_rank() == 1:
                loss = loss * float("inf")  # on one rank
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optim)
            scaler.step(optim)
            scaler.update()
        assert ours.get_scale() == theirs.get_scale()
        assert_same(net, plain)
    assert ours.get_scale() == 512.0
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_grad_scaler_skips_on_every_rank_or_none(exchange):
    a, b = run_ranks(2, scales, exchange)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Checkpointed(Net):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        x = checkpoint(lambda t: torch.tanh(self.first(t)), x, use_reentrant=self.reentrant)
        return checkpoint(self.last, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Checkpointed):
    reentrant = True


def checkpoints(exchange, model):
    net, zero, _, _ = make(exchange, model=model)
    plain = DistributedDataParallel(Net())
    plain.module.forward = lambda x: plain.module.last(torch.tanh(plain.module.first(x)))
    used = [*plain.module.first.parameters(), *plain.module.last.parameters()]
    for p in plain.module.parameters():
        p.requires_grad_(any(p is q for q in used))
    plain = DistributedDataParallel(plain.module)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    iterate(net, zero, plain, optimizer, reentrant=model.reentrant)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("model", [Checkpointed, CheckpointedReentrant])
def test_activation_checkpointing(exchange, model):
    run_ranks(2, checkpoints, exchange, model)


def resumes(exchange, path):
    net, zero, plain, optimizer = make(exchange)
    iterate(net, zero, plain, optimizer, steps=3)
    state = zero.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        torch.save(state, path)
    dist.barrier()
    state = torch.load(path, weights_only=True)
    again = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.Adam, stage=2, sharding="parameter", lr=1.0
    )
    again.load_state_dict(state)
    del zero
    iterate(net, again, plain, optimizer, steps=3)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_state_goes_on_in_another_sharding(exchange, tmp_path):
    run_ranks(2, resumes, exchange, str(tmp_path / "state.pt"))


def uneven(exchange):
    net = torch.nn.Linear(13, 13)
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, stage=2, exchange=exchange, lr=1e-2
    )
    with Join([zero]):
        for step in range(3 + 2 * dist.get_rank()):
            zero.zero_grad()
            net(batch(step)).square().mean().backward()
            zero.step()
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_join(exchange):
    a, b = run_ranks(2, uneven, exchange)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def dies(exchange, where):
    net, zero, _, _ = make(exchange, bucket_cap_mb=1e-5)
    return train_until_death(net, zero, batch, (1,), where)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("where", ["backward", "update", "forward"])
def test_a_rank_that_is_killed_is_an_error_on_the_others(exchange, where):
    # A rank may wait for one that lives but has given up: that ends with the group's timeout.
    results = run_ranks(3, dies, exchange, where, timeout=15, lost=(1,))
    for rank in (0, 2):
        message, seconds = results[rank]
        assert "rank" in message and "(rank" in message, message
        assert seconds < 20
    if exchange == "shared_memory":
        assert "rank 1 (process" in results[0][0] and "has died" in results[0][0]


class Counting(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(13, 13)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def dies_before_it_sends_buffers():
    net = Counting()
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, stage=2, module=net, exchange="pairwise", lr=1e-2
    )
    return train_until_death(net, zero, batch, (1,), "buffers")


def test_a_rank_that_is_killed_before_it_sends_buffers_is_named():
    results = run_ranks(3, dies_before_it_sends_buffers, timeout=60, lost=(1,))
    for rank in (0, 2):
        message, seconds = results[rank]
        assert f"(rank {rank} of 3)" in message, message
        assert seconds < 20
    # A rank may lose the other survivor first.
    assert any("connection to rank 1" in results[rank][0] for rank in (0, 2)), results


def shares_parameters(sharding):
    net, zero, plain, optimizer = make(sharding=sharding, share_parameters=True)
    assert zero.engine.exchange == "shared_memory"
    iterate(net, zero, plain, optimizer)
    # Pages that both ranks have mapped count half.
    storage = net.last.weight.untyped_storage()
    with open("/proc/self/maps") as maps:
        mapped = [line.split() for line in maps if "memfd:shardstep" in line]
    spans = [[int(end, 16) for end in line[0].split("-")] for line in mapped]
    assert any(low <= storage.data_ptr() < high for low, high in spans)


@pytest.mark.cpu("it is about shared memory")
@pytest.mark.parametrize("sharding", ["parameter", "element"])
def test_one_copy_of_the_parameters_equals_ddp(sharding):
    run_ranks(2, shares_parameters, sharding)


class Layered(torch.nn.Module):
    """Blocks in a list; attention reads the weight of a module inside it that is never called."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = torch.nn.Parameter(torch.ones(16))
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
            for _ in range(3)
        )
        self.head = torch.nn.Linear(16, 13)
        self.embed = torch.nn.Linear(13, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).unsqueeze(0) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def overlaps_forward(exchange):
    net, plain = Layered(), DistributedDataParallel(Layered())
    zero = ZeroRedundancyOptimizer(
        net.parameters(),
        torch.optim.Adam,
        stage=2,
        sharding="element",
        exchange=exchange,
        bucket_cap_mb=0.001,
        overlap_forward=net,
        lr=1e-2,
    )
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for step in range(6):
        for model, optim in ((net, zero), (plain, optimizer)):
            optim.zero_grad()
            model(batch(step)).square().mean().backward()
            optim.step()
        if step % 2:
            zero.wait()
            assert_same(net, plain.module)
    for (name, ours), theirs in zip(
        net.state_dict().items(), plain.module.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    # The parameters have not arrived yet: the test would notice if nothing waited.
    traveller = torch.nn.Linear(500, 500, bias=False)
    zero = ZeroRedundancyOptimizer(
        traveller.parameters(),
        torch.optim.SGD,
        stage=2,
        sharding="element",
        exchange=exchange,
        overlap_forward=traveller,
        lr=1.0,
    )
    traveller(torch.ones(500)).sum().backward()
    weight = traveller.weight  # asked of the module later, it would be waited for
    old = weight.detach().clone()
    zero.step()
    if exchange == "shared_memory":
        others = -1 if dist.get_rank() == 0 else 0  # an element of the other rank's
        assert torch.equal(weight.flatten()[others], old.flatten()[others])
    traveller(torch.ones(500))
    assert not (traveller.weight == old).any()


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_parameters_arrive_inside_the_next_forward(exchange):
    run_ranks(2, overlaps_forward, exchange)


def runs_out_of_memory():
    # What memory files may grow to. Python ignores the signal that comes with it.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    net = torch.nn.Linear(1000, 1000)
    with pytest.raises(RuntimeError) as caught:
        ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, stage=2, exchange="shared_memory", lr=1.0
        )
    message = str(caught.value)
    assert "room for" in message and "bytes of shared memory" in message, message
    assert "pairwise" in message and "(rank" in message, message
    ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, stage=2, exchange="pairwise", lr=1.0)


@pytest.mark.cpu("it is about shared memory")
def test_too_little_memory_is_an_error_on_every_rank():
    run_ranks(3, runs_out_of_memory)


def refuses():
    net = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="stage"):
        ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, stage=3, lr=1.0)
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=1.0)
    with pytest.raises(ValueError, match="stage 2"):
        zero.clip_grad_norm_(1.0)
    with pytest.raises(ValueError, match="stage 2"), zero.no_sync():
        pass
    for option in ({"share_parameters": True}, {"overlap_forward": net}):
        with pytest.raises(ValueError, match="stage 2"):
            ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=1.0, **option)
    with pytest.raises(ValueError, match="bfloat16, float16 or int8"):
        ZeroRedundancyOptimizer(
            net.parameters(), torch.optim.SGD, lr=1.0, stage=2, gradient_dtype=torch.float32
        )
    with pytest.raises(ValueError, match="pairwise"):
        ZeroRedundancyOptimizer(
            net.parameters(),
            torch.optim.SGD,
            lr=1.0,
            stage=2,
            exchange="pairwise",
            share_parameters=True,
        )


def test_refuses_what_it_cannot_do():
    run_ranks(2, refuses)


def asks_for_a_foreign_gradient(exchange):
    net, zero, plain, optimizer = make(exchange)
    for model in (net, plain):
        model(batch(0)).square().mean().backward()
    with pytest.raises(ValueError, match=r"got another tensor on rank 1 \(rank"):
        if dist.get_rank() == 1:
            zero.full_gradient(torch.ones(2))
        zero.clip_grad_norm_(1.0)
    for optim in (zero, optimizer):
        optim.step()
    assert_same(net, plain)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_foreign_tensor_is_an_error_on_every_rank(exchange):
    run_ranks(2, asks_for_a_foreign_gradient, exchange)
