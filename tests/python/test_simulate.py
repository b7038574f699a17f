"""The simulator of exchanges: its plans are those of the exchanges, and it agrees with what was
measured."""

import collections
import sys
from pathlib import Path

import pytest
from shardstep._C import default_bucket_cap_mb

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import simulate
from simulate import Cluster, Work


@pytest.mark.parametrize("name", ["ours, pairwise", "ours, hierarchical"])
@pytest.mark.parametrize(("hosts", "ranks_each"), [(2, 1), (2, 2), (3, 2), (4, 3), (5, 1)])
def test_the_plan_of_a_host_is_the_sum_of_its_messages(name, hosts, ranks_each):
    cluster, work = Cluster(hosts, ranks_each), Work(bytes=1e6, bucket=1e6)
    plan = simulate.PLANS[name](cluster, work)
    sent: dict[int, float] = collections.Counter()
    messages: dict[int, int] = collections.Counter()
    for source, target, size in simulate.transfers(name, cluster, work.bytes):
        assert source // ranks_each != target // ranks_each
        sent[source // ranks_each] += size
        messages[source] += 1
    assert len(sent) == hosts
    assert all(size == pytest.approx(plan.link_bytes()) for size in sent.values())
    between_hosts = plan.messages()
    if name == "ours, pairwise":
        between_hosts -= 2 * (ranks_each - 1)  # to ranks of the same host
    assert all(count == between_hosts for count in messages.values())


def test_each_byte_crosses_a_link_once():
    work = Work()
    for hosts in (2, 3, 8, 1024):
        plan = simulate.hierarchical(Cluster(hosts, 8), work)
        assert plan.link_bytes() == pytest.approx(2 * work.bytes * (hosts - 1) / hosts)


def test_buckets_follow_the_rule_of_the_optimizer():
    for hosts in (2, 50, 200, 2000):
        rule = default_bucket_cap_mb(2 * hosts) * 2**20
        assert simulate.our_bucket(Cluster(hosts, 2), Work()) == rule


def test_agrees_with_what_was_measured():
    for name, cluster, simulated, measured in simulate.check():
        assert simulated == pytest.approx(measured, rel=0.15), (name, cluster)
