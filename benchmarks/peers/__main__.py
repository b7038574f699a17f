"""One training iteration, ours beside its peers: DDP, torch's ZeRO, FSDP2, DeepSpeed.

The model is 20 x Linear(2000) (that of torch's ZeRO tutorial), Adam, batch 20, one thread per rank,
on Gloo; on one host, and on hosts made of namespaces with links of a given rate; and 100 x
Linear(64) over sockets. Every contestant alternates with
torch's ZeRO with fused Adam, and with whatever else a goal names, a few iterations at a time, so
that other load affects all of them; and again in fresh processes, since a process's placement in
memory matters too. Columns:

  iteration  milliseconds of zero_grad, forward, backward and step, on the slowest rank; a turn ends
             when all that its last step sent has arrived
  x ...      the iteration of torch's ZeRO with fused Adam divided by this one's: above 1 is faster;
             the median of the turns' ratios
  step       milliseconds of step() alone, on the slowest rank
  CPU        milliseconds of processor time per iteration, all ranks and their threads
  PSS        peak proportional set size of a rank, read by a thread during separate iterations,
             when no other contestant is running
  sent       MB that a rank's TCP sockets sent per iteration
  link       MB that a host sent over its link per iteration, by the interface's counter
  loss       after the last timed iteration, the ranks' mean: all but compute alone must agree

With --trials, all rows of a case take turns in one match, and no memory is read.

Medians over turns; PSS is the largest. MB are 10^6 bytes. DeepSpeed is installed into
build/peers-deepspeed on first use. What cannot run here is skipped, with the reason.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import deepspeed_environment
import link
import report
from contest import (
    BASE,
    LINK_ROWS,
    ONE_HOST_ROWS,
    ROWS,
    TINY_ROWS,
    TRIALS,
    Case,
    Hosts,
    Row,
    opponents,
)
from table import Table, markdown

from launch import Environment, Place, Ranks, RanksFailed, progress

WARM_UP = 2  # iterations; DDP rebuilds its buckets after the first backward pass
BUILD = Path(__file__).resolve().parent.parent.parent / "build"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="*", default=[2, 4], help="on one host (default 2 4)")
    cases = ["2x1@1", "2x2@1", "3x2@1", "2x1@10"]
    add("--hosts", type=Hosts.parse, nargs="*", default=[Hosts.parse(case) for case in cases],
        help=f"hosts x ranks @ Gbit/s (default {' '.join(cases)})")  # fmt: skip
    add("--tiny", action=argparse.BooleanOptionalAction, default=True, help="100 x Linear(64)")
    add("--trials", nargs="*", choices=TRIALS, metavar="NAME",
        help="only the lines of README's table of hosts: each name takes one to three minutes; "
        f"of {', '.join(TRIALS)} (default all)")  # fmt: skip
    known = ", ".join(ROWS)
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"of {known}")
    add("--layers", type=int, default=20, help="fewer for a quick look (default 20)")
    add("--matches", type=int, default=2, help="of each contestant (default 2)")
    add("--turns", type=int, default=5, help="of each in a match (default 5)")
    add("--iterations", type=int, default=2, help="in a turn (default 2)")
    add("--link-turns", type=int, default=2, help="with several hosts (default 2)")
    add("--timeout", type=float, default=300, help="seconds a turn may take (default 300)")
    add("--json", type=Path, metavar="FILE", default=BUILD / "peers.json")
    add("--plot", type=Path, metavar="FILE", default=BUILD / "peers.png")
    arguments = parser.parse_args()
    for name in ("layers", "matches", "turns", "iterations", "link_turns"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    if any(ranks < 2 for ranks in arguments.ranks):
        parser.error("--ranks: expected at least 2")
    return arguments


@dataclasses.dataclass(frozen=True)
class Arena:
    """Where the matches of a case are held."""

    case: Case
    place: Place
    environments: dict[bool, Environment]
    arguments: argparse.Namespace

    def ranks_of(self, row: Row) -> Ranks:
        options = ["--maker", row.maker, "--options", json.dumps(row.options)]
        options += ["--layers", str(self.case.layers), "--model", self.case.model]
        environment = self.environments[row.deepspeed]
        return Ranks(self.place, environment, options, self.arguments.timeout)

    def hold_match(self, row: Row, others: list[Row], record: report.Record) -> None:
        """Adds the turns to the record. Memory is read when the others are gone."""
        iterations = self.arguments.iterations
        turns = self.arguments.link_turns if self.case.hosts else self.arguments.turns
        if self.case.model == "tiny":
            iterations *= 20
        with self.ranks_of(row) as ranks:
            with contextlib.ExitStack() as stack:
                field = {one.name: stack.enter_context(self.ranks_of(one)) for one in others}
                field[row.name] = ranks
                for one in field.values():
                    one.iterate(WARM_UP)
                names = list(field)
                for turn in range(turns if others else 0):
                    start = turn % len(names)  # none always follows the same one
                    order = names[start:] + names[:start]
                    record.turns.append({name: field[name].iterate(iterations) for name in order})
            pss = ranks.peak_memory()
            record.pss[row.name] = max(pss, record.pss.get(row.name, 0))


def hold_trial(arena: Arena, record: report.Record) -> None:
    """All rows of the case in one match. No memory is read."""
    iterations = 40 if arena.case.model == "tiny" else 1
    slow = arena.case.hosts is not None and arena.case.hosts.gbit <= 1
    turns = arena.arguments.link_turns if slow else arena.arguments.turns
    with contextlib.ExitStack() as stack:
        rows = [ROWS[key] for key in arena.case.rows]
        field = {row.name: stack.enter_context(arena.ranks_of(row)) for row in rows}
        for ranks in field.values():
            ranks.iterate(WARM_UP)
        names = list(field)
        for turn in range(2 * turns):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            record.turns.append({name: field[name].iterate(iterations) for name in order})
    progress(f"peers: {arena.case} (load {os.getloadavg()[0]:.1f})")


def run_case(arena: Arena, record: report.Record) -> None:
    """A row that fails is left out."""
    rows = [ROWS[key] for key in arena.case.rows]
    for number, row in enumerate(rows):
        where = f"peers: {arena.case}, {number + 1} of {len(rows)}, {row.name}"
        others = [other for other in opponents(row, arena.case.place) if other in rows]
        try:
            for _ in range(arena.arguments.matches if others else 1):
                arena.hold_match(row, others, record)
        except RanksFailed as error:
            progress(f"{where}: left out, {error}")
            for turn in record.turns:
                turn.pop(row.name, None)
        else:
            ratio = f"{report.speed(record.turns, row.name, BASE.name):.2f}x" if others else "base"
            progress(f"{where}: {ratio} (load {os.getloadavg()[0]:.1f})")


def run_cases(
    arguments: argparse.Namespace,
    keys: list[str],
    environments: dict[bool, Environment],
    records: dict[Case, report.Record],
) -> None:
    """Adds to the records as it goes on."""

    def chosen(rows: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(key for key in rows if key in keys)

    def run(case: Case, place: Place) -> None:
        records[case] = report.Record()
        run_case(Arena(case, place, environments, arguments), records[case])

    if arguments.tiny:
        run(Case(2, None, chosen(TINY_ROWS), 100, "tiny"), Place([[]] * 2, "lo"))
    for ranks in arguments.ranks:
        run(Case(ranks, None, chosen(ONE_HOST_ROWS), arguments.layers), Place([[]] * ranks, "lo"))
    for hosts in arguments.hosts:
        with place_of(hosts) as place:
            if place:
                ranks = hosts.count * hosts.ranks_each
                run(Case(ranks, hosts, chosen(LINK_ROWS), arguments.layers), place)


@contextlib.contextmanager
def place_of(hosts: Hosts) -> Iterator[Place | None]:
    """None where hosts are not permitted."""
    with contextlib.ExitStack() as stack:
        try:
            made = stack.enter_context(link.linked_hosts(hosts.count, hosts.gbit))
        except link.NotPermitted as error:
            progress(f"peers: {hosts} is skipped: {error}")
            yield None
            return
        prefixes = [host.prefix() for host in made for _ in range(hosts.ranks_each)]
        yield Place(prefixes, link.INTERFACE, lambda: [host.bytes_sent() for host in made])


def run_trials(
    arguments: argparse.Namespace,
    environments: dict[bool, Environment],
    records: dict[Case, report.Record],
) -> None:
    for name in arguments.trials or TRIALS:
        case = TRIALS[name].case(arguments.layers)
        with place_of(case.hosts) if case.hosts else local_place(case.ranks) as place:
            if not place:
                continue
            records[case] = report.Record()
            try:
                hold_trial(Arena(case, place, environments, arguments), records[case])
            except RanksFailed as error:
                progress(f"peers: {case} is left out, {error}")


def local_place(ranks: int) -> contextlib.nullcontext[Place]:
    return contextlib.nullcontext(Place([[]] * ranks, "lo"))


def main() -> None:
    arguments = parse_arguments()
    # As Ctrl-C: ranks and namespaces must not outlive a run that `timeout` stops.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    keys = [key for key in ROWS if key in arguments.rows or ROWS[key] is BASE]
    environments = {False: Environment(Path(sys.executable), {})}
    if arguments.trials is None and any(ROWS[key].deepspeed for key in keys):
        try:
            environments[True] = deepspeed_environment.prepare()
        except deepspeed_environment.NotInstalled as error:
            progress(f"peers: DeepSpeed is skipped: {error}")
            keys = [key for key in keys if not ROWS[key].deepspeed]

    records: dict[Case, report.Record] = {}
    stopped = False
    try:
        if arguments.trials is None:
            run_cases(arguments, keys, environments, records)
        else:
            run_trials(arguments, environments, records)
    except KeyboardInterrupt:
        stopped = True
        progress("peers: stopped; this is what was measured until then")
    tables = {
        case: report.tabulate(record, [ROWS[key] for key in case.rows])
        for case, record in records.items()
    }
    tables = {case: table for case, table in tables.items() if table}
    for case, table in tables.items():
        print(f"\n{markdown(str(case), report.COLUMNS, table)}", flush=True)
    print(f"\n{report.goals(records, tables)}".rstrip(), flush=True)
    write(arguments, records, tables)
    odd = {str(case): report.odd_losses(records[case].turns) for case in tables}
    if any(odd.values()):
        raise SystemExit(f"peers: the loss of these rows differs from torch's ZeRO's: {odd}")
    if stopped:
        raise SystemExit(130)


def write(
    arguments: argparse.Namespace,
    records: dict[Case, report.Record],
    tables: dict[Case, Table],
) -> None:
    contents = [
        {**dataclasses.asdict(case), **dataclasses.asdict(records[case]), "summary": table}
        for case, table in tables.items()
    ]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(contents, indent=1) + "\n")
    progress(f"peers: wrote {arguments.json}")
    if tables and arguments.trials is None:
        report.plot(tables, arguments.plot)
        progress(f"peers: wrote {arguments.plot}")


if __name__ == "__main__":
    main()
