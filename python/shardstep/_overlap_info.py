"""What the overlap hooks know about DDP's buckets. The names are torch's."""

import enum
from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import GradBucket

from shardstep._C import Pending


class _OverlapStatus(enum.IntEnum):
    """How far overlapping is set up. Ours needs only the first bucket, whatever DDP rebuilds."""

    UNINITIALIZED = 0
    DDP_HAS_REBUILT_BUCKETS = 1
    INITIALIZED = 2


class _DDPBucketAssignment:
    """The parameters of one DDP bucket that one rank updates, all or in part.

    `offset` is the position of the first of them in the bucket.
    """

    def __init__(self, bucket_index: int, parameters: list[torch.Tensor], offset: int) -> None:
        if not parameters:
            raise ValueError("shardstep: expected the parameters of an assignment, got none")
        self.bucket_index = bucket_index
        self.parameters = parameters
        self.offset = offset
        self.device: torch.device = parameters[0].device
        self.tensor: torch.Tensor | None = None


class _OverlapInfo:
    """DDP's buckets as last seen, and what is under way in this iteration."""

    def __init__(self, world_size: int) -> None:
        self.status = _OverlapStatus.UNINITIALIZED
        self.shard_buckets = False
        self.params_per_bucket: list[list[torch.Tensor]] = []
        self.params_per_rank: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        self.offsets: dict[int, int] = {}
        self.assigned_ranks_per_bucket: list[set[int]] = []
        self.num_bucket_assignments = 0
        self.total_size: int | None = None
        self.broadcast_handles: list[Pending] = []
        self.bucket_indices_seen: list[int] = []
        self.bucket_index_to_future: dict[int, torch.futures.Future[torch.Tensor]] = {}
        self.bucket_index_to_bucket: dict[int, GradBucket] = {}

    def wait_for_broadcasts(self) -> None:
        """Returns when the parameters that were sent have arrived."""
        handles, self.broadcast_handles = self.broadcast_handles, []
        for handle in handles:
            handle.wait()

    def clear_per_iter_info(self) -> None:
        self.bucket_indices_seen.clear()
        self.bucket_index_to_future.clear()
        self.bucket_index_to_bucket.clear()

    def see(
        self,
        bucket: GradBucket,
        future: torch.futures.Future[torch.Tensor],
        rank: int,
        owners: Callable[[torch.Tensor], Sequence[int]],
    ) -> None:
        """Records a bucket that DDP has filled. `owners` returns a parameter's owners."""
        self.status = _OverlapStatus.INITIALIZED
        index, params = bucket.index(), bucket.parameters()
        if index == 0:
            self.clear_per_iter_info()
        self.bucket_indices_seen.append(index)
        self.bucket_index_to_future[index] = future
        self.bucket_index_to_bucket[index] = bucket
        known = self.params_per_bucket
        if index < len(known) and _same(known[index], params):
            return
        self.params_per_bucket = [*known[:index], params]
        self._assign(rank, owners)

    def _assign(self, rank: int, owners: Callable[[torch.Tensor], Sequence[int]]) -> None:
        self.params_per_rank = [[] for _ in self.params_per_rank]
        self.offsets = {}
        self.assigned_ranks_per_bucket = []
        for index, params in enumerate(self.params_per_bucket):
            ranks: set[int] = set()
            for param in params:
                for owner in owners(param):
                    if owner == rank:
                        self.offsets.setdefault(index, len(self.params_per_rank[rank]))
                    self.params_per_rank[owner].append(param)
                    ranks.add(owner)
            self.assigned_ranks_per_bucket.append(ranks)
        self.num_bucket_assignments = sum(map(len, self.assigned_ranks_per_bucket))
        self.total_size = sum(p.numel() for params in self.params_per_bucket for p in params)


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
