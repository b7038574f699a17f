"""torch's ZeroRedundancyOptimizer on the C++ engine.

This module makes the local optimizer and runs its steps; who owns what, and how parameters and
state travel, is the engine's. What else the class can do is in a module for each matter.
"""

import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer as _TorchZeroRedundancyOptimizer
from torch.optim import Optimizer

from shardstep._C import Checkpointer, ShardEngine
from shardstep._checkpoint import CheckpointMethods, finish
from shardstep._elementwise import check_optimizer_class, is_known_elementwise, refuse_lbfgs
from shardstep._errors import telling_every_rank, where
from shardstep._forward_overlap import Arrivals, wait_in
from shardstep._gradients import GradientMethods
from shardstep._module import broadcast, describe_module, module_to_follow
from shardstep._overlap_info import (  # torch's module has these names too
    _DDPBucketAssignment as _DDPBucketAssignment,
)
from shardstep._overlap_info import _OverlapInfo
from shardstep._overlap_info import _OverlapStatus as _OverlapStatus
from shardstep._overlap_with_ddp import OverlapWithDDP
from shardstep._param_groups import ParamGroup, describe, parse_param_group, parse_param_groups
from shardstep._sharded_state_dict import ShardedStateDictMethods
from shardstep._state_dict import StateDictMethods
from shardstep._torch_names import TorchPrivateNames

__all__ = ["ZeroRedundancyOptimizer"]


class _ZeROJoinHook(JoinHook):
    """A rank without inputs makes its share of the others' steps."""

    def __init__(self, zero: "ZeroRedundancyOptimizer") -> None:
        if not isinstance(zero, ZeroRedundancyOptimizer):
            raise TypeError(
                f"shardstep: expected a ZeroRedundancyOptimizer, got {type(zero).__name__}"
            )
        self.zero = zero
        super().__init__()

    def main_hook(self) -> None:
        if self.zero._overlap_with_ddp:
            self.zero._arrive()  # DDP's own join hook ran the update
            return
        self.zero._has_inputs = False
        try:
            self.zero.step()
        finally:
            self.zero._has_inputs = True


