"""Plays a program on every rank: with our optimizer, and beside it with the reference.

What cannot be done, and why, stands where an operation returns False. What may be refused is done,
and must then be refused on every rank; the program goes on without the gradients.
"""

import contextlib
import copy
import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
FORGET = programs.ZeroGrad(set_to_none=True)
REFUSED = "shardstep: expected the same synchronized backward passes and zero_grad()"


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
        # Stage 2, since the ranks last compared what they had done.
        self.passes = [0] * self.world_size  # with synchronization, by rank
        self.forgot_uneven_passes = False
        self.looked = False
        self.left_over = False  # the gradients of the last step are still there
        self.absent: frozenset[int] | None = None  # since the last step
        self.ddp_remembers = False  # passes without synchronization, also once they are forgotten
        self.saves = 0
        self.at = "construction"
        self.found: list[str] = []
        # Two terms have one order; our exchanges add more of them up in the order of ranks.
        ordered = setup.mode == "stage2" and (
            setup.exchange != "native" or setup.gradient_dtype is not None
        )
        self.exact = setup.mode == "handed" or self.world_size <= 2 or ordered

    def _make_optimizer(self) -> None:
        if self.setup.exchange == "hierarchical":
            os.environ["SHARDSTEP_TEST_HOSTS"] = programs.HOSTS[self.world_size]
        setup, late = self.setup, self.beside.late
        options = {"sharding": self.sharding, "exchange": setup.exchange}
        if setup.mode == "stage2":
            sharing = setup.share_parameters and setup.exchange not in ("native", "pairwise")
            options |= {
                "stage": 2,
                "share_parameters": sharing,
                "module": self.net if setup.with_module else None,
                "gradient_dtype": setup.gradient_dtype,
            }
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

    def _is_native(self) -> bool:
        """Whether all ranks must make the same calls in the same order, as c10d's collectives."""
        return self.setup.mode == "stage2" and self.setup.exchange == "native"

    def _must_line_up(self) -> bool:
        """Whether only a look or a step can come next: a rank is a collective ahead."""
        return self._is_native() and len(set(self.passes)) > 1

    def _may_not_look(self) -> bool:
        """Whether a rank without a batch has looked already, so that it would not ask again
        (docs/limitations.md)."""
        return self.setup.mode == "stage2" and self.looked and len(set(self.passes)) > 1

    def _is_uneven(self) -> bool:
        """Whether a rank still has to make up for passes of others, over the same buckets."""
        return self.forgot_uneven_passes or len(set(self.passes)) > 1

    def _has_compared(self) -> None:
        self.looked = True
        self.passes = [0] * self.world_size
        self.forgot_uneven_passes = False
        self.absent = frozenset()  # on native, a rank makes no other round for this step

    def _forget(self, how: programs.ZeroGrad = FORGET) -> None:
        """Both sides' zero_grad."""
        self.beside.zero_grad(how.set_to_none)
        self._zero_grad(how)
        self._has_forgotten(by=how.by)

    def _zero_grad(self, how: programs.ZeroGrad) -> None:
        if how.by == "optimizer":
            return self.zero.zero_grad(how.set_to_none)
        for parameter in trained(self.zero):  # as torch.nn.Module.zero_grad does
            if parameter.grad is not None and how.set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.requires_grad_(False)
                parameter.grad.zero_()
        return None

    def _has_forgotten(self, by: str = "optimizer") -> None:
        self.left_over = False
        self.looked = self.looked and by == "module"  # a rank without gradients notices nothing
        if len(set(self.passes)) > 1:
            self.forgot_uneven_passes = True
        elif not self.forgot_uneven_passes:
            self.passes = [0] * self.world_size

    def _is_refused(self, do: Callable[[], Any], *, looks: bool) -> bool:
        """Does what makes the ranks compare their gradients, unless they refuse, all alike."""
        uneven = len(set(self.passes)) > 1
        # A rank without a batch cannot be told from one that looks at its last step's gradients.
        looks_back = looks and self.left_over and uneven and 0 in self.passes
        may_refuse = self.forgot_uneven_passes or (looks_back and not self._is_native())
        if not may_refuse or self.setup.mode != "stage2":
            do()
            self._has_compared()
            return False
        refused = False
        try:
            do()
        except RuntimeError as error:
            refused = REFUSED in str(error)
            if not refused:
                raise
        everywhere: list[Any] = [None] * self.world_size
        dist.all_gather_object(everywhere, refused)
        assert len(set(everywhere)) == 1, f"refused on these ranks only: {everywhere}"
        self._has_compared()
        if refused:
            self.beside.zero_grad(True)
            self.left_over = False
        return refused

    def _fitting(self, batch: Backward) -> Backward:
        """The batch as this mode allows it."""
        experts, absent = batch.experts, batch.absent
        if self.setup.mode == "ddp" and (self.ddp_remembers or not batch.sync):
            # DDP leaves alone what the last pass does not use, or takes that for a bug of its own.
            experts = (0,) * len(experts)
            self.ddp_remembers = not batch.sync
        if self.setup.mode == "stage2" and batch.sync:
            # What a rank has accumulated without synchronization waits for its next pass.
            absent -= {rank for rank, sums in enumerate(self.beside.unsynced) if sums}
            # A rank that lacks one pass must not miss another: the others could only wait for it.
            absent -= {r for r, passes in enumerate(self.passes) if passes < max(self.passes)}
            if self._is_native() and self.absent is not None:
                absent = frozenset()
            self.absent = absent
        return dataclasses.replace(batch, experts=experts, absent=absent)

    def _count(self, batch: Backward) -> None:
        if self.setup.mode != "stage2":
            return
        if not batch.sync:
            if self.world_size == 1 and self.beside.has_gradients():
                self.exact = False  # one rank adds each pass to what is there, as it comes
            return
        uneven_before = len(set(self.passes)) > 1
        for rank in set(range(self.world_size)) - batch.absent:
            self.passes[rank] += 1
        if uneven_before or (len(set(self.passes)) > 1 and max(self.passes) > 1):
            self.exact = False  # a pass is added to another one of the other ranks

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
        """Records what differs first; the other ranks are not told, so all continue."""
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

    def check_state(self, to: int) -> None:
        """What is consolidated is the plain optimizer's, key for key."""
        ours = self.zero.consolidate_state_dict(to)
        if ours is None:
            return
        with self._noting():
            self._check_state(ours, self.beside.optimizer.state_dict())

    def _check_state(self, ours: dict, theirs: dict) -> None:
        mine, plain = list(ours["state"]), list(theirs["state"])
        assert mine == sorted(plain), f"state of parameters {mine}, expected of {plain}"
        for index, values in theirs["state"].items():
            assert ours["state"][index].keys() == values.keys()
            for key, value in values.items():
                mine = ours["state"][index][key]
                assert type(mine) is type(value), f"state {index} {key}: {mine}, {value}"
                if isinstance(value, torch.Tensor):
                    self._compare(f"state {index} {key}", mine, value)

    def finish(self) -> None:
        if self._must_line_up():
            self.zero.step()  # brings the ranks together for what comes next in their group
        else:
            self.check_state(0)

    # -- operations: False if one does not fit where it stands -------------------------------------

    @functools.singledispatchmethod
    def play(self, operation) -> bool | None:
        raise TypeError(operation)

    @play.register
    def _(self, batch: Backward) -> bool | None:
        if self.unscaled or (batch.sync and self._must_line_up()):
            return False
        batch = self._fitting(batch)
        self._added_twice()
        self.beside.backward(batch)
        self._backward(batch)
        self._count(batch)
        return None

    @play.register
    def _(self, operation: programs.Broken) -> bool | None:
        # DDP cannot do this. A rank may have had gradients of its own before.
        if self.setup.mode != "stage2" or self._pending() or self.unscaled:
            return False
        if self._is_native() or self._is_uneven():  # the others would be too far ahead
            return False
        batch = dataclasses.replace(operation.batch, absent=frozenset(), overflow=None)
        throws = operation.rank == self.rank

        def throw(_) -> None:
            raise KeyError("on purpose")

        with contextlib.suppress(KeyError):
            loss = loss_of(self.model, self.setup, batch, self.rank, self.beside.late)
            if throws and operation.where == "forward":
                throw(loss)
            hooked = self.net.first.weight if self.net.first.weight.requires_grad else None
            if throws and hooked is not None:
                hook = hooked.register_hook(throw)
            try:
                loss.backward()
            finally:
                if throws and hooked is not None:
                    hook.remove()
        self._count(dataclasses.replace(batch, absent=self._without_gradients(operation)))
        self._forget()
        return None

    def _without_gradients(self, operation: programs.Broken) -> frozenset[int]:
        return frozenset([operation.rank] if operation.where == "forward" else [])

    @play.register
    def _(self, _: programs.Step) -> bool | None:
        if self._pending() or (self.setup.scaler and not self.beside.has_gradients()):
            return False
        if self.setup.scaler and self._may_not_look():
            return False
        if self._is_refused(lambda: self.scaler.step(self.zero), looks=self.setup.scaler):
            return None
        self.beside.step()
        self.scaler.update()
        self.unscaled, self.absent, self.left_over, self.looked = False, None, True, False
        return None

    @play.register
    def _(self, operation: programs.ClosureStep) -> bool | None:
        if self._pending() or self.setup.scaler or self._must_line_up():
            return False
        self.beside.zero_grad(True)
        self.absent = None
        batch = self._fitting(operation.batch)
        self.beside.backward(batch)
        losses = []

        def closure() -> float:
            self.zero.zero_grad()
            self._backward(batch)
            return float(batch.seed)

        self._has_forgotten()
        self._count(batch)
        if self._is_refused(lambda: losses.append(self.zero.step(closure)), looks=False):
            return None
        with self._noting():
            assert losses == [batch.seed], f"the closure's loss is {batch.seed}, got {losses}"
        self.beside.optimizer.step()
        self.absent, self.left_over, self.looked = None, True, False
        return None

    @play.register
    def _(self, operation: programs.ZeroGrad) -> bool | None:
        if self._must_line_up():
            return False
        # Beside the sum of the last step that is refused (test_passes_without_synchronization.py).
        in_place = operation.by == "module" and not operation.set_to_none
        if in_place and self._pending() and self.setup.mode == "stage2":
            return False
        self._forget(operation)
        if self.unscaled:
            self.beside.scaler.update()
            self.scaler.update()
            self.unscaled = False
        return None

    def _clip(self, by: str, ours, torchs) -> None:
        if self.setup.mode != "stage2":
            by = "torch"  # the optimizer's own are stage 2's
        clip = ours if by == "ours" else torchs
        results = []
        if self._is_refused(lambda: results.append(clip(self.zero)), looks=True):
            return
        (got,) = results
        expected = torchs(self.beside.optimizer)
        if expected is not None:
            if self.setup.mode == "stage2":
                self.exact = False  # the norm is summed from the ranks' shares
            got = torch.as_tensor(got).to(expected.dtype)
            with self._noting():
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6, equal_nan=True)

    @play.register
    def _(self, operation: programs.ClipNorm) -> bool | None:
        if self._may_not_look():
            return False
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
        if self._may_not_look():
            return False
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
    def _(self, operation: programs.Scale) -> bool | None:
        if self._may_not_look():
            return False
        if self._pending():
            return False
        parameters = parameters_of(self.net, operation.part)

        def scale():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(operation.factor)

        theirs = parameters_of(self.beside.net, operation.part)
        if not any(parameter.grad is not None for parameter in theirs):
            return False
        if self._is_uneven() or self._is_refused(scale, looks=True):
            return False
        for parameter in theirs:
            if parameter.grad is not None:
                parameter.grad.mul_(operation.factor)
        return None

    @play.register
    def _(self, operation: programs.Drop) -> bool | None:
        if self._pending() or self._is_uneven() or self.ddp_remembers:
            return False
        for net in (self.net, self.beside.net):
            for parameter in parameters_of(net, operation.part):
                parameter.grad = None
        return None

    @play.register
    def _(self, _: programs.Unscale) -> bool | None:
        if self._may_not_look():
            return False
        if self._pending() or self.unscaled or not self.setup.scaler:
            return False
        if not self.beside.has_gradients():
            return False
        if not self._is_refused(lambda: self.scaler.unscale_(self.zero), looks=True):
            self.beside.scaler.unscale_(self.beside.optimizer)
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
        if self.ddp_remembers or self._pending() or self.unscaled or self._must_line_up():
            return False
        self._forget()
        for net in (self.net, self.beside.net):
            part_of(net, operation.part).requires_grad_(not operation.frozen)
        return None

    @play.register
    def _(self, _: programs.AddGroup) -> bool | None:
        # A scheduler's lists are as long as the groups were.
        if (
            self._pending()
            or self.beside.late
            or self.scheduler is not None
            or self._must_line_up()
        ):
            return False
        self.beside.add_group()
        self.zero.add_param_group(late_group(self.net))
        return None

    @play.register
    def _(self, operation: programs.Consolidate) -> bool | None:
        if self._must_line_up():
            return False
        self.check_state(operation.to % self.world_size)
        return None

    @play.register
    def _(self, _: programs.Copy) -> bool | None:
        copied = copy.deepcopy(self.net)
        with self._noting():
            for name, parameter in self.net.state_dict().items():
                self._compare(name, copied.state_dict()[name], parameter)
            try:
                copy.deepcopy(self.zero)
            except TypeError:
                return None
            raise AssertionError("the optimizer was copied")

    @play.register
    def _(self, _: programs.Reload) -> bool | None:
        if self._must_line_up():
            return False
        states = [self.zero.consolidate_state_dict(to) for to in range(self.world_size)]
        self.zero.load_state_dict(states[self.rank])
        return None

    @play.register
    def _(self, operation: programs.Resume) -> bool | None:
        if self._pending() or self.unscaled or self._must_line_up():
            return False
        self._forget()
        self._has_compared()
        self.absent, self.ddp_remembers = None, False
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
        if self.ddp_remembers or self.setup.scaler or self.setup.mode == "handed":
            return False
        if self._pending() or self._is_uneven():
            return False
        if self._is_native() and self.absent is not None:  # a joined rank's round was made already
            return False
        if self.setup.mode == "ddp" and not all(p.requires_grad for p in self.net.parameters()):
            return False  # see uneven_batch: DDP gives a frozen parameter zeros, or not, by chance
        self.absent = None
        counts = operation.counts[: self.world_size]
        forget, clip = FORGET, None
        if self.setup.mode == "stage2":
            forget, clip = operation.forget, operation.clip
        for number in range(max(counts)):
            absent = frozenset(rank for rank, count in enumerate(counts) if count <= number)
            if forget:
                self.beside.zero_grad(forget.set_to_none)
            self.beside.backward(uneven_batch(operation.seed + number, absent))
            if clip:
                torch.nn.utils.clip_grad_value_(trained(self.beside.optimizer), clip)
            self.beside.optimizer.step()
        joined = [self.zero] if self.setup.mode == "stage2" else [self.model, self.zero]
        with Join(joined):
            for number in range(counts[self.rank]):
                if forget:
                    self._zero_grad(forget)
                self._backward(uneven_batch(operation.seed + number, frozenset()))
                if clip:
                    torch.nn.utils.clip_grad_value_(trained(self.zero), clip)
                self.zero.step()
        if max(counts) > 0:
            self._has_compared()
            self.absent, self.left_over, self.looked = None, True, False
        if self.setup.mode == "ddp":
            # On a rank that has joined, nothing is left; and DDP may show the late layer zeros.
            self._forget()
            self.net.zero_grad()
        return None


def uneven_batch(seed: int, absent: frozenset[int]) -> Backward:
    # A rank that has joined tells torch's DDP a stale or uninitialized map of what it used.
    return Backward(seed, (programs.ALL_EXPERTS,) * programs.MOST_RANKS, absent)


def trained(optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def part_of(net: torch.nn.Module, path: str):
    return functools.reduce(getattr, path.split("."), net)


def parameters_of(net: torch.nn.Module, path: str) -> list[torch.nn.Parameter]:
    part = part_of(net, path)
    return list(part.parameters()) if isinstance(part, torch.nn.Module) else [part]


def play(program: Program, folder: str) -> list[str]:
    """What went differently on this rank first. An error is raised: all ranks must have it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        player = Player(program.setup, Path(folder))
        for number, operation in enumerate(program.operations):
            player.at = f"operation {number}, {operation}"
            if player.play(operation) is not False:
                player.check()
        player.finish()
    return player.found
