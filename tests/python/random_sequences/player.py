"""Plays a program on every rank: with our optimizer, and beside it with the reference."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Iterator
from pathlib import Path

import programs
import torch
import torch.distributed as dist
from programs import Backward, Program, Setup
from reference import (
    Reference,
    late_group,
    loss_of,
    make_net,
    make_scaler,
    make_scheduler,
    param_groups,
)
from shardstep import ZeroRedundancyOptimizer
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}  # where sums are taken in another order


# Stage 2 does not do these as the plain optimizer does: the player avoids them.
AVOIDED = {
    "torch's clipping",
    "steps without zero_grad",
    # Ranks that had a batch wait in zero_grad() for one that had none, which has gone on.
    "zero_grad instead of a step after a rank had no batch",
}


class Player:
    """Our side of a program; `beside` is the reference."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.folder = setup, folder
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.beside = Reference(setup, self.world_size)
        self.net = make_net(setup)
        self.sharding = setup.sharding
        self._make_optimizer()
        self.scaler = make_scaler(setup)
        self.unscaled = False
        self.absent: frozenset[int] | None = None  # in the round since the last step
        self.saves = 0
        self.at = "construction"
        self.found: list[str] = []
        # Two terms have one order; our exchanges add more of them up in the order of ranks.
        ordered = setup.mode == "stage2" and setup.exchange != "native"
        self.exact = setup.mode == "handed" or self.world_size <= 2 or ordered

    def _make_optimizer(self) -> None:
        setup, late = self.setup, self.beside.late
        options = {"sharding": self.sharding, "exchange": setup.exchange}
        if setup.mode == "stage2":
            options |= {"stage": 2}
            if setup.overlap_forward:
                options |= {"overlap_forward": self.net}
        self.zero = ZeroRedundancyOptimizer(
            param_groups(self.net, setup, late),
            self.beside.optimizer_class,
            parameters_as_bucket_view=setup.flat and setup.mode != "ddp",
            bucket_cap_mb=setup.bucket_cap_mb,
            **options,
            **self.beside.defaults,
        )
        self.model = self.net
        if setup.mode == "ddp":
            self.model = DistributedDataParallel(self.net, find_unused_parameters=True)
        self.scheduler = make_scheduler(setup, self.zero)

    # -- what operations have in common ------------------------------------------------------------

    def _pending(self) -> bool:
        return any(self.beside.unsynced)

    def _may_not_forget(self) -> bool:
        """Whether gradients may not be dropped here."""
        avoided = "zero_grad instead of a step after a rank had no batch" in AVOIDED
        present = frozenset(range(self.world_size))
        return avoided and self.setup.mode == "stage2" and bool(present & (self.absent or set()))

    def _fitting(self, batch: Backward) -> Backward:
        """The batch as this mode allows it."""
        experts, absent = batch.experts, batch.absent
        if self.setup.mode == "ddp" and (self._pending() or not batch.sync):
            experts = (0,) * len(experts)  # DDP leaves alone what the last pass does not use
        if self.setup.mode == "stage2" and batch.sync:
            waiting = {rank for rank, sums in enumerate(self.beside.unsynced) if sums}
            absent = absent - waiting if self.absent is None else self.absent
            self.absent = absent
        return dataclasses.replace(batch, experts=experts, absent=absent)

    def _backward(self, batch: Backward) -> None:
        if self.setup.mode == "handed":
            self._take_over_gradients()
        elif self.setup.mode == "ddp" or self.rank not in batch.absent:
            owner = self.zero if self.setup.mode == "stage2" else self.model
            with contextlib.nullcontext() if batch.sync else owner.no_sync():
                loss = loss_of(self.model, self.setup, batch, self.rank, self.beside.late)
                self.scaler.scale(loss).backward()

    def _take_over_gradients(self) -> None:
        for ours, theirs in zip(self.net.parameters(), self.beside.net.parameters(), strict=True):
            ours.grad = None if theirs.grad is None else theirs.grad.clone()

    def _added_twice(self) -> None:
        """DDP averages what was there together with what comes."""
        if self.setup.mode == "ddp" and self.beside.has_gradients():
            self.exact = False

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Writes down what differs first; the other ranks do not hear of it, so all go on."""
        try:
            yield
        except AssertionError as error:
            if not self.found:
                self.found.append(f"{self.at}: {error}")

    def check(self) -> None:
        with self._noting():
            self._check()

    def _check(self) -> None:
        if self.setup.overlap_forward:
            self.zero.wait()
        for (name, ours), theirs in zip(
            self.net.named_parameters(), self.beside.net.parameters(), strict=True
        ):
            self._compare(name, ours, theirs)
        mine, plain = self.zero.param_groups, self.beside.optimizer.param_groups
        for index, (ours, theirs) in enumerate(zip(mine, plain, strict=True)):
            assert ours.keys() == theirs.keys(), (ours.keys(), theirs.keys())
            for key in ours.keys() - {"params"}:
                assert ours[key] == theirs[key], f"group {index}, {key}: {ours[key]}, {theirs[key]}"
        assert self.scaler.get_scale() == self.beside.scaler.get_scale()

    def _compare(self, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        tolerance = 0 if self.exact else TOLERANCE[self.setup.dtype]
        torch.testing.assert_close(
            ours.detach(),
            theirs.detach(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text: f"{what}: {text}",
        )

    def check_state(self) -> None:
        """What is consolidated is the plain optimizer's, key for key."""
        ours = self.zero.consolidate_state_dict(0)
        if ours is None:
            return
        with self._noting():
            self._check_state(ours, self.beside.optimizer.state_dict())

    def _check_state(self, ours: dict, theirs: dict) -> None:
        assert ours["state"].keys() == theirs["state"].keys(), "state of other parameters"
        for index, values in theirs["state"].items():
            assert ours["state"][index].keys() == values.keys()
            for key, value in values.items():
                mine = ours["state"][index][key]
                assert type(mine) is type(value), f"state {index} {key}: {mine}, {value}"
                if isinstance(value, torch.Tensor):
                    self._compare(f"state {index} {key}", mine, value)

    # -- operations: False if one does not fit where it stands -------------------------------------

    @functools.singledispatchmethod
    def play(self, operation) -> bool | None:
        raise TypeError(operation)

    @play.register
    def _(self, batch: Backward) -> bool | None:
        if self.unscaled:
            return False
        batch = self._fitting(batch)
        self._added_twice()
        self.beside.backward(batch)
        self._backward(batch)
        return None

    @play.register
    def _(self, _: programs.Step) -> bool | None:
        if self._pending() or (self.setup.scaler and not self.beside.has_gradients()):
            return False
        self.beside.step()
        self.scaler.step(self.zero)
        self.scaler.update()
        self.unscaled, self.absent = False, None
        self._after_step()
        return None

    def _after_step(self) -> None:
        if self.setup.mode == "stage2" and "steps without zero_grad" in AVOIDED:
            self.beside.zero_grad(True)
            self.zero.zero_grad()

    @play.register
    def _(self, operation: programs.ClosureStep) -> bool | None:
        if self._pending() or self.setup.scaler or self._may_not_forget():
            return False
        self.beside.zero_grad(True)
        batch = self._fitting(operation.batch)
        self.beside.backward(batch)

        def closure() -> float:
            self.zero.zero_grad()
            self._backward(batch)
            return float(batch.seed)

        loss = self.zero.step(closure)
        with self._noting():
            assert loss == batch.seed, f"the closure's loss is {batch.seed}, got {loss}"
        self.beside.optimizer.step()
        self.absent = None
        self._after_step()
        return None

    @play.register
    def _(self, operation: programs.ZeroGrad) -> bool | None:
        if self._may_not_forget():
            return False
        self.beside.zero_grad(operation.set_to_none)
        self.zero.zero_grad(operation.set_to_none)
        return None

    def _clip(self, by: str, ours, torchs) -> None:
        if self.setup.mode != "stage2":
            by = "torch"  # the optimizer's own are stage 2's
        elif "torch's clipping" in AVOIDED:
            by = "ours"
        clip = ours if by == "ours" else torchs
        got = clip(self.zero)
        expected = torchs(self.beside.optimizer)
        if expected is not None:
            if self.setup.mode == "stage2":
                self.exact = False  # the norm is added up from the ranks' shares
            got = torch.as_tensor(got).to(expected.dtype)
            with self._noting():
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, equal_nan=True)

    @play.register
    def _(self, operation: programs.ClipNorm) -> bool | None:
        if self._pending():
            return False
        arguments = operation.max_norm, operation.norm_type
        self._clip(
            operation.by,
            lambda zero: zero.clip_grad_norm_(*arguments),
            lambda optimizer: torch.nn.utils.clip_grad_norm_(trained(optimizer), *arguments),
        )
        return None

    @play.register
    def _(self, operation: programs.ClipValue) -> bool | None:
        if self._pending() or not self.beside.has_gradients():  # torch's raises without any
            return False
        value = operation.value
        self._clip(
            operation.by,
            lambda zero: zero.clip_grad_value_(value),
            lambda optimizer: torch.nn.utils.clip_grad_value_(trained(optimizer), value),
        )
        return None

    @play.register
    def _(self, _: programs.Unscale) -> bool | None:
        if self._pending() or self.unscaled or not self.setup.scaler:
            return False
        if not self.beside.has_gradients():
            return False
        self.beside.scaler.unscale_(self.beside.optimizer)
        self.scaler.unscale_(self.zero)
        self.unscaled = True
        return None

    @play.register
    def _(self, _: programs.Schedule) -> bool | None:
        if self.scheduler is None:
            return False
        self.beside.scheduler.step()
        self.scheduler.step()
        return None

    @play.register
    def _(self, operation: programs.Freeze) -> bool | None:
        if self._pending() or self.unscaled or self._may_not_forget():
            return False
        self.play(programs.ZeroGrad(True))
        for net in (self.net, self.beside.net):
            part_of(net, operation.part).requires_grad_(not operation.frozen)
        return None

    @play.register
    def _(self, _: programs.AddGroup) -> bool | None:
        # A scheduler's lists are as long as the groups were.
        if self._pending() or self.beside.late or self.scheduler is not None:
            return False
        self.beside.add_group()
        self.zero.add_param_group(late_group(self.net))
        return None

    @play.register
    def _(self, operation: programs.Resume) -> bool | None:
        if self._pending() or self.unscaled or self._may_not_forget():
            return False
        self.play(programs.ZeroGrad(True))
        self.absent = None
        self.sharding = operation.sharding
        self.saves += 1
        old_net, old_zero, old_scheduler = self.net, self.zero, self.scheduler
        self.net = make_net(self.setup)
        for new, old in zip(self.net.parameters(), old_net.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)
        directory = self.folder / f"checkpoint-{self.saves}"
        if operation.by == "state_dict":
            self.net.load_state_dict(old_net.state_dict())
            states = [old_zero.consolidate_state_dict(to) for to in range(self.world_size)]
        else:
            background = operation.by == "background checkpoint"
            old_zero.save_checkpoint(directory, module=old_net, asynchronous=background)
            old_zero.wait_checkpoint()
        self._make_optimizer()
        if self.scheduler is not None:
            self.scheduler.load_state_dict(old_scheduler.state_dict())
        if operation.by == "state_dict":
            self.zero.load_state_dict(states[self.rank])
        else:
            self.zero.load_checkpoint(directory, module=self.net)
        return None

    @play.register
    def _(self, operation: programs.Uneven) -> bool | None:
        if self._pending() or self.setup.scaler or self.setup.mode == "handed":
            return False
        if self._may_not_forget():
            return False
        # With gradients left over, a rank that joins at once would keep the others waiting for it.
        self.play(programs.ZeroGrad(True))
        self.absent = None
        counts = operation.counts[: self.world_size]
        for number in range(max(counts)):
            absent = frozenset(rank for rank, count in enumerate(counts) if count <= number)
            self.beside.zero_grad(True)
            self.beside.backward(uneven_batch(operation.seed + number, absent))
            self.beside.optimizer.step()
        joined = [self.zero] if self.setup.mode == "stage2" else [self.model, self.zero]
        with Join(joined):
            for number in range(counts[self.rank]):
                self.zero.zero_grad()
                self._backward(uneven_batch(operation.seed + number, frozenset()))
                self.zero.step()
        self.play(programs.ZeroGrad(True))
        return None


def uneven_batch(seed: int, absent: frozenset[int]) -> Backward:
    return Backward(seed, (0,) * programs.MOST_RANKS, absent)


def trained(optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def part_of(net: torch.nn.Module, path: str):
    return functools.reduce(getattr, path.split("."), net)


def play(program: Program, folder: str) -> list[str]:
    """What went differently on this rank first. An error is raised: all ranks must have it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        player = Player(program.setup, Path(folder))
        for number, operation in enumerate(program.operations):
            player.at = f"operation {number}, {operation}"
            if player.play(operation) is not False:
                player.check()
        player.check_state()
    return player.found