class ZeroRedundancyOptimizer(
    GradientMethods,
    StateDictMethods,
    ShardedStateDictMethods,
    CheckpointMethods,
    OverlapWithDDP,
    TorchPrivateNames,
):
    """An optimizer whose update and state are divided among the ranks of a group.

    A drop-in for torch.distributed.optim.ZeroRedundancyOptimizer. Collective: construction,
    add_param_group, step, consolidate_state_dict and what saves and loads checkpoints, in the same
    order on every rank.

    Args:
        params: tensors, (name, tensor) pairs, or param groups (dicts).
        optimizer_class: the optimizer that each rank runs on what it owns: any optimizer but LBFGS
            when sharding by parameter, an element-wise one when sharding by element: torch's
            Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop or SGD, or
            one that you say is `elementwise`.
        process_group: the default group if None.
        parameters_as_bucket_view: parameters become views of one flat tensor per dtype and device.
        overlap_with_ddp: the update runs inside DDP's backward pass, by a hook of
            shardstep.ddp_zero_hook; step() only warns.
        stage: 1: gradients arrive whole, as DDP leaves them. 2: the optimizer averages them over
            the ranks during the backward pass, without DDP, and each rank keeps what it owns.
            `.grad` then holds no memory: it answers norms and the like for the whole gradient,
            collectively, and can be scaled in place. full_gradient() gives the whole one.
        sharding: "parameter": every parameter belongs to one rank. "element": every rank owns
            equally many elements, and dtypes may be mixed.
        exchange: "native" (c10d's collectives), "pairwise" (messages between every two ranks),
            "shared_memory" (ranks of one host, tensors on the CPU), or "auto": on Gloo shared
            memory if it can be, else pairwise; native elsewhere.
        bucket_cap_mb: buckets of at most this size, 0 for no limit; a bucket moves at a time. None
            is no limit in stage 1, 25 in stage 2.
        share_parameters: in stage 2, with ranks on one host: one copy of the parameters for all of
            them. On the condition that no rank changes parameters by itself, and that none reads
            them while another is in step().
        overlap_forward: in stage 2, with `module`: step() returns while parameters still travel.
            Whoever reads or writes one through the module waits for it: in forward and any other
            method, by attribute, parameters(), state_dict() and load_state_dict(). Parameters that
            the module does not list are waited for before its forward. If you kept a parameter
            elsewhere, call wait() before you look at it.
        module: in stage 2, the module that the parameters are of. Its other parameters and its
            buffers start as rank 0's. Without it, buffers are your own affair.
        broadcast_buffers: the module's buffers become rank 0's in each step(), as DDP makes them
            before the next forward.
        gradient_dtype: in stage 2, torch.bfloat16 or torch.float16: wider gradients are rounded to
            it and travel at half the width; their owner adds them up in their own dtype.
        elementwise: says that optimizer_class, which is not among torch's that are known to be,
            is element-wise: its update of an element depends on nothing but that element's
            gradient and state.
        defaults: passed on to optimizer_class.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        process_group: dist.ProcessGroup | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        stage: int = 1,
        sharding: str = "parameter",
        exchange: str = "auto",
        bucket_cap_mb: float | None = None,
        share_parameters: bool = False,
        overlap_forward: bool | torch.nn.Module = False,
        module: torch.nn.Module | None = None,
        broadcast_buffers: bool = True,
        gradient_dtype: torch.dtype | None = None,
        elementwise: bool = False,
        **defaults: Any,
    ) -> None:
        self.initialized = False
        self._stage = stage
        self._sharding = sharding
        self._join_group(process_group)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._has_inputs = True
        self._announced = False
        self._stand_ins = []
        self._module: torch.nn.Module | None = None
        self._broadcast_buffers = broadcast_buffers
        self._arrivals = None
        overlaps_forward = overlap_forward is not None and overlap_forward is not False
        self._overlap_with_ddp = overlap_with_ddp
        self._overlap_info = _OverlapInfo(self.world_size)
        self._overlapped_steps = []
        self._optimizer_class = optimizer_class
        self._is_known_elementwise = is_known_elementwise(optimizer_class)
        self._arguments = defaults
        self._local_by_group = []
        self._index_of = {}
        self._consolidated = None
        self._may_have_state = False
        with telling_every_rank(self._adopt_first_groups, self._where()):
            self._module = module_to_follow(module, overlap_forward, stage)
            self.engine = ShardEngine(
                self.process_group,
                stage=stage,
                sharding=sharding,
                exchange=exchange,
                flat=parameters_as_bucket_view,
                bucket_cap_mb=bucket_cap_mb,
                overlap=overlap_with_ddp,
                share_parameters=share_parameters,
                overlap_forward=overlaps_forward,
                gradient_dtype=gradient_dtype,
            )
            check_optimizer_class(
                optimizer_class, sharding, elementwise or self._is_known_elementwise
            )
            # The local optimizer says which of its arguments are options of a group.
            Optimizer.__init__(self, parse_param_groups(params, _OWN_OPTIONS), {})
        Joinable.__init__(self)
        self._checkpointer = Checkpointer(self.engine)
        weakref.finalize(self, finish, self._checkpointer)  # also when the interpreter ends
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*duplicate parameters")  # it was said already
            self.optim = optimizer_class(self._local_groups(0), **defaults)
        if isinstance(self.optim, torch.optim.LBFGS):
            refuse_lbfgs(type(self.optim))
        self.defaults = dict(self.optim.defaults)
        self._pull_options()
        self.state = self.optim.state
        self.initialized = True
        if self._module is not None:
            self._follow_module(self._module, overlaps_forward)

    def _follow_module(self, module: torch.nn.Module, overlaps_forward: bool) -> None:
        others = [p for p in module.parameters() if p not in self._index_of]
        broadcast([*others, *module.buffers()], self.process_group)
        if overlaps_forward:
            self._arrivals = Arrivals(self._index_of)
            wait_in(module, self._arrivals)

    def _join_group(self, process_group: dist.ProcessGroup | None) -> None:
        group: Any = process_group if process_group is not None else dist.group.WORLD
        self.process_group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(
                "shardstep: expected a process group that this rank is in, got another's "
                f"{where(dist.get_rank(), dist.get_world_size())}"
            )
        self.global_rank = dist.get_global_rank(group, self.rank)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "shardstep: a ZeroRedundancyOptimizer cannot be copied or pickled: it is this rank's "
            "part of an object that all ranks share; make another one over the copied parameters, "
            "and let it load_state_dict() what consolidate_state_dict() gave "
            f"{self._where()}"
        )

    # -- param groups ------------------------------------------------------------------------------

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group, whose parameters are shared out on top of those there are. Collective."""
        if not self.initialized:  # torch's constructor calls this too
            super().add_param_group(param_group)
            return
        known = len(self.param_groups)
        with telling_every_rank(lambda error: self._adopt_groups(known, error), self._where()):
            super().add_param_group(parse_param_group(param_group, known, _OWN_OPTIONS))
        for group in self._local_groups(known):
            self.optim.add_param_group(group)
        self._pull_options()

    def _adopt_first_groups(self, error: str | None) -> None:
        if error is not None:  # any engine tells the others
            self.engine = ShardEngine(self.process_group)
            self.param_groups = []
        self._adopt_groups(0, error)

    def _adopt_groups(self, known: int, error: str | None) -> None:
        """Hands the groups from `known` on to the engine; if a rank cannot, none of them stays."""
        new = self.param_groups[known:]
        of_module = describe_module(self._module) if known == 0 else ""
        groups = [
            (
                list(dict.fromkeys(group["params"])),
                describe(self._optimizer_class, {**self._arguments, **group}) + of_module,
            )
            for group in new
        ]
        try:
            self.engine.add_groups(groups, error)
        except Exception:
            del self.param_groups[known:]
            raise
        for number, group in enumerate(new, known):
            for param in group["params"]:
                self._index_of.setdefault(param, len(self._index_of))
            # A parameter that is listed twice is updated twice, as torch.optim does.
            times = Counter(self._index_of[param] for param in group["params"])
            local = self.engine.local_params(number)
            self._local_by_group.append([own for own in local for _ in range(times[own.index])])
        self._make_stand_ins()

    def _local_groups(self, known: int) -> list[ParamGroup]:
        return [
            {**group, "params": [local.tensor for local in self._local_by_group[g]]}
            for g, group in enumerate(self.param_groups[known:], known)
        ]

    # -- the step ----------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None, **kwargs: Any) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], **kwargs: Any) -> float: ...
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Updates what this rank owns, then brings all parameters up to date on every rank.

        Returns the closure's loss. Other keyword arguments reach the local optimizer. Collective.
        """
        if self._overlap_with_ddp:
            warnings.warn(
                "shardstep: step() does nothing with overlap_with_ddp=True: the hook of "
                "shardstep.ddp_zero_hook updates the parameters inside the backward pass",
                stacklevel=2,
            )
            return None
        try:
            loss = self._local_step(closure=closure, **kwargs)
        except Exception as error:
            self.engine.fail_step(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._announced = False
        self.engine.after_step()
        if self._arrivals is not None:
            self._arrivals.expect_all(self.engine)
        return loss

    def _local_step(
        self,
        gradients: list[torch.Tensor | None] | None = None,
        closure: Callable[[], float] | None = None,
        **kwargs: Any,
    ) -> float | None:
        """The update of what this rank owns, without the exchange.

        `gradients`, one for each parameter that this rank owns, need overlap_with_ddp; without
        them the parameters' own are taken.
        """
        self._announce()
        self._push_options()
        self._may_have_state = True
        if gradients is not None:
            if closure is not None or not self._overlap_with_ddp:
                raise ValueError(
                    "shardstep: expected gradients with overlap_with_ddp=True and no closure"
                )
            pairs = zip(self._local, gradients, strict=True)
            self.engine.before_partial_step([(p.index, g) for p, g in pairs if g is not None])
        elif closure is None:
            self._take_gradients(first=True)
        if closure is None:
            loss = self.optim.step(**kwargs)
        else:
            first = True

            def with_gradients() -> float:
                nonlocal first
                loss = closure()
                self._take_gradients(first)
                first = False
                return loss

            loss = self.optim.step(closure=with_gradients, **kwargs)
        self._pull_options()
        return loss  # type: ignore[no-any-return]

    def _take_gradients(self, first: bool) -> None:
        """Hands the gradients to the local optimizer. `first` is true once in a step."""
        if first and self._join_config.enable:
            # torch's DDP leaves no gradients on a rank that has joined.
            self.engine.lend_gradients(self._has_inputs)
        self._take_back_aliases()
        self.engine.before_step()
        # Here every rank is, or none: later one might have failed.
        if first and self._module is not None and self._broadcast_buffers:
            broadcast(self._module.buffers(), self.process_group)

    # -- Join --------------------------------------------------------------------------------------

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """A rank without inputs makes its share of the others' steps."""
        return _ZeROJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self._index_to_param[0].device

    @property
    def join_process_group(self) -> Any:
        return self.process_group


_OWN_OPTIONS = inspect.signature(ZeroRedundancyOptimizer).parameters.keys() - {
    "params",
    "defaults",
}

# Code that asks for torch's class finds ours.
_TorchZeroRedundancyOptimizer.register(ZeroRedundancyOptimizer)
