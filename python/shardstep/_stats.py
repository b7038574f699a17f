"""What an optimizer has done on this rank: time by phase, bytes, memory."""

import logging
import time
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from shardstep._sharded_optimizer import ShardedOptimizer
from shardstep._text import size

_WAITING = ("reduce", "compare", "gather", "arrive")
_COMPUTING = ("post", "update")


class StatsMethods(ShardedOptimizer):
    """stats and related methods."""

    _traffic_before: tuple[int, int, int]
    """Bytes sent, received and shared at the last reset_stats()."""

    def stats(self) -> dict[str, Any]:
        """Where this rank's time and memory went, and what it has sent, since reset_stats().

        `phases` says by name how often a phase ran (`calls`) and how long it took (`seconds`):

        - post: hands over the gradients of a bucket, in the backward pass
        - reduce: takes the sum of a bucket; waits for other ranks
        - compare: begins step(); waits until all ranks are there
        - update: runs the local optimizer; not counted in a step with a closure
        - gather: sends parameters; waits for other ranks
        - arrive: with overlap_forward, waits for parameters later

        The profiler shows the same phases as `shardstep::<name>`. `seconds_waiting` adds up the
        phases that wait for other ranks, which also move the bytes, and `seconds_computing` the
        others. Bytes are counted by link: `bytes_sent` and `bytes_received` in messages of the
        process group, which with the hierarchical exchange are those between hosts, and
        `bytes_shared` as this rank copied them into memory that the ranks of a host share. Not
        collective.
        """
        times = self.engine.phase_times()
        sent, received, shared = self._traffic_before
        traffic = self.engine.traffic
        return {
            "phases": {
                name: {"calls": calls, "seconds": seconds}
                for name, (calls, seconds) in times.items()
            },
            "seconds_waiting": sum(times[name][1] for name in _WAITING),
            "seconds_computing": sum(times[name][1] for name in _COMPUTING),
            "exchange": self.engine.exchange,
            "bytes_sent": traffic.bytes_sent - sent,
            "bytes_received": traffic.bytes_received - received,
            "bytes_shared": traffic.bytes_shared - shared,
            "buckets": self.engine.bucket_count,
            "state_bytes": self._state_bytes(),
            "gradient_bytes": self.engine.gradient_bytes,
            "flat_parameter_bytes": sum(
                part.nbytes for bucket in self.engine.flat_buckets() for part in bucket
            ),
        }

    def reset_stats(self) -> None:
        """Sets times and bytes to 0."""
        self.engine.reset_phase_times()
        traffic = self.engine.traffic
        self._traffic_before = (
            traffic.bytes_sent,
            traffic.bytes_received,
            traffic.bytes_shared,
        )

    def log_stats(
        self, every: int = 100, logger: logging.Logger | None = None, level: int = logging.INFO
    ) -> RemovableHandle:
        """Logs one line per `every` steps: where their time went, and what was sent.

        Without a `logger`, the one called "shardstep" is used. Returns a handle whose remove() ends
        the logging. Each line covers the steps since the last one, and calls reset_stats().
        """
        if every < 1:
            raise ValueError(f"shardstep: expected a line per 1 step or more, got {every}")
        log = logger if logger is not None else logging.getLogger("shardstep")
        steps, began = 0, time.perf_counter()
        self.reset_stats()

        def after_step(*_: Any) -> None:
            nonlocal steps, began
            steps += 1
            if steps % every:
                return
            now = time.perf_counter()
            log.log(level, "%s", self._line(steps, every, now - began))
            began = now
            self.reset_stats()

        return self.register_step_post_hook(after_step)

    def _line(self, step: int, steps: int, seconds: float) -> str:
        stats = self.stats()
        phases = ", ".join(
            f"{name} {phase['seconds'] / steps * 1e3:.1f} ms"
            for name, phase in stats["phases"].items()
            if phase["calls"]
        )
        return (
            f"rank {self.rank} of {self.world_size}: step {step}: {seconds / steps * 1e3:.1f} ms "
            f"per step ({phases}); sent {size(stats['bytes_sent'] / steps)} and shared "
            f"{size(stats['bytes_shared'] / steps)} per step by {stats['exchange']}; "
            f"state {size(stats['state_bytes'])}, gradients {size(stats['gradient_bytes'])}"
        )

    def _state_bytes(self) -> int:
        values = (v for v in self.optim.state.values() if isinstance(v, dict))
        tensors = [t for v in values for t in v.values() if isinstance(t, torch.Tensor)]
        masters = (self.engine.saved_master(local.index) for local in self._local)
        return sum(t.nbytes for t in (*tensors, *(m for m in masters if m is not None)))
