"""Several hosts. Ranks of different ones must not open each other's memory: SHARDSTEP_TEST_HOSTS
says who is where, and one test makes hosts of namespaces."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from dying import train_until_death
from ranks import run_ranks
from shardstep import ZeroRedundancyOptimizer
from shardstep.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks" / "peers"))
import link

pytestmark = pytest.mark.cpu("ranks of a host share memory, so tensors must be there")


class Net(torch.nn.Module):
    """With a parameter that rank 0 alone uses, and one that nobody does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(13, 170)
        self.sometimes = torch.nn.Linear(170, 170)
        self.never = torch.nn.Linear(5, 5)
        self.last = torch.nn.Linear(170, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        return self.last(self.sometimes(x) if dist.get_rank() == 0 else x)


def place(hosts: str) -> None:
    """Must be called before an optimizer is made."""
    os.environ["SHARDSTEP_TEST_HOSTS"] = hosts


def ranks_by_host(hosts: str) -> list[list[int]]:
    names = hosts.split(",")
    return [[r for r, n in enumerate(names) if n == name] for name in dict.fromkeys(names)]


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 13, generator=generator)


def set_averages(model: torch.nn.Module, hosts: str, sent_as: torch.dtype | None = None) -> None:
    """Slow and obvious: per host in rank order, then over hosts."""
    for param in model.parameters():
        used = torch.tensor([param.grad is not None])
        own = torch.zeros_like(param) if param.grad is None else param.grad
        given = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(given, own.detach())
        dist.all_reduce(used, dist.ReduceOp.MAX)
        total = None
        for ranks in ranks_by_host(hosts):
            of_host = given[ranks[0]].clone()
            for rank in ranks[1:]:
                of_host += given[rank]
            if sent_as is not None:
                of_host = of_host.to(sent_as).to(own.dtype)
            total = of_host if total is None else total + of_host
        param.grad = total / dist.get_world_size() if used.item() else None


def equals_reference(hosts, options):
    place(hosts)
    net, plain = Net(), Net()
    if options.get("overlap_forward"):
        options = {**options, "module": net}
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, stage=2, lr=1e-2, **options)
    assert zero.engine.exchange == "hierarchical"
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for step in range(4):
        for model in (net, plain):
            model.zero_grad()
            model(batch(step)).square().mean().backward()
        torch.nn.utils.clip_grad_value_(net.parameters(), 1e-2)
        zero.step()
        set_averages(plain, hosts)
        torch.nn.utils.clip_grad_value_(plain.parameters(), 1e-2)
        optimizer.step()
        zero.wait()
        for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{name} in step {step}"
    state = zero.consolidate_state_dict(to=1)
    if dist.get_rank() == 1:
        for index, values in optimizer.state_dict()["state"].items():
            for key, value in values.items():
                assert torch.equal(torch.as_tensor(state["state"][index][key]), value), key


@pytest.mark.part(3)
@pytest.mark.parametrize("hosts", ["a,b,a", "a,a,b,b", "a,b,b,c,a"])
@pytest.mark.parametrize(
    "options", [{}, {"overlap_forward": True}, {"share_parameters": True}, {"bucket_cap_mb": 1e-3}]
)
@pytest.mark.parametrize("sharding", ["parameter", "element"])
def test_sums_per_host_and_then_over_hosts(hosts, options, sharding):
    world_size = len(hosts.split(","))
    run_ranks(world_size, equals_reference, hosts, {"sharding": sharding, **options})


def masters_equal_reference(options):
    """The hosts' sums are float32, as the sums of one host are."""
    place("a,a,b")
    net, plain = Net().bfloat16(), Net().bfloat16()
    zero = ZeroRedundancyOptimizer(
        net.parameters(),
        torch.optim.Adam,
        stage=2,
        lr=1e-2,
        master_dtype=torch.float32,
        **options,
    )
    masters = torch.nn.ParameterList([p.detach().float() for p in plain.parameters()])
    optimizer = torch.optim.Adam(masters, lr=1e-2)
    for step in range(4):
        for model in (net, plain):
            model.zero_grad()
            model(batch(step).bfloat16()).square().mean().backward()
        zero.step()
        for param, master in zip(plain.parameters(), masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        set_averages(masters, "a,a,b", options.get("gradient_dtype"))
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(plain.parameters(), masters, strict=True):
                param.copy_(master)
        for (name, ours), theirs in zip(net.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"{name} in step {step}"


@pytest.mark.parametrize("sharding", ["parameter", "element"])
@pytest.mark.parametrize("gradient_dtype", [None, torch.bfloat16])
def test_sums_for_masters(sharding, gradient_dtype):
    """gradient_dtype=bfloat16 rounds the sum of a host of several ranks."""
    run_ranks(3, masters_equal_reference, {"sharding": sharding, "gradient_dtype": gradient_dtype})


def stage_1_under_ddp(sharding, overlapped):
    """The gradients are DDP's, so parameters must be too."""
    place("a,a,b")
    net, plain = (DistributedDataParallel(Net(), find_unused_parameters=True) for _ in range(2))
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.Adam, sharding=sharding, overlap_with_ddp=overlapped, lr=1e-2
    )
    assert zero.engine.exchange == "hierarchical"
    if overlapped:
        net.register_comm_hook(None, hook_with_zero_step(allreduce_hook, net, zero))
        plain.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    for step in range(4):
        for model in (net, plain):
            model.zero_grad()
            model(batch(step)).square().mean().backward()
        if not overlapped:
            zero.step()
        optimizer.step()
        for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(("sharding", "overlapped"), [("element", False), ("parameter", True)])
def test_stage_1(sharding, overlapped):
    run_ranks(3, stage_1_under_ddp, sharding, overlapped)


def trains_in_a_sub_group():
    """Ranks 1 to 3 of four, on hosts of two."""
    place("first" if dist.get_rank() < 2 else "second")
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return None
    net = Net()
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, group, stage=2, sharding="element", lr=1e-2
    )
    assert zero.engine.exchange == "hierarchical"
    for step in range(3):
        net.zero_grad()
        net(batch(step)).square().mean().backward()
        zero.step()
    return [p.detach() for p in net.parameters()]


