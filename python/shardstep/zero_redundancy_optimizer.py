"""torch's ZeroRedundancyOptimizer on the C++ engine.

This module holds the param groups and the local optimizer; who owns what, and how parameters and
state travel, is the engine's.
"""

import contextlib
import math
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.optim import ZeroRedundancyOptimizer as _TorchZeroRedundancyOptimizer
from torch.distributed.optim.utils import functional_optim_map
from torch.optim import Optimizer

from shardstep._C import Checkpointer, LocalParam, OverlappedStep, ShardEngine
from shardstep._checkpoint import (
    Progress,
    module_tensors,
    parameter_names,
    progress_of,
    rng_states,
    set_rng_states,
)
from shardstep._overlap import _DDPBucketAssignment, _OverlapInfo, _OverlapStatus
from shardstep._state import from_engine, to_engine

if TYPE_CHECKING:
    from shardstep._sharded_state import StateTemplates

__all__ = ["ZeroRedundancyOptimizer"]

ParamGroup = dict[str, Any]

_UNSCALE = torch.amp.GradScaler._unscale_grads_.__code__

# Optimizers of torch's that look at whole parameters: slices of them would train differently.
_WHOLE_PARAMETERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")

# Optimizers of torch's whose state tensors have the parameter's shape, or no axes.
_ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def _param_groups(params: Any) -> list[ParamGroup]:
    """The groups that `params` stands for. Raises TypeError or ValueError where it is none."""
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            "shardstep: expected params to be an iterable of tensors or of param groups, "
            f"got {type(params).__name__}"
        )
    items = list(params)
    if not items:
        raise ValueError("shardstep: expected parameters to optimize, got none")
    if all(isinstance(item, torch.Tensor) for item in items):
        return [{"params": items}]
    for item in items:
        if not isinstance(item, dict):
            raise TypeError(
                "shardstep: expected params to be all tensors or all param groups, "
                f"got {type(item).__name__} among them"
            )
    return [_param_group(item) for item in items]


def _param_group(group: Any) -> ParamGroup:
    if not isinstance(group, dict):
        raise TypeError(f"shardstep: expected a param group, a dict, got {type(group).__name__}")
    if "params" not in group:
        raise ValueError(f"shardstep: expected a param group with 'params', got {list(group)}")
    params = group["params"]
    if isinstance(params, torch.Tensor):
        params = [params]
    elif isinstance(params, set):
        raise TypeError("shardstep: expected the parameters of a group in an order, got a set")
    return {**group, "params": list(params)}


def _in_words(value: Any) -> str:
    """The same on every rank if the value is."""
    if isinstance(value, torch.Tensor):
        return f"tensor {value.tolist()}" if value.numel() <= 8 else f"tensor {value.shape}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_in_words, value))})"
    simple = isinstance(value, (bool, int, float, complex, str, type(None), torch.dtype))
    return repr(value) if simple else type(value).__qualname__


def _describe(optimizer_class: Any, group: ParamGroup) -> str:
    options = " ".join(f"{k}={_in_words(group[k])}" for k in sorted(group) if k != "params")
    return f"{getattr(optimizer_class, '__qualname__', optimizer_class)} {options}"


