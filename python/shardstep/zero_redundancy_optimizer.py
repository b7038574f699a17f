"""torch's ZeroRedundancyOptimizer on the C++ engine.

This module creates the local optimizer and runs its steps; the engine decides who owns what, and
moves parameters and state. The other abilities of the class are in a module each.
"""

import inspect
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer as _TorchZeroRedundancyOptimizer
from torch.optim import Optimizer

from shardstep._C import Checkpointer, ShardEngine, UpdateTimer
from shardstep._checkpoint import CheckpointMethods, finish
from shardstep._cost import Cost
from shardstep._errors import telling_every_rank, where
from shardstep._forward_overlap import Arrivals, wait_in
from shardstep._gradients import announce
from shardstep._group_settings import GROUP_KEYS, default_settings, take_settings
from shardstep._groups import GroupMethods
from shardstep._module import broadcast, module_to_follow
from shardstep._overlap_info import (  # torch's module has these names too
    _DDPBucketAssignment as _DDPBucketAssignment,
)
from shardstep._overlap_info import _OverlapInfo
from shardstep._overlap_info import _OverlapStatus as _OverlapStatus
from shardstep._overlap_with_ddp import OverlapWithDDP
from shardstep._param_groups import parse_param_groups
from shardstep._sharded_state_dict import ShardedStateDictMethods
from shardstep._state_dict import StateDictMethods
from shardstep._stats import StatsMethods
from shardstep._step_hooks import (
    has_post_hooks,
    with_hooks_of_all_optimizers,
    without_hooks_of_all_optimizers,
)
from shardstep._torch_names import TorchPrivateNames

__all__ = ["ZeroRedundancyOptimizer"]


class _ZeROJoinHook(JoinHook):
    """Lets a rank without inputs do its share of the others' steps."""

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
        self.zero.engine.set_joined(True)
        try:
            self.zero.step()
        finally:
            self.zero._has_inputs = True
            self.zero.engine.set_joined(False)

    def post_hook(self, is_last_joiner: bool) -> None:
        self.zero.engine.end_join(is_last_joiner)