def test_a_sub_group_across_hosts():
    _, *results = run_ranks(4, trains_in_a_sub_group)
    for one in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], one, strict=True))


def saves_between_uneven_passes(way, folder):
    place("a,a,b")
    net = torch.nn.Linear(40, 40)
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, stage=2, sharding="element", lr=1e-2
    )
    inputs = torch.ones(2, 40)
    for absent in (0, 1):  # the last rank must have the first sum before its second pass
        if dist.get_rank() != absent:
            net(inputs).sum().backward()
    if way == "consolidate":
        zero.consolidate_state_dict()
    elif way == "save":
        zero.save_checkpoint(folder, module=net)
    else:
        zero.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    zero.step()
    return net.weight.detach()


@pytest.mark.parametrize("way", ["consolidate", "save", "add_param_group"])
def test_other_hosts_do_not_wait_for_sums_while_ranks_save(way, tmp_path):
    first, *others = run_ranks(3, saves_between_uneven_passes, way, str(tmp_path), timeout=30)
    assert all(torch.equal(first, other) for other in others)


def joins_after_a_pass():
    place("a,a,b")
    net = torch.nn.Linear(40, 40)
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, stage=2, sharding="element", lr=1e-2
    )
    inputs = torch.ones(2, 40)
    net(inputs).sum().backward()
    with Join([zero]):  # host a waits in Join for the last rank, which needs its first sums
        for _ in range(2 if dist.get_rank() == 2 else 0):
            zero.zero_grad()
            net(inputs).sum().backward()
            zero.step()
    return net.weight.detach()


def test_other_hosts_do_not_wait_for_sums_while_ranks_have_joined():
    first, *others = run_ranks(3, joins_after_a_pass, timeout=30)
    assert all(torch.equal(first, other) for other in others)


def freezes_after_a_pass_that_threw():
    place("a,b")
    net = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(3)))
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, stage=2, sharding="element", bucket_cap_mb=0.1, lr=1e-2
    )
    if dist.get_rank() == 1:  # on rank 0 the forward threw
        net(torch.ones(2, 300)).sum().backward()
    zero.zero_grad()
    net[2].requires_grad_(False)
    assert zero.clip_grad_norm_(1.0) == 0
    net(torch.ones(2, 300)).sum().backward()
    zero.step()
    return net[0].weight.detach()


def test_a_bucket_that_was_frozen_does_not_hold_up_the_others():
    first, other = run_ranks(2, freezes_after_a_pass_that_threw, timeout=30)
    assert torch.equal(first, other)


def dies(lost, where, options):
    place("a,a,b,b")
    net = Net()
    if options.get("overlap_forward"):
        options = {**options, "module": net}
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, stage=2, bucket_cap_mb=1e-2, lr=1e-2, **options
    )
    return train_until_death(net, zero, batch, lost, where)


PHASES = ["forward", "backward", "after backward", "update"]


@pytest.mark.part(3)
@pytest.mark.parametrize("lost", [(1,), (2,), (2, 3)])
@pytest.mark.parametrize("where", PHASES)
@pytest.mark.parametrize("options", [{}, {"overlap_forward": True, "sharding": "element"}])
def test_a_rank_or_a_host_that_is_killed_is_an_error_on_the_others(lost, where, options):
    results = run_ranks(4, dies, lost, where, options, timeout=15, lost=lost)
    for rank, result in enumerate(results):
        if rank in lost:
            continue
        message, seconds = result
        assert any(f"rank {gone}" in message for gone in lost), f"rank {rank}: {message}"
        assert "(rank" in message
        assert seconds < 20


START = """
    import datetime, sys, time
    import torch, torch.distributed as dist
    from shardstep import ZeroRedundancyOptimizer

    rank, world_size, store, timeout = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size,
        timeout=datetime.timedelta(seconds=int(timeout)),
    )
    torch.manual_seed(0)
    net = torch.nn.Linear(300, 300)
"""

