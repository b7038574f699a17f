"""Inspects and verifies checkpoints, and converts them to and from files of torch.save.

A checkpoint is a directory that optimizer.save_checkpoint() wrote, on any number of ranks, from
Python or C++. Nothing here needs a process group, and at most one tensor is in memory at a time.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardstep._C import CheckpointTensor, export_state_dict, import_state_dict
from shardstep._progress import ProgressBar
from shardstep._text import one_line, run_command, size, table
from shardstep._weights import Checkpoint, export_weights

__all__ = ["main"]

_EXAMPLES = """
examples:
  python -m shardstep.checkpoint inspect run/checkpoint          what is in it
  python -m shardstep.checkpoint inspect run/checkpoint --json   the same as JSON
  python -m shardstep.checkpoint verify run/checkpoint           is every byte as it was written?
  python -m shardstep.checkpoint convert run/checkpoint adam.pt  for a plain torch.optim optimizer:
      optimizer.load_state_dict(torch.load("adam.pt", weights_only=True))
  python -m shardstep.checkpoint convert adam.pt run/checkpoint  and back, for any number of ranks:
      optimizer.load_checkpoint("run/checkpoint")
  python -m shardstep.checkpoint convert run/checkpoint model.safetensors   the weights:
      model.load_state_dict(safetensors.torch.load_file("model.safetensors"))

exit status: 0 success, 1 the checkpoint is damaged, 2 any other error.
"""


_INSPECT_EXAMPLES = """
examples:
  shardstep inspect run
  shardstep inspect runs/latest --json
"""
_VERIFY_EXAMPLES = """
examples:
  shardstep verify run
  shardstep verify runs/latest || echo "go back to an older one"

exit status: 0 every byte is as it was written, 1 something is damaged, 2 any other error.
"""
_CONVERT_EXAMPLES = """
examples:
  shardstep convert run model.safetensors
      model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
  shardstep convert run adam.pt
      optimizer.load_state_dict(torch.load("adam.pt", weights_only=True))
  shardstep convert adam.pt run-again
      optimizer.load_checkpoint("run-again")
"""


def _dtype(tensor: CheckpointTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(shape: Sequence[int] | None) -> str:
    return "?" if shape is None else " x ".join(map(str, shape)) or "()"


def _simple(value: Any) -> Any:
    """A value that JSON can represent; the repr() of one that it cannot."""
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
        (name, _dtype(tensor), _shape(tensor.shape), str(len(tensor.parts)), size(tensor.nbytes))
        for name, tensor in checkpoint.tensors.items()
    ]
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    rows.append((f"{len(rows)} tensors", "", "", "", size(total)))
    yield ""
    yield from table(("tensor", "dtype", "shape", "parts", "size"), rows, right={3, 4})
    if checkpoint.values:
        yield ""
        values = [(name, repr(value)) for name, value in checkpoint.values.items()]
        yield from table(("value", ""), values, right=set())
    files = [(file.name, str(file.rank), size(file.bytes)) for file in checkpoint.files]
    files.append((f"{len(files)} files", "", size(sum(file.bytes for file in checkpoint.files))))
    yield ""
    yield from table(("file", "rank", "size"), files, right={1, 2})


def _verify(arguments: argparse.Namespace) -> int:
    if not os.path.exists(os.path.join(arguments.directory, "index.json")):
        Checkpoint(arguments.directory)  # raises an error that says what is wrong
    damages: list[str] = []

    def attempt(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except (ValueError, RuntimeError) as error:
            if (damage := one_line(error)) not in damages:  # many tensors may share a bad file
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
    print(f"{arguments.directory}: all is well: {count}, {size(total)}")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    to_file = os.path.isdir(arguments.source)
    to_weights = to_file and arguments.target.endswith(".safetensors")
    taken = os.path.lexists(arguments.target) and (
        to_file or not os.path.isdir(arguments.target) or os.listdir(arguments.target)
    )
    if taken and not arguments.force:
        raise ValueError(f"{arguments.target} already exists; use --force to replace it")
    convert = export_weights if to_weights else export_state_dict if to_file else import_state_dict
    made = "weights" if to_weights else "a torch.save file" if to_file else "a checkpoint"
    with ProgressBar("converting") as bar:
        convert(arguments.source, arguments.target, bar.show)
    print(f"{arguments.target}: {made}")
    return 0


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """inspect, verify and convert."""

    def add_parser(name: str, help: str, description: str, epilog: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=help,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    inspect = add_parser(
        "inspect",
        help="show tensors, sizes, shards and hyper-parameters; reads only the index",
        description="Shows how a checkpoint was saved, hyper-parameters, tensors, sizes, files.\n"
        "Reads only the index, so it is fast for any size.",
        epilog=_INSPECT_EXAMPLES,
    )
    inspect.add_argument("directory", metavar="DIR", help="the checkpoint")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)

    verify = add_parser(
        "verify",
        help="compare every byte with its checksum",
        description="Reads a whole checkpoint, and names every tensor that is damaged.",
        epilog=_VERIFY_EXAMPLES,
    )
    verify.add_argument("directory", metavar="DIR", help="the checkpoint")
    verify.set_defaults(run=_verify)

    convert = add_parser(
        "convert",
        help="convert a checkpoint to weights or to optimizer state, or such state to a checkpoint",
        description="To TARGET.safetensors: the module's parameters and buffers, for `safetensors` "
        "and\nHugging Face's libraries. To any other file, and back: the optimizer's state.\n"
        "Random states are not converted. Holds one tensor in memory at a time.",
        epilog=_CONVERT_EXAMPLES,
    )
    convert.add_argument(
        "source", metavar="SOURCE", help="a checkpoint, or a file of torch.save(state_dict)"
    )
    convert.add_argument("target", metavar="TARGET", help="the file or directory to create")
    convert.add_argument("--force", action="store_true", help="replace an existing target")
    convert.set_defaults(run=_convert)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m shardstep.checkpoint",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_commands(parser.add_subparsers(metavar="COMMAND", required=True))
    return run_command(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
