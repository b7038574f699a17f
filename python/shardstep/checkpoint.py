"""Looks into checkpoints, verifies them, and converts them to and from torch.save's files.

A checkpoint is the directory that optimizer.save_checkpoint() wrote, at any number of ranks, from
Python or C++. Nothing here needs a process group, and no more than one tensor is in memory.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardstep._C import Checkpoint, CheckpointTensor, export_state_dict, import_state_dict
from shardstep._progress import ProgressBar

__all__ = ["main"]

_EXAMPLES = """
examples:
  python -m shardstep.checkpoint inspect run/checkpoint          what is in it
  python -m shardstep.checkpoint inspect run/checkpoint --json   the same, for programs
  python -m shardstep.checkpoint verify run/checkpoint           is every byte as it was written?
  python -m shardstep.checkpoint convert run/checkpoint adam.pt  for a plain torch.optim optimizer:
      optimizer.load_state_dict(torch.load("adam.pt", weights_only=True))
  python -m shardstep.checkpoint convert adam.pt run/checkpoint  and back, for any number of ranks:
      optimizer.load_checkpoint("run/checkpoint")

exit status: 0 all is well, 1 the checkpoint is damaged, 2 it could not be done.
"""


def _size(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.0f} B" if units[0] == "B" else f"{count:.1f} {units[0]}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> Iterator[str]:
    """Aligned columns, those in `right` to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        cells = (
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _dtype(tensor: CheckpointTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(shape: Sequence[int] | None) -> str:
    return "?" if shape is None else " x ".join(map(str, shape)) or "()"


def _simple(value: Any) -> Any:
    """A value as JSON has it; what JSON has no word for, in Python's."""
    if isinstance(value, (bool, int, str, type(None))):
        return value
    if isinstance(value, float):
        return value if abs(value) < float("inf") else repr(value)
    if isinstance(value, (list, tuple)):
        return [_simple(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _simple(item) for key, item in value.items()}
    return repr(value)


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """All that inspect shows."""
    return {
        "directory": checkpoint.directory,
        "id": checkpoint.id,
        "world_size": checkpoint.world_size,
        "stage": checkpoint.stage,
        "sharding": checkpoint.sharding,
        "files": [
            {"name": file.name, "rank": file.rank, "bytes": file.bytes} for file in checkpoint.files
        ],
        "param_groups": [_simple(group) for group in checkpoint.param_groups],
        "parameters": [
            {"name": parameter.name, "shape": _simple(parameter.shape)}
            for parameter in checkpoint.parameters
        ],
        "values": _simple(checkpoint.values),
        "extra": _simple(checkpoint.extra),
        "tensors": {
            name: {
                "dtype": _dtype(tensor),
                "shape": list(tensor.shape),
                "bytes": tensor.nbytes,
                "shards": sorted({part.file for part in tensor.parts}),
            }
            for name, tensor in checkpoint.tensors.items()
        },
        "bytes": sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
    }


def _inspect(arguments: argparse.Namespace) -> int:
    checkpoint = Checkpoint(arguments.directory)
    if arguments.json:
        print(json.dumps(_describe(checkpoint), indent=1))
        return 0
    for line in _lines(checkpoint):
        print(line)
    return 0


def _lines(checkpoint: Checkpoint) -> Iterator[str]:
    ranks = f"{checkpoint.world_size} rank" + "s" * (checkpoint.world_size != 1)
    yield f"checkpoint {checkpoint.directory}"
    yield f"saved by {ranks}, stage {checkpoint.stage}, sharded by {checkpoint.sharding}"
    for number, group in enumerate(checkpoint.param_groups):
        params = group["params"]
        yield f"\nparam group {number}: {len(params)} parameters"
        for key, value in group.items():
            if key != "params":
                yield f"  {key} = {value!r}"
    if checkpoint.extra is not None:
        yield f"\nextra: {checkpoint.extra!r}"

    rows = [
        (name, _dtype(tensor), _shape(tensor.shape), str(len(tensor.parts)), _size(tensor.nbytes))
        for name, tensor in checkpoint.tensors.items()
    ]
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    rows.append((f"{len(rows)} tensors", "", "", "", _size(total)))
    yield ""
    yield from _table(("tensor", "dtype", "shape", "parts", "size"), rows, right={3, 4})
    if checkpoint.values:
        yield ""
        values = [(name, repr(value)) for name, value in checkpoint.values.items()]
        yield from _table(("value", ""), values, right=set())
    files = [(file.name, str(file.rank), _size(file.bytes)) for file in checkpoint.files]
    files.append((f"{len(files)} files", "", _size(sum(file.bytes for file in checkpoint.files))))
    yield ""
    yield from _table(("file", "rank", "size"), files, right={1, 2})


def _verify(arguments: argparse.Namespace) -> int:
    if not os.path.exists(os.path.join(arguments.directory, "index.json")):
        Checkpoint(arguments.directory)  # says what is wrong with that
    damages: list[str] = []

    def attempt(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except (ValueError, RuntimeError) as error:
            if (damage := _one_line(error)) not in damages:  # one file may lack many tensors
                damages.append(damage)

    checkpoint = attempt(lambda: Checkpoint(arguments.directory))
    if checkpoint is not None:
        attempt(checkpoint.verify_headers)
        total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        with ProgressBar("verifying", total) as bar:
            for name, tensor in checkpoint.tensors.items():
                attempt(lambda name=name: checkpoint.verify(name))  # type: ignore[misc]
                bar.advance(tensor.nbytes)
    for damage in damages:
        print(f"damaged: {damage}", file=sys.stderr)
    if damages:
        return 1
    count = f"{len(checkpoint.tensors)} tensors in {len(checkpoint.files)} files"
    print(f"{arguments.directory}: all is well: {count}, {_size(total)}")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    to_file = os.path.isdir(arguments.source)
    taken = os.path.lexists(arguments.target) and (
        to_file or not os.path.isdir(arguments.target) or os.listdir(arguments.target)
    )
    if taken and not arguments.force:
        raise ValueError(f"{arguments.target} is there already; --force replaces it")
    convert = export_state_dict if to_file else import_state_dict
    with ProgressBar("converting") as bar:
        convert(arguments.source, arguments.target, bar.show)
    print(f"{arguments.target}: {'a torch.save file' if to_file else 'a checkpoint'}")
    return 0


def _one_line(error: BaseException) -> str:
    """What went wrong, without where in C++ it did."""
    return str(error).splitlines()[0].removeprefix("shardstep: ")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m shardstep.checkpoint",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    inspect = commands.add_parser(
        "inspect", help="show tensors, sizes, shards and hyper-parameters; reads the index only"
    )
    inspect.add_argument("directory", metavar="DIR", help="the checkpoint")
    inspect.add_argument("--json", action="store_true", help="for programs")
    inspect.set_defaults(run=_inspect)

    verify = commands.add_parser("verify", help="compare every byte with its checksum")
    verify.add_argument("directory", metavar="DIR", help="the checkpoint")
    verify.set_defaults(run=_verify)

    convert = commands.add_parser(
        "convert",
        help="make a torch.save file of a checkpoint, or a checkpoint of such a file",
        description="Converts the optimizer's state, one tensor in memory at a time. Module "
        "parameters and random states that a checkpoint may have besides stay behind.",
    )
    convert.add_argument(
        "source", metavar="SOURCE", help="a checkpoint, or a file of torch.save(state_dict)"
    )
    convert.add_argument("target", metavar="TARGET", help="the file or the directory to make")
    convert.add_argument("--force", action="store_true", help="replace what is there")
    convert.set_defaults(run=_convert)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen)  # type: ignore[no-any-return]
    except (OSError, RuntimeError, ValueError) as error:
        print(f"{parser.prog}: error: {_one_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