class ZeroRedundancyOptimizer(
    GroupMethods,
    StateDictMethods,
    ShardedStateDictMethods,
    CheckpointMethods,
    OverlapWithDDP,
    StatsMethods,
    TorchPrivateNames,
):
    """An optimizer whose update and state are divided among the ranks of a group.

    A drop-in for torch.distributed.optim.ZeroRedundancyOptimizer. Collective, in the same order on
    every rank: construction, add_param_group, step, consolidate_state_dict, and saving and loading
    checkpoints.

    Args:
        params: tensors, (name, tensor) pairs, or param groups (dicts). A group may name an
            `optimizer_class`, `sharding` and `cost` of its own; muon_groups() makes such groups.
            A group with its own class takes that class's options, and is sharded by parameter
            unless the class is known to be element-wise.
        optimizer_class: the optimizer that each rank runs on what it owns. When sharding by
            parameter, any optimizer except LBFGS. When sharding by element, an element-wise one:
            torch's Adadelta, Adagrad, Adam, AdamW, Adamax, ASGD, NAdam, RAdam, RMSprop, Rprop or
            SGD, or one that you declare `elementwise`.
        process_group: the default group if None.
        parameters_as_bucket_view: makes parameters views of one flat tensor per dtype and device.
        overlap_with_ddp: a hook of shardstep.ddp_zero_hook runs the update inside DDP's backward
            pass, and step() only warns.
        stage: with 1, gradients arrive whole, as DDP leaves them. With 2, the optimizer averages
            them over the ranks during the backward pass, without DDP, and each rank keeps only
            what it owns. `.grad` then holds no memory: norms and finiteness of the whole gradient
            can still be asked of it, collectively, and it can be scaled in place. full_gradient()
            returns the whole gradient.
        sharding: with "parameter", every parameter belongs to one rank. With "element", every rank
            owns the same number of elements, and dtypes may be mixed.
        exchange: "native" (c10d's collectives), "pairwise" (messages between every two ranks),
            "shared_memory" (all ranks on one host, tensors on the CPU), "hierarchical" (shared
            memory inside each host, messages between hosts, tensors on the CPU), or "auto": on
            Gloo shared memory if all ranks are on one host, pairwise if every rank is alone on its
            host, else hierarchical; on other backends native.
        bucket_cap_mb: maximum size of a bucket, the unit of communication, in MiB; 0 for no limit.
            None means 0.25 per rank, at least 25 and at most 256, in stage 2; no limit in stage 1,
            except on a device without parameters_as_bucket_view, where it is as in stage 2.
        share_parameters: in stage 2, with parameters on the CPU: the ranks of each host share one
            copy of the parameters. Requires that no rank changes parameters by itself, and that
            none reads them while another is in step().
        overlap_forward: in stage 2, with `module`: step() returns while parameters are still being
            sent. Code that reads or writes one through the module waits for it: in forward and any
            other method, by attribute, parameters(), state_dict() and load_state_dict(). Parameters
            that the module does not list are waited for before its forward. With post hooks of
            step(), which may change parameters, step() waits for all. If you hold a parameter
            elsewhere, call wait() before you read it.
        module: in stage 2, the module that the parameters belong to. Rank 0's buffers, and those of
            its parameters that the optimizer does not have, are copied to every rank. Errors and
            checkpoints call the parameters by the module's names. Without it, you must keep
            buffers the same on all ranks.
        broadcast_buffers: copies rank 0's buffers of the module to every rank in each step(). (DDP
            does so before the next forward.)
        gradient_dtype: in stage 2, torch.bfloat16, torch.float16 or torch.int8. Wider gradients are
            rounded to it and sent at that width; their owner sums them in their own dtype. int8
            stands for blocks of 256 elements with one float32 scale each, 1.016 bytes per element:
            an element is off by at most 1/254 of the largest of its block, and a block with an
            inf or NaN arrives as NaN. Between hosts of several ranks, the hosts' sums are rounded.
        master_dtype: torch.float32 makes each rank keep float32 copies, the masters, of the
            bfloat16 and float16 parameters that it owns. The local optimizer updates the masters,
            gradients are summed in float32 (in stage 1 DDP has already averaged them), and the
            rounded parameters are sent. If you change a parameter in place, as load_state_dict()
            does, its master follows; changes through `.data` are not noticed. Masters are part of
            the state, as "master_param".
        rounding: without master_dtype. "stochastic" is for bfloat16 parameters: the local optimizer
            updates float32 copies of those that this rank owns, which take memory during step()
            only, and the result is rounded up or down at random, so that on average no update is
            lost for being smaller than a parameter's last bit. Gradients are summed in float32, and
            the state is float32. Each step() draws one number from torch's default generator on the
            CPU, which checkpoints save. Parameters as wide as float32 are updated as without it;
            float16 is refused.
        cost: when sharding by parameter, a function of a parameter that returns what its update
            costs; the ranks divide the total evenly. None means the number of elements, as in
            torch's class, and for torch.optim.Muon the number of operations.
        elementwise: declares an optimizer_class that shardstep does not know to be element-wise:
            its update of an element depends on nothing but that element's gradient and state.
        defaults: passed to optimizer_class.
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
        master_dtype: torch.dtype | None = None,
        rounding: str = "nearest",
        cost: Cost | None = None,
        elementwise: bool = False,
        **defaults: Any,
    ) -> None:
        self.initialized = False
        self._stage = stage
        self._join_group(process_group)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._has_inputs = True
        self._announced = False
        self._stand_ins = []
        self._module = None
        self._broadcast_buffers = broadcast_buffers
        self._arrivals = None
        overlaps_forward = overlap_forward is not None and overlap_forward is not False
        self._overlap_with_ddp = overlap_with_ddp
        if overlap_with_ddp:
            self._step_supports_amp_scaling = True  # so that step() hears of a GradScaler
        self._overlap_info = _OverlapInfo(self.world_size)
        self._update_error = None
        self._overlapped_steps = []
        self._default_settings = default_settings(
            optimizer_class, defaults, sharding, cost, elementwise
        )
        self._settings = []
        self._listed = []
        self._state_view = None
        self._group_of = []
        self._cost_pools = [None]
        self._members = []
        self._local_by_group = []
        self._index_of = {}
        self._consolidated = None
        self._may_have_state = False
        self._traffic_before = (0, 0, 0)
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
                master_dtype=master_dtype,
                rounding=rounding,
            )
            groups = parse_param_groups(params, self._own_options)
            self._settings = [take_settings(group, self._default_settings) for group in groups]
            for settings in self._settings:
                settings.check()
            # The local optimizer says which of its arguments are options of a group.
            Optimizer.__init__(self, groups, {})
        Joinable.__init__(self)
        this = weakref.ref(self)
        self.engine.set_announce(lambda: announce(this))
        self._checkpointer = Checkpointer(self.engine)
        # Also when the interpreter ends.
        weakref.finalize(self, finish, self._checkpointer, os.getpid())
        self.defaults = dict(self.optim.defaults)
        self._pull_options()
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
                "shardstep: expected a process group that this rank is in, got one that it is not "
                "in; create the optimizer only on the group's ranks "
                f"{where(dist.get_rank(), dist.get_world_size())}"
            )
        self.global_rank = dist.get_global_rank(group, self.rank)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "shardstep: a ZeroRedundancyOptimizer cannot be copied or pickled, because it is one "
            "rank's part of an object that all ranks share; create another over the copied "
            "parameters and load_state_dict() what consolidate_state_dict() returned "
            f"{self._where()}"
        )

    # -- the step ----------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None, **kwargs: Any) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], **kwargs: Any) -> float: ...
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Updates what this rank owns, then brings all parameters up to date on every rank.

        Returns the closure's loss. Other keyword arguments go to the local optimizer. Collective.
        """
        if self._overlap_with_ddp:
            self._refuse_scaler()
            warnings.warn(
                "shardstep: step() does nothing with overlap_with_ddp=True, because a hook of "
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
            if has_post_hooks(self):
                self.wait()  # they may read and change parameters
        return loss

    def _local_step(
        self,
        gradients: list[torch.Tensor | None] | None = None,
        closure: Callable[[], float] | None = None,
        **kwargs: Any,
    ) -> float | None:
        """The update of what this rank owns, without the exchange.

        `gradients`, one for each parameter that this rank owns, require overlap_with_ddp; without
        them, the parameters' own gradients are used.
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
            with UpdateTimer(self.engine), without_hooks_of_all_optimizers():
                loss = self.optim.step(**kwargs)
        else:
            first = True

            def with_gradients() -> float:
                nonlocal first
                self.engine.before_closure()
                with with_hooks_of_all_optimizers():
                    loss = closure()
                self._take_gradients(first)
                first = False
                return loss

            with without_hooks_of_all_optimizers():
                loss = self.optim.step(closure=with_gradients, **kwargs)
        self.engine.round_copies()
        self._pull_options()
        return loss  # type: ignore[no-any-return]

    def _take_gradients(self, first: bool) -> None:
        """Hands the gradients to the local optimizer. `first` is true once per step."""
        if first and self._join_config.enable:
            # torch's DDP leaves no gradients on a rank that has joined.
            self.engine.lend_gradients(self._has_inputs)
        self._take_back_aliases()
        self.engine.before_step()
        # Either all ranks get here or none; further on, one of them may have failed.
        if first and self._module is not None and self._broadcast_buffers:
            broadcast(self._module.buffers(), self.process_group)

    # -- Join --------------------------------------------------------------------------------------

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """Lets a rank without inputs do its share of the others' steps."""
        self._announced = False
        return _ZeROJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self._index_to_param[0].device

    @property
    def join_process_group(self) -> Any:
        return self.process_group


ZeroRedundancyOptimizer._own_options = frozenset(
    inspect.signature(ZeroRedundancyOptimizer).parameters.keys()
    - {"params", "defaults", *GROUP_KEYS}
)

# isinstance checks for torch's class accept ours.
_TorchZeroRedundancyOptimizer.register(ZeroRedundancyOptimizer)
