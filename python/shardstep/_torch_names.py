"""Private names of torch's class that existing code uses."""

import torch
from torch.distributed.optim.utils import functional_optim_map

from shardstep._overlap_info import _DDPBucketAssignment, _OverlapStatus
from shardstep._param_groups import ParamGroup
from shardstep._sharded_optimizer import ShardedOptimizer


class TorchPrivateNames(ShardedOptimizer):
    """They behave as torch's do, even where our design does not need them."""

    functional_optim_map = functional_optim_map

    def _ranks_of(self, param: torch.Tensor) -> list[int]:
        index = self._index_of.get(param)
        return [] if index is None else [s.rank for s in self.engine.owners(index)]

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
                "shardstep: expected no params_per_rank, because ownership is fixed at "
                "construction, got some "
                f"{self._where()}"
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
        """Everything is set up at construction."""
        self._overlap_info.status = _OverlapStatus.INITIALIZED

    def _check_overlap_initialized(self) -> None:
        """Never raises: nothing waits for DDP's buckets."""