def _hands_on(module: torch.nn.Module) -> bool:
    """Whether a module's forward leaves its children's parameters to their own forwards.

    torch's own modules may not: attention reads the weight of its projection itself.
    """
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)
    if isinstance(module, lists):
        return True
    ours = not type(module).__module__.startswith("torch.")
    return ours and any(isinstance(inner, lists) for inner in module.modules())


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


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """An optimizer whose update and state are divided among the ranks of a group.

    A drop-in for torch.distributed.optim.ZeroRedundancyOptimizer. Collective: construction,
    add_param_group, step, consolidate_state_dict and what saves and loads checkpoints, in the same
    order on every rank.

    Args:
        params: tensors, or param groups (dicts).
        optimizer_class: the optimizer that each rank runs on what it owns: any optimizer when
            sharding by parameter, an element-wise one (SGD, Adam, ...) when sharding by element.
        process_group: the default group if None.
        parameters_as_bucket_view: parameters become views of one flat tensor a dtype and device.
        overlap_with_ddp: the update runs inside DDP's backward pass, by a hook of
            shardstep.ddp_zero_hook; step() only warns.
        stage: 1: gradients arrive whole, as DDP leaves them. 2: the optimizer averages them over
            the ranks during the backward pass; each rank keeps what it owns, `.grad` is gone, and
            no DDP is needed.
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
        overlap_forward: in stage 2, the module that the parameters are of: step() returns while
            they still travel, and the next forward waits for them module by module: for those of
            a module in a list (ModuleList, Sequential) when its turn comes. Before you read
            parameters elsewhere, call wait(); the module's state_dict() does.
        gradient_dtype: in stage 2, torch.bfloat16 or torch.float16: wider gradients are rounded to
            it and travel at half the width; their owner adds them up in their own dtype.
        defaults: passed on to optimizer_class.
    """

    functional_optim_map = functional_optim_map
    optim: Any

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
        overlap_forward: torch.nn.Module | None = None,
        gradient_dtype: torch.dtype | None = None,
        **defaults: Any,
    ) -> None:
        self.initialized = False
        self._stage = stage
        self._sharding = sharding
        group: Any = process_group if process_group is not None else dist.group.WORLD
        self.process_group = group
        self.world_size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError("shardstep: expected a process group that this rank is in")
        self.global_rank = dist.get_global_rank(group, self.rank)
        self.parameters_as_bucket_view = parameters_as_bucket_view
        self._has_inputs = True
        self._overlap_with_ddp = overlap_with_ddp
        self._overlap_info = _OverlapInfo(self.world_size)
        self._overlapped_steps: list[OverlappedStep] = []
        self._optimizer_class = optimizer_class
        self._local: list[LocalParam] = []
        self._index_of: dict[torch.Tensor, int] = {}
        self._consolidated: dict[Any, dict[str, Any]] | None = None

        error: Exception | None = None
        try:
            self.engine = ShardEngine(
                group,
                stage=stage,
                sharding=sharding,
                exchange=exchange,
                flat=parameters_as_bucket_view,
                bucket_cap_mb=bucket_cap_mb,
                overlap=overlap_with_ddp,
                share_parameters=share_parameters,
                overlap_forward=overlap_forward is not None,
                gradient_dtype=gradient_dtype,
            )
            name = getattr(optimizer_class, "__name__", "")
            if sharding == "element" and name in _WHOLE_PARAMETERS:
                raise ValueError(
                    "shardstep: expected an element-wise optimizer when sharding by element, got "
                    f"{name}, which needs whole parameters; shard by parameter"
                )
            # The local optimizer says which of its arguments are options of a group.
            Optimizer.__init__(self, _param_groups(params), {})
        except Exception as caught:
            error = caught
            self.engine = ShardEngine(group)
            self.param_groups = []
        Joinable.__init__(self)
        self._checkpointer = Checkpointer(self.engine)
        weakref.finalize(self, self._checkpointer.finish)  # also when the interpreter ends
        self._arguments = defaults
        self._tell_engine(0, error)
        self.optim = optimizer_class(self._local_groups(0), **defaults)
        self.defaults = dict(self.optim.defaults)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        self.state = self.optim.state
        self.initialized = True
        if overlap_forward is not None:
            self._wait_in_forward(overlap_forward)

    # -- param groups ------------------------------------------------------------------------------

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Adds a group, whose parameters are shared out on top of those there are. Collective."""
        if not self.initialized:  # torch's constructor calls this too
            super().add_param_group(param_group)
            return
        known = len(self.param_groups)
        error: Exception | None = None
        try:
            super().add_param_group(_param_group(param_group))
        except Exception as caught:
            error = caught
        self._tell_engine(known, error)
        for group in self._local_groups(known):
            self.optim.add_param_group(group)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)

    def _tell_engine(self, known: int, error: Exception | None) -> None:
        """Hands the groups from `known` on to the engine; if a rank cannot, none of them stays."""
        new = self.param_groups[known:]
        groups = [
            (g["params"], _describe(self._optimizer_class, {**self._arguments, **g})) for g in new
        ]
        try:
            self.engine.add_groups(groups, None if error is None else str(error))
        except Exception as caught:
            del self.param_groups[known:]
            raise (error or caught) from None
        for g, group in enumerate(new, known):
            self._local.extend(self.engine.local_params(g))
            for param in group["params"]:
                self._index_of[param] = len(self._index_of)

    def _local_groups(self, known: int) -> list[ParamGroup]:
        return [
            {**group, "params": [local.tensor for local in self.engine.local_params(g)]}
            for g, group in enumerate(self.param_groups[known:], known)
        ]

    @staticmethod
    def _sync_param_groups(src_param_groups: list[Any], dst_param_groups: list[Any]) -> None:
        """Copies every key but the parameters."""
        for src, dst in zip(src_param_groups, dst_param_groups, strict=True):
            dst.update((key, value) for key, value in src.items() if key != "params")

    @property
    def param_groups(self) -> list[ParamGroup]:
        # torch's GradScaler looks for gradients here; in stage 2 the local optimizer has them.
        if self._stage == 2 and sys._getframe(1).f_code is _UNSCALE:
            return self._groups_to_unscale()
        return self._param_groups

    @param_groups.setter
    def param_groups(self, groups: list[ParamGroup]) -> None:
        self._param_groups = groups

    def _groups_to_unscale(self) -> list[ParamGroup]:
        """What this rank owns, and a gradient that is inf everywhere if one is not finite anywhere.

        So every rank skips the step or none does, also one that owns nothing. Collective.
        """
        norm = self.engine.clip_grad_norm(math.inf, math.inf, False)
        verdict = torch.zeros(1, device=self._index_to_param[0].device)
        verdict.grad = torch.full_like(verdict, 0.0 if math.isfinite(norm) else math.inf)
        return [*self.optim.param_groups, {"params": [verdict]}]

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
        loss = self._local_step(closure=closure, **kwargs)
        self.engine.after_step()
        return loss

    def wait(self) -> None:
        """Returns when the parameters have arrived that step() left travelling."""
        self.engine.wait()

    def _wait_in_forward(self, root: torch.nn.Module) -> None:
        """Modules wait for the parameters of their own before they use them."""
        this = weakref.ref(self)

        def wait_for(parameters: Iterable[torch.nn.Parameter]) -> None:
            if (zero := this()) is not None:
                indices = [zero._index_of.get(parameter) for parameter in parameters]
                zero.engine.wait_for([index for index in indices if index is not None])

        def wait_for_own(module: torch.nn.Module, _: Any) -> None:
            wait_for(module.parameters(recurse=False))

        def wait_for_whole(module: torch.nn.Module, *_: Any) -> None:
            wait_for(module.parameters())

        def watch(module: torch.nn.Module) -> None:
            if _hands_on(module):
                module.register_forward_pre_hook(wait_for_own)
                for child in module.children():
                    watch(child)
            else:
                module.register_forward_pre_hook(wait_for_whole)

        watch(root)
        root.register_state_dict_pre_hook(wait_for_whole)  # type: ignore[no-untyped-call]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients. After a backward pass that threw, call it on every rank."""
        super().zero_grad(set_to_none)
        if self.initialized:
            self.engine.drop_sums()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Stage 2: backward passes add up in `.grad`; the next one behind it takes that along."""
        before, self.engine.sync = self.engine.sync, False
        try:
            yield
        finally:
            self.engine.sync = before

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Stage 2: scales the gradients down to a norm over all of them of at most max_norm.

        Returns what it was, the same on every rank. Collective.
        """
        norm = self.engine.clip_grad_norm(float(max_norm), float(norm_type), error_if_nonfinite)
        return torch.tensor(norm)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Stage 2: clips every element of the gradients. Collective."""
        self.engine.clip_grad_value(float(clip_value))

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
        if self._has_inputs:  # who has joined answers, and does not announce
            Join.notify_join_context(self)
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
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
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        return loss  # type: ignore[no-any-return]

    def _take_gradients(self, first: bool) -> None:
        """Hands the gradients to the local optimizer. `first` is true once in a step."""
        if first and self._join_config.enable:
            # torch's DDP leaves no gradients on a rank that has joined.
            self.engine.lend_gradients(self._has_inputs)
        self.engine.before_step()

    # -- state -------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> dict[str, Any] | None:
        """Gathers the state of all ranks on rank `to`, where state_dict() then gives it.

        Tensors go to `to` alone, a bucket at a time. Returns the dict there, None elsewhere.
        Collective.
        """
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        states = self.optim.state_dict()["state"]
        local = {
            self._local[key].index: to_engine(values)
            for key, values in states.items()
            if isinstance(key, int)
        }
        whole = self.engine.gather_state(local, to)
        self._consolidated = None
        if self.rank != to:
            return None
        self._consolidated = {index: from_engine(values) for index, values in whole.items()}
        # State of no parameter is the same on every rank.
        self._consolidated.update((k, v) for k, v in states.items() if not isinstance(k, int))
        return self._pack(self._consolidated)

    def state_dict(self) -> dict[str, Any]:
        """What was last consolidated on this rank, as the plain optimizer would give it."""
        if self._consolidated is None:
            raise RuntimeError(
                "shardstep: expected a consolidated state, got none on this rank: call "
                f"consolidate_state_dict(to={self.rank}) on all ranks before state_dict() "
                f"(rank {self.rank} of {self.world_size})"
            )
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._pack(self._consolidated)
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

    def _pack(self, state: dict[Any, dict[str, Any]]) -> dict[str, Any]:
        """A plain optimizer's dict over the same groups."""
        groups = []
        first = 0
        for group in self.param_groups:
            last = first + len(group["params"])
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": list(range(first, last))})
            first = last
        return {"state": dict(state), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a plain optimizer's dict, or one consolidated at any world size.

        This rank keeps its share; the caller's dict stays as it is. Raises ValueError that names
        what does not fit, and has changed nothing then.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = pre_hook(self, state_dict) or state_dict
        groups, positions = self._fitting_groups(state_dict)
        whole, extra = {}, {}
        for key, values in state_dict["state"].items():
            if not isinstance(key, int):
                extra[key] = values
            elif key not in positions:
                raise ValueError(
                    f"shardstep: expected state of parameters that a group lists, got {key}"
                )
            else:
                self._check_shapes(positions[key], values)
                whole[positions[key]] = to_engine(values)
        cut = self.engine.cut_state(whole)
        own = {index: from_engine(values) for index, values in cut.items()}
        self._take(groups, own, extra)
        self._finish_loading(groups)

    def _finish_loading(self, groups: list[ParamGroup]) -> None:
        """Brings the options to where the user sees them, and tells who wants to know."""
        self._sync_param_groups(groups, self.param_groups)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _take(
        self,
        groups: list[ParamGroup],
        state: dict[int, dict[str, Any]],
        extra: dict[Any, Any] | None = None,
    ) -> None:
        """Hands the local optimizer its share of a state, by parameter index."""
        own: dict[Any, Any] = {
            position: state[local.index]
            for position, local in enumerate(self._local)
            if local.index in state
        }
        first = 0
        local_groups = []
        for group, local_group in zip(groups, self.optim.param_groups, strict=True):
            last = first + len(local_group["params"])
            local_groups.append({**group, "params": list(range(first, last))})
            first = last
        own.update(extra or {})
        self.optim.load_state_dict({"state": own, "param_groups": local_groups})
        self.state = self.optim.state
        self._consolidated = None

    def _fitting_groups(
        self, state_dict: dict[str, Any]
    ) -> tuple[list[ParamGroup], dict[int, int]]:
        """The groups of a dict without parameters, and our index of each of its parameters."""
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"shardstep: expected {len(self.param_groups)} param groups, got {len(groups)}"
            )
        positions: dict[int, int] = {}
        for g, (theirs, ours) in enumerate(zip(groups, self.param_groups, strict=True)):
            if len(theirs["params"]) != len(ours["params"]):
                raise ValueError(
                    f"shardstep: expected {len(ours['params'])} parameters in group {g}, "
                    f"got {len(theirs['params'])}"
                )
            for key in theirs["params"]:
                positions[key] = len(positions)
        return [{k: v for k, v in group.items() if k != "params"} for group in groups], positions

    def _check_shapes(self, index: int, values: dict[str, Any]) -> None:
        param = self._index_to_param[index]
        known = self._known_shapes(index)
        for name, value in values.items():
            if not isinstance(value, torch.Tensor):
                continue
            expected = known.get(name)
            if expected is None and isinstance(self.optim, _ELEMENTWISE) and value.dim() > 0:
                expected = param.shape
            if expected is not None and value.shape != expected:
                raise ValueError(
                    f"shardstep: expected {name} of parameter {index} with shape "
                    f"{tuple(expected)}, got {tuple(value.shape)}"
                )

    def _known_shapes(self, index: int) -> dict[str, torch.Size]:
        """Shapes of the state that this rank holds of a whole parameter."""
        for local in self._local:
            if local.index == index and local.tensor.shape == self._index_to_param[index].shape:
                state = self.optim.state.get(local.tensor, {})
                return {k: v.shape for k, v in state.items() if isinstance(v, torch.Tensor)}
        return {}

    # -- checkpoints -------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        module: torch.nn.Module | None = None,
        extra: dict[str, Any] | None = None,
        rng: bool = True,
        asynchronous: bool = False,
        progress: bool | Progress | None = None,
    ) -> None:
        """Writes a checkpoint: each rank what it owns. Waits for the last save first. Collective.

        What was in the directory before stays until the new checkpoint is complete, also if this
        fails; then every rank raises.

        Args:
            module: its parameters and buffers are saved too, and name the optimizer's parameters.
            extra: small values of your own; rank 0's count. Numbers, strings, bools, None, small
                tensors, and lists, tuples and dicts of these.
            rng: saves torch's random generators of each rank.
            asynchronous: return when this rank's shard is copied; a thread writes it. What goes
                wrong then is raised by the next save_checkpoint or wait_checkpoint.
            progress: called by the thread that writes, with bytes written and bytes in all of this
                rank's shard. True: a bar. None: a bar on rank 0 if it has a terminal, the save
                takes long and is not asynchronous.
        """
        error: Exception | None = None
        content: dict[str, Any] = {
            "state": {},
            "param_groups": [],
            "names": [],
            "module": [],
            "rng": {},
            "extra": extra,
        }
        try:
            self._overlap_info.wait_for_broadcasts()
            self.wait()
            self._sync_param_groups(self.param_groups, self.optim.param_groups)
            content["state"] = {
                self._local[key].index if isinstance(key, int) else key: values
                for key, values in self.optim.state_dict()["state"].items()
            }
            content["param_groups"] = self._pack({})["param_groups"]
            content["names"] = parameter_names(self._index_of, self.param_groups, module)
            content["module"] = module_tensors(module)
            content["rng"] = rng_states() if rng else {}
        except Exception as caught:
            error = caught
        try:
            self._checkpointer.save(
                os.fspath(directory),
                **content,
                background=asynchronous,
                progress=progress_of(progress, directory, self.rank, asynchronous),
                error=None if error is None else str(error),
            )
        except Exception as caught:
            raise (error or caught) from None

    def wait_checkpoint(self) -> None:
        """Returns when the last save is complete, or raises what went wrong. Collective."""
        self._checkpointer.wait()

    def checkpoint_progress(self) -> tuple[int, int]:
        """Bytes of this rank's shard that are written, and in all."""
        return self._checkpointer.progress()

    def load_checkpoint(
        self,
        directory: str | os.PathLike[str],
        *,
        module: torch.nn.Module | None = None,
        rng: bool = True,
    ) -> dict[str, Any]:
        """Loads a checkpoint of any world size and sharding. Returns its `extra`. Collective.

        Each rank reads what it needs, and verifies it. Raises ValueError that names what does not
        fit or is damaged, on every rank, and has changed nothing then.

        Args:
            module: its parameters and buffers are loaded too.
            rng: loads torch's random generators. At another world size, ranks that were not there
                keep theirs.
        """
        error: Exception | None = None
        tensors, names = [], []
        try:
            self._overlap_info.wait_for_broadcasts()
            self.wait()
            tensors = module_tensors(module)
            names = parameter_names(self._index_of, self.param_groups, module)
        except Exception as caught:
            error = caught
        try:
            loaded = self._checkpointer.load(
                os.fspath(directory),
                param_groups=self._pack({})["param_groups"],
                names=names,
                module=tensors,
                elementwise=isinstance(self.optim, _ELEMENTWISE),
                error=None if error is None else str(error),
            )
        except Exception as caught:
            raise (error or caught) from None
        before = self.optim.state, self.optim.param_groups
        try:
            self._take(loaded["param_groups"], loaded["state"])
        except Exception as caught:
            error = caught
        try:
            self._checkpointer.share(None if error is None else str(error))
        except Exception as caught:
            self.optim.state, self.optim.param_groups = before
            self.state = self.optim.state
            raise (error or caught) from None
        self._sync_param_groups(loaded["param_groups"], self.param_groups)
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        with torch.no_grad():
            for (_, tensor, _), value in zip(tensors, loaded["module"], strict=True):
                tensor.copy_(value)
        if rng:
            set_rng_states(loaded["rng"])
        return loaded["extra"] or {}

    def checkpoint_bytes_read(self) -> int:
        """How many bytes of the shards the last load_checkpoint read on this rank."""
        return self._checkpointer.bytes_read

    # -- torch.distributed.checkpoint --------------------------------------------------------------

    def sharded_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, for torch.distributed.checkpoint to save or load into.

        Nothing is gathered or copied: loading writes into the state that there is, and makes what
        there is not yet. Hand what was loaded to load_sharded_state_dict.
        """
        from shardstep._sharded_state import shard_values

        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        states = self.optim.state_dict()["state"]
        templates = self._state_templates(self.param_groups)
        params = self._index_to_param
        state = {}
        for position, (group, local) in enumerate(self._local_by_group()):
            state[str(local.index)] = (
                shard_values(local, params[local.index], states[position])
                if position in states
                else templates.values(local, params[local.index], group)
            )
        # DCP takes a tuple as one value, which it loads as it was, whatever there is now.
        extra = tuple((k, v) for k, v in states.items() if not isinstance(k, int))
        groups = tuple(self._pack({})["param_groups"])
        return {"state": state, "param_groups": groups, "extra": extra}

    def load_sharded_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a dict of sharded_state_dict that torch.distributed.checkpoint has loaded into.

        It may have been saved at another world size and sharding. Raises ValueError that names what
        does not fit.
        """
        from shardstep._sharded_state import ShardedState

        groups, _ = self._fitting_groups(state_dict)
        templates = self._state_templates(groups)
        own = {}
        for group, local in self._local_by_group():
            values = {
                name: value.local() if isinstance(value, ShardedState) else value
                for name, value in state_dict["state"][str(local.index)].items()
            }
            if all(value is None for value in values.values()):
                continue  # there was no state of this parameter
            missing = templates.names(local, group) - values.keys()
            if missing:
                raise ValueError(
                    f"shardstep: expected {', '.join(sorted(missing))} of parameter {local.index} "
                    f"in the state, as the options of its group ask for, got {', '.join(values)} "
                    f"(rank {self.rank} of {self.world_size})"
                )
            own[local.index] = values
        self._take(groups, own, dict(state_dict["extra"]))
        self._finish_loading(groups)

    def _state_templates(self, groups: list[ParamGroup]) -> "StateTemplates":
        from shardstep._sharded_state import StateTemplates

        by_element = self._sharding == "element"
        return StateTemplates(self._optimizer_class, self._arguments, groups, by_element)

    def _local_by_group(self) -> Iterator[tuple[int, LocalParam]]:
        """What this rank owns, in the local optimizer's order, with the group's number."""
        for group in range(len(self.param_groups)):
            for local in self.engine.local_params(group):
                yield group, local

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

    # -- overlap with DDP --------------------------------------------------------------------------

    def _make_overlapped_step(self, ddp: Any, interleaved: bool) -> OverlappedStep:
        zero = weakref.proxy(self)  # the step is not seen by the garbage collector
        step = OverlappedStep(
            lambda gradients, tag: zero._update(gradients, tag),
            lambda: zero._overlap_info.wait_for_broadcasts(),
            interleaved=interleaved,
            static_graph=ddp.static_graph,
            find_unused_parameters=ddp.find_unused_parameters,
        )
        self._overlapped_steps.append(step)
        return step

    def _update(self, params: list[tuple[torch.Tensor, torch.Tensor]], tag: int) -> None:
        """Updates what this rank owns of these parameters, and starts sending it."""
        gradients = [(self._index_of[p], g) for p, g in params if p in self._index_of]
        self._sync_param_groups(self.param_groups, self.optim.param_groups)
        self.engine.before_partial_step(gradients)
        self.optim.step()
        self._sync_param_groups(self.optim.param_groups, self.param_groups)
        pending = self.engine.after_partial_step(gradients, tag)
        if pending is not None:
            self._overlap_info.broadcast_handles.append(pending)

    def _arrive(self) -> None:
        for step in self._overlapped_steps:
            step.arrive()

    # -- torch's private names, which others use ---------------------------------------------------

    def _ranks_of(self, param: torch.Tensor) -> list[int]:
        index = self._index_of.get(param)
        return [] if index is None else [s.rank for s in self.engine.owners(index)]

    @property
    def _index_to_param(self) -> list[torch.Tensor]:
        return list(self._index_of)

    @property
    def _all_params(self) -> list[torch.Tensor]:
        return list(self._index_of)

    @property
    def _param_to_index(self) -> dict[torch.Tensor, int]:
        return dict(self._index_of)

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        """By element, the first rank that owns a part."""
        return {param: self._ranks_of(param)[0] for param in self._index_of}

    def _partition_parameters(
        self, params_per_rank: list[list[torch.Tensor]] | None = None
    ) -> list[list[ParamGroup]]:
        """The param groups of each rank; by element, with the parameters it owns a part of."""
        if params_per_rank is not None:
            raise RuntimeError(
                "shardstep: expected no params_per_rank: who owns what is fixed at construction"
            )
        params = self._index_to_param
        return [
            [
                {**group, "params": [params[s.param] for s in self.engine.owned(rank, g)]}
                for g, group in enumerate(self.param_groups)
            ]
            for rank in range(self.world_size)
        ]

    @property
    def _buckets(self) -> list[list[torch.Tensor]]:
        """With parameters_as_bucket_view, for each bucket the flat tensor of each rank."""
        return self.engine.flat_buckets()

    @property
    def _device_to_device_index(self) -> dict[torch.device, int]:
        devices = dict.fromkeys(param.device for param in self._index_of)
        return {device: index for index, device in enumerate(devices)}

    @property
    def _bucket_assignments_per_rank(self) -> list[dict[int, _DDPBucketAssignment]]:
        """For each rank, what it updates of each DDP bucket seen so far."""
        ranks: list[dict[int, _DDPBucketAssignment]] = [{} for _ in range(self.world_size)]
        for bucket, params in enumerate(self._overlap_info.params_per_bucket):
            for offset, param in enumerate(params):
                for rank in self._ranks_of(param):
                    if bucket in ranks[rank]:
                        ranks[rank][bucket].parameters.append(param)
                    else:
                        ranks[rank][bucket] = _DDPBucketAssignment(bucket, [param], offset)
        return ranks

    def _get_assigned_rank(self, bucket_index: int) -> int:
        """The rank that updates most of a DDP bucket."""
        elements = [0] * self.world_size
        for param in self._overlap_info.params_per_bucket[bucket_index]:
            for part in self.engine.owners(self._index_of[param]):
                elements[part.rank] += part.end - part.begin
        return elements.index(max(elements))

    def _init_zero_for_overlap(self) -> None:
        """All is set up at construction already."""
        self._overlap_info.status = _OverlapStatus.INITIALIZED

    def _check_overlap_initialized(self) -> None:
        """Never raises: nothing waits for DDP's buckets."""


# Code that asks for torch's class finds ours.
_TorchZeroRedundancyOptimizer.register(ZeroRedundancyOptimizer)
