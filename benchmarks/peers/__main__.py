"""One training iteration, ours beside its peers: DDP, torch's ZeRO, FSDP2, DeepSpeed.

The model is 20 x Linear(2000) (that of torch's ZeRO tutorial), Adam, batch 20, one thread a rank,
on Gloo; on one host, and with 1 Gbit/s between two network namespaces, where ours is told to use
sockets only, since it would notice that the memory is one. Contestants take turns in every round,
each in fresh processes. Columns:

  iteration  milliseconds of zero_grad, forward, backward and step, on the slowest rank, from the
             end of one step to that of the next
  x ...      the iteration of torch's ZeRO with fused Adam to this one's: above 1 is faster;
             the median of each round's ratio
  step       milliseconds of step() alone, on the slowest rank
  CPU        milliseconds of processor time of an iteration, all ranks and their threads
  PSS        peak proportional set size of a rank, read by a thread during iterations of its own
  sent       MB that a rank's TCP sockets sent in an iteration
  loss       after the last timed iteration, the ranks' mean: all but compute alone must agree

Medians over iterations and rounds; PSS is the largest. MB are 10^6 bytes. DeepSpeed is installed
into build/peers-deepspeed on first use. What cannot run here is skipped, with the reason.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import deepspeed_environment
import link
import report
from contest import BASE, LINK_ROWS, ROWS, Case
from launch import Environment, Place, Readings, TurnFailed, progress, run_ranks

BUILD = Path(__file__).resolve().parent.parent.parent / "build"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="*", default=[2, 4], help="on one host (default 2 4)")
    add("--link", action=argparse.BooleanOptionalAction, default=True, help="the 1 Gbit/s case")
    known = ", ".join(ROWS)
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=f"of {known}")
    add("--layers", type=int, default=20, help="fewer for a quick look (default 20)")
    add("--rounds", type=int, default=5)
    add("--iterations", type=int, default=8, help="timed iterations a turn (default 8)")
    add("--link-rounds", type=int, default=2)
    add("--link-iterations", type=int, default=3)
    add("--timeout", type=float, default=300, help="seconds a turn may take (default 300)")
    add("--json", type=Path, metavar="FILE", default=BUILD / "peers.json")
    add("--plot", type=Path, metavar="FILE", default=BUILD / "peers.png")
    arguments = parser.parse_args()
    for name in ("layers", "rounds", "iterations", "link_rounds", "link_iterations"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1")
    if any(ranks < 2 for ranks in arguments.ranks):
        parser.error("--ranks: expected at least 2")
    return arguments


def run_case(
    case: Case, place: Place, rounds: int, environments: dict[bool, Environment], timeout: float
) -> Iterator[report.Rounds]:
    """The rounds so far, after each turn. A row that fails once is left out from then on."""
    readings: report.Rounds = []
    rows = [ROWS[key] for key in case.rows]
    for number in range(rounds):
        turn: dict[str, Readings] = {}
        readings.append(turn)
        # Each round starts with another contestant, so that none always follows the same one.
        start = number % max(1, len(rows))
        for row in rows[start:] + rows[:start]:
            where = f"peers: {case}, round {number + 1} of {rounds}, {row.name}"
            arguments = ["--maker", row.maker, "--options", json.dumps(row.options)]
            arguments += ["--layers", str(case.layers), "--iterations", str(case.iterations)]
            try:
                turn[row.name] = run_ranks(place, environments[row.deepspeed], arguments, timeout)
            except TurnFailed as error:
                progress(f"{where}: left out, {error}")
                rows.remove(row)
                continue
            milliseconds = statistics.median(turn[row.name]["iteration"])
            progress(f"{where}: {milliseconds:.0f} ms (load {os.getloadavg()[0]:.1f})")
            yield readings


def all_turns(
    arguments: argparse.Namespace, keys: list[str], environments: dict[bool, Environment]
) -> Iterator[tuple[Case, report.Rounds]]:
    """Each case's rounds so far, after each turn."""
    for ranks in arguments.ranks:
        case = Case(ranks, False, tuple(keys), arguments.layers, arguments.iterations)
        place = Place([[]] * ranks, "lo")
        for rounds in run_case(case, place, arguments.rounds, environments, arguments.timeout):
            yield case, rounds
    if not arguments.link:
        return
    link_keys = tuple(key for key in LINK_ROWS if key in keys)
    case = Case(2, True, link_keys, arguments.layers, arguments.link_iterations)
    count = arguments.link_rounds
    try:
        with link.gigabit_link() as prefixes:
            place = Place(prefixes, link.INTERFACE)
            for rounds in run_case(case, place, count, environments, arguments.timeout):
                yield case, rounds
    except link.NotPermitted as error:
        progress(f"peers: 1 Gbit/s is skipped: {error}")


def main() -> None:
    arguments = parse_arguments()
    # As Ctrl-C: ranks and namespaces must not outlive a run that `timeout` stops.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    keys = [key for key in ROWS if key in arguments.rows or ROWS[key] is BASE]
    environments = {False: Environment(Path(sys.executable), {})}
    if any(ROWS[key].deepspeed for key in keys):
        try:
            environments[True] = deepspeed_environment.prepare()
        except deepspeed_environment.NotInstalled as error:
            progress(f"peers: DeepSpeed is skipped: {error}")
            keys = [key for key in keys if not ROWS[key].deepspeed]

    readings: dict[Case, report.Rounds] = {}
    stopped = False
    try:
        for case, rounds in all_turns(arguments, keys, environments):
            readings[case] = rounds
    except KeyboardInterrupt:
        stopped = True
        progress("peers: stopped; this is what was measured until then")
    tables = {
        case: report.tabulate(rounds, [ROWS[key] for key in case.rows])
        for case, rounds in readings.items()
    }
    tables = {case: table for case, table in tables.items() if table}
    for case, table in tables.items():
        print(f"\n{report.markdown(case, table)}", flush=True)
    print(f"\n{report.goals(readings, tables)}".rstrip(), flush=True)
    write(arguments, readings, tables)
    odd = {str(case): report.odd_losses(readings[case], table) for case, table in tables.items()}
    if any(odd.values()):
        raise SystemExit(f"peers: the loss of these rows differs from the others': {odd}")
    if stopped:
        raise SystemExit(130)


def write(
    arguments: argparse.Namespace,
    readings: dict[Case, report.Rounds],
    tables: dict[Case, report.Table],
) -> None:
    contents = [
        {**dataclasses.asdict(case), "rounds": readings[case], "summary": table}
        for case, table in tables.items()
    ]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(contents, indent=1) + "\n")
    progress(f"peers: wrote {arguments.json}")
    if tables:
        report.plot(tables, arguments.plot)
        progress(f"peers: wrote {arguments.plot}")


if __name__ == "__main__":
    main()
