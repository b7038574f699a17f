"""gradient_dtype: gradients that travel narrower than they are. In 8 bits, blocks of 256 elements
have one scale each, and an element is off by at most 1/254 of the largest of its block."""

import device as devices
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from test_hosts import place, ranks_by_host
from test_stage2 import EXCHANGES, batch, make


def narrow_gradients(exchange, dtype):
    net, zero, plain, optimizer = make(exchange, torch.optim.SGD, gradient_dtype=dtype)
    for step in range(5):
        for model, optim in ((net, zero), (plain, optimizer)):
            optim.zero_grad()
            model(batch(step)).square().mean().backward()
            optim.step()
    # Each gradient is off by half a unit in the last place of the narrow type at most, relative
    # 2^-9 for bfloat16 and 2^-12 for float16 (and as much of the smallest normal number), and
    # moves its parameter by lr times that; 5 steps, with room for what that changes in turn.
    relative = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[dtype]
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5 * 1e-2 * relative * 4)
    assert any(
        not torch.equal(a, b) for a, b in zip(net.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_gradients_travel_at_half_the_width(exchange, dtype):
    run_ranks(2, narrow_gradients, exchange, dtype)


def bytes_sent(gradient_dtype):
    net = torch.nn.Linear(64, 64, bias=False)
    zero = ZeroRedundancyOptimizer(
        net.parameters(),
        torch.optim.SGD,
        stage=2,
        sharding="element",
        exchange="pairwise",
        gradient_dtype=gradient_dtype,
        lr=1.0,
    )
    net(torch.ones(64)).sum().backward()
    zero.step()
    return zero.engine.traffic.bytes_sent


@pytest.mark.cpu("it is about exchanges of CPU tensors")
def test_narrow_gradients_are_fewer_bytes():
    numel = 64 * 64 // 2  # that a rank sends
    wide = run_ranks(2, bytes_sent, None)
    half = run_ranks(2, bytes_sent, torch.bfloat16)
    quarter = run_ranks(2, bytes_sent, torch.int8)
    assert [w - n for w, n in zip(wide, half, strict=True)] == [numel * 2] * 2
    assert [w - n for w, n in zip(wide, quarter, strict=True)] == [numel * 3 - numel // 256 * 4] * 2


def clips_rounded_doubles(exchange):
    parameter = torch.nn.Parameter(torch.ones(1000, dtype=torch.float64))
    zero = ZeroRedundancyOptimizer(
        [parameter],
        torch.optim.SGD,
        lr=1.0,
        stage=2,
        exchange=exchange,
        gradient_dtype=torch.bfloat16,
    )
    for _ in range(3):
        zero.zero_grad()
        (parameter * (dist.get_rank() + 1)).sum().backward()  # 1.5 on average, after rounding too
        assert zero.clip_grad_norm_(1e6) == pytest.approx(1.5 * 1000**0.5)
        zero.step()
    assert torch.equal(parameter, torch.full_like(parameter, 1 - 3 * 1.5))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_norms_that_come_with_the_sums_leave_them_alone(exchange):
    run_ranks(2, clips_rounded_doubles, exchange)


def through_blocks(gradient: torch.Tensor) -> torch.Tensor:
    """Slow and obvious: what arrives of a gradient, in float32."""
    arrived = []
    for block in gradient.float().flatten().split(256):
        scale = (block.abs().amax() / 127).clamp_min(torch.finfo(torch.float32).tiny)
        arrived.append((block * scale.reciprocal()).round() * scale)
    return torch.cat(arrived).view_as(gradient)


class Large(torch.nn.Module):
    """Parameters of many blocks, of which rank 0 alone uses one, and nobody another."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        sizes = [1000, 300, 700, 5]
        self.values = torch.nn.ParameterList([torch.randn(size).to(dtype) for size in sizes])

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        loss = torch.zeros(())
        for i, value in enumerate(self.values):
            factor = torch.randn(value.shape, generator=generator)
            if i == 3 or (i == 1 and dist.get_rank() > 0):
                continue
            loss = loss + (value.float() * factor).square().sum()
        return loss


def averages(gradients, hosts):
    """In rank order, or per host and over hosts, of what arrives; by parameter, as they are not cut
    there."""
    sums = []
    for own in gradients:
        used = torch.tensor([own is not None])
        dist.all_reduce(used, dist.ReduceOp.MAX)
        sums.append(used.item())
    result = []
    for i, own in enumerate(gradients):
        if not sums[i]:
            result.append(None)
            continue
        shape = Large().values[i].shape
        own = torch.zeros(shape) if own is None else own.float()
        given = [torch.empty(shape) for _ in range(dist.get_world_size())]
        dist.all_gather(given, own)
        if hosts:
            terms = [sum((given[r] for r in rest), given[first]) for first, *rest in hosts]
        else:
            terms = given
        terms = [through_blocks(term) for term in terms]
        result.append(sum(terms[1:], terms[0]) / dist.get_world_size())
    return result


def equals_sums_of_blocks(exchange, options):
    hosts = None
    if exchange == "hierarchical":
        place("a,b,b")
        hosts = ranks_by_host("a,b,b")
    narrow = options.get("master_dtype") is not None
    net, plain = (Large(torch.bfloat16 if narrow else torch.float32) for _ in range(2))
    zero = ZeroRedundancyOptimizer(
        net.parameters(),
        torch.optim.SGD,
        stage=2,
        exchange=exchange,
        gradient_dtype=torch.int8,
        lr=1e-2,
        **options,
    )
    masters = [p.detach().float().requires_grad_() for p in plain.parameters()]
    optimizer = torch.optim.SGD(masters, lr=1e-2)
    for step in range(3):
        zero.zero_grad()
        with zero.no_sync():
            net.loss(2 * step).backward()
        net.loss(2 * step + 1).backward()
        clipped = zero.clip_grad_norm_(2.0)
        zero.step()
        plain.zero_grad()
        plain.loss(2 * step).backward()
        plain.loss(2 * step + 1).backward()
        for master, sum_ in zip(
            masters, averages([p.grad for p in plain.values], hosts), strict=True
        ):
            master.grad = sum_
        expected = torch.nn.utils.clip_grad_norm_(masters, 2.0)
        assert float(clipped) == pytest.approx(float(expected), rel=1e-5)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(plain.parameters(), masters, strict=True):
                param.copy_(master)
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            # The norm is summed in another order.
            tolerance = 2.0**-8 if narrow else 1e-6
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-6)


@pytest.mark.part(4)
@pytest.mark.parametrize("exchange", [*EXCHANGES, "native", "hierarchical"])
@pytest.mark.parametrize("options", [{}, {"master_dtype": torch.float32}])
def test_8_bits_equal_the_sums_of_what_arrives(exchange, options):
    run_ranks(3, equals_sums_of_blocks, exchange, options)


def is_off_by_half_a_scale(exchange, sharding):
    """Of its block, which is as large as a parameter at most."""
    net, plain = Large(), Large()
    zero = ZeroRedundancyOptimizer(
        net.parameters(),
        torch.optim.SGD,
        stage=2,
        sharding=sharding,
        exchange=exchange,
        gradient_dtype=torch.int8,
        lr=1.0,
    )
    net.loss(0).backward()
    plain.loss(0).backward()
    zero.step()
    for i, (ours, before) in enumerate(zip(net.values, plain.values, strict=True)):
        gradient = torch.zeros_like(before) if before.grad is None else before.grad
        largest = gradient.abs().max() / 254 * (1 + 1e-4)
        dist.all_reduce(gradient)
        dist.all_reduce(largest)
        error = (before.detach() - ours.detach() - gradient / dist.get_world_size()).abs().max()
        assert error <= largest / dist.get_world_size() + 1e-5, i


@pytest.mark.part(2)
@pytest.mark.parametrize("exchange", [*EXCHANGES, "native"])
@pytest.mark.parametrize("sharding", ["parameter", "element"])
def test_8_bits_are_off_by_half_a_scale(exchange, sharding):
    run_ranks(2, is_off_by_half_a_scale, exchange, sharding)


def skips_what_is_not_finite(exchange, sharding):
    if exchange == "hierarchical":
        place("a,b,b")
    net, zero, *_ = make(exchange, sharding=sharding, gradient_dtype=torch.int8)
    scaler = torch.amp.GradScaler(devices.NAME, init_scale=1024.0)
    for step, odd in enumerate((None, float("inf"), None, float("nan"))):
        before = [p.detach().clone() for p in net.parameters()]
        zero.zero_grad()
        loss = net(batch(step)).square().mean()
        spoil = net.first.weight.register_hook(
            lambda gradient, odd=odd: (
                gradient.index_fill(0, torch.tensor([3]), odd)
                if odd is not None and dist.get_rank() == 1
                else gradient
            )
        )
        scaler.scale(loss).backward()
        spoil.remove()
        scaler.step(zero)
        scaler.update()
        changed = any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
        assert changed == (odd is None), step
        assert all(torch.isfinite(p).all() for p in net.parameters())


@pytest.mark.parametrize(
    ("exchange", "sharding"),
    [("pairwise", "element"), ("shared_memory", "parameter"), ("native", "element"),
     ("hierarchical", "parameter")],
)  # fmt: skip
def test_a_scaler_skips_what_8_bits_cannot_hold(exchange, sharding):
    run_ranks(3, skips_what_is_not_finite, exchange, sharding)


def losses(gradient_dtype):
    """Of a small transformer that learns to add."""
    torch.manual_seed(0)
    width, digits = 32, 10
    net = torch.nn.Sequential(
        torch.nn.Embedding(2 * digits, width),
        torch.nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * width, 2 * digits),
    )
    zero = ZeroRedundancyOptimizer(
        net.parameters(),
        torch.optim.AdamW,
        stage=2,
        sharding="element",
        gradient_dtype=gradient_dtype,
        lr=3e-3,
    )
    history = []
    for step in range(150):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        terms = torch.randint(digits, (64, 2), generator=generator)
        loss = torch.nn.functional.cross_entropy(
            net(terms + torch.tensor([0, digits])), terms.sum(1)
        )
        zero.zero_grad()
        loss.backward()
        zero.step()
        history.append(loss.item())
    return history


def test_8_bits_train_as_well_as_full_width():
    """The mean loss of the last 20 steps differs by 5 % of the first loss at most, and what was
    learned is the same: nearly all of it."""
    full, narrow = (run_ranks(2, losses, dtype)[0] for dtype in (None, torch.int8))
    last = [sum(history[-20:]) / 20 for history in (full, narrow)]
    assert last[0] < 0.2 * full[0]
    assert abs(last[1] - last[0]) < 0.05 * full[0], (last, full[0])