TRAINS = """
    zero = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, stage=2, sharding="element",
        share_parameters=True, lr=1e-2,
    )
    for step in range(3):
        zero.zero_grad()
        net(torch.full((1, 300), 1.0 + rank + step)).sum().backward()
        zero.step()
    # The average of the gradients, exact: 1 + step + 1 (ranks 0, 1, 2).
    torch.manual_seed(0)
    plain = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        plain(torch.full((1, 300), 2.0 + step)).sum().backward()
        optimizer.step()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    print(zero.engine.exchange, flush=True)
    dist.barrier()
"""

TRAINS_ON = """
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, stage=2, lr=1e-2)
    for step in range(1000000):
        begin = time.monotonic()
        try:
            zero.zero_grad()
            net(torch.ones(1, 300)).sum().backward()
            zero.step()
        except RuntimeError as error:
            print(f"after {time.monotonic() - begin:.1f} s:", str(error).replace("\\n", " "))
            break
        if step == 3:
            print("trains", flush=True)
"""

# Says when it begins and goes on when it is told to.
TRAINS_WHEN_TOLD = """
    zero = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, stage=2, lr=1e-2)
    plain = torch.nn.Linear(300, 300)
    plain.load_state_dict(net.state_dict())
    print(zero.engine.exchange, flush=True)
    steps = int(sys.stdin.readline())
    begin = time.monotonic()
    try:
        for step in range(steps):
            zero.zero_grad()
            net(torch.full((1, 300), 1.0 + rank + step)).sum().backward()
            zero.step()
    except RuntimeError as error:
        print(f"after {time.monotonic() - begin:.1f} s:", str(error).replace("\\n", " "))
        sys.exit()
    seconds = time.monotonic() - begin
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        plain(torch.full((1, 300), 2.0 + step)).sum().backward()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), plain.parameters()))
    print(f"trained in {seconds:.1f} s", flush=True)
    dist.barrier()
"""


@contextlib.contextmanager
def three_ranks_on_two_hosts(folder, program, timeout):
    """The hosts, and processes of which two are on the first; skips where it is not permitted."""
    file, store = folder / "program.py", str(folder / "store")
    file.write_text(textwrap.dedent(START) + textwrap.dedent(program))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": link.INTERFACE}
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(link.linked_hosts(2, gbit=None))
        except link.NotPermitted as error:
            pytest.skip(f"hosts of namespaces are not permitted here: {error}")
        prefixes = [hosts[0].prefix(), hosts[0].prefix(), hosts[1].prefix()]
        ranks = [
            subprocess.Popen(
                [*prefix, sys.executable, str(file), str(rank), "3", store, str(timeout)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, prefix in enumerate(prefixes)
        ]
        yield hosts, ranks


@pytest.mark.full
def test_hosts_made_of_namespaces(tmp_path):
    with three_ranks_on_two_hosts(tmp_path, TRAINS, timeout=60) as (hosts, ranks):
        outputs = [process.communicate(timeout=90)[0] for process in ranks]
        assert hosts[0].bytes_sent() > 3 * 300 * 300 * 4
    assert [output.strip() for output in outputs] == ["hierarchical"] * 3


@pytest.mark.full
def test_a_link_that_is_cut_is_an_error_on_all_ranks_within_the_timeout(tmp_path):
    with three_ranks_on_two_hosts(tmp_path, TRAINS_ON, timeout=10) as (hosts, ranks):
        assert [process.stdout.readline().strip() for process in ranks] == ["trains"] * 3
        hosts[1].cut_link()
        outputs = [process.communicate(timeout=60)[0] for process in ranks]
    for rank, output in enumerate(outputs):
        seconds = float(output.split("after ")[1].split(" s:")[0])
        assert seconds < 15, output
        others = (2,) if rank < 2 else (0, 1)
        assert any(f"rank {other}" in output for other in others), output


def train_over_a_slow_link(folder, mbit, timeout):
    """What the ranks say of 3 steps, in which 361 kB cross the link in each direction per step."""
    with three_ranks_on_two_hosts(folder, TRAINS_WHEN_TOLD, timeout) as (hosts, ranks):
        assert [process.stdout.readline().strip() for process in ranks] == ["hierarchical"] * 3
        hosts[1].slow_link(mbit)
        for process in ranks:
            print(3, file=process.stdin, flush=True)
        return [process.communicate(timeout=90)[0].strip() for process in ranks]


@pytest.mark.full
def test_a_link_that_is_slow_is_only_slow(tmp_path):
    """At 8 Mbit/s the steps take 1.1 s, less what a burst may hold."""
    for output in train_over_a_slow_link(tmp_path, 8, timeout=60):
        assert output.startswith("trained in "), output
        assert 0.8 < float(output.split()[2]) < 30, output


@pytest.mark.full
def test_a_link_too_slow_for_the_timeout_is_an_error_on_all_ranks(tmp_path):
    """At 0.1 Mbit/s a step takes 29 s."""
    for rank, output in enumerate(train_over_a_slow_link(tmp_path, 0.1, timeout=5)):
        assert float(output.split("after ")[1].split(" s:")[0]) < 15, output
        # Ranks of one host may wait for each other when their time is up.
        assert any(f"rank {other}" in output for other in range(3) if other != rank), output
