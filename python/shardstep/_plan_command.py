"""`shardstep plan`."""

import argparse
import importlib
import importlib.util
import json
import os
import sys
from typing import Any

import torch

from shardstep._plan import plan
from shardstep._plan_model import Model
from shardstep._weights import Checkpoint

_GIB = 1 << 30
_EXAMPLES = """
MODEL is one of
  package.module:Name, file.py:Name     a class or function that returns a module; it is called with
                                        --arguments on the meta device, so it takes no memory
  model.safetensors                     a file of weights
  run                                   a checkpoint, as save_checkpoint() writes it

examples:
  shardstep plan --parameters 7e9 --memory-gib 80
  shardstep plan torch.nn:Transformer --arguments '{"d_model": 1024, "nhead": 16}' --ranks 2,4
  shardstep plan train.py:make_model --dtype bfloat16 --png plan.png
  shardstep plan --parameters 1.3e9 --ranks 8,16 --ranks-per-host 8 --network-gbit 10 \\
      --compute-ms 400
"""


def _json(name: str, text: str, kinds: tuple[type, ...], expected: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, kinds):
        raise ValueError(f"expected {name} to be {expected}, got {text}")
    return value


def _world_sizes(text: str) -> list[int]:
    try:
        return [int(size) for size in text.split(",")]
    except ValueError:
        raise ValueError(f"expected --ranks to be numbers such as 2,4,8, got {text}") from None


def _imported(name: str) -> Any:
    module_name, _, attribute = name.rpartition(":")
    if module_name.endswith(".py"):
        spec = importlib.util.spec_from_file_location("_shardstep_planned", module_name)
        if spec is None or spec.loader is None or not os.path.exists(module_name):
            raise ValueError(f"expected {module_name} to be a Python file, found none")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # it imports something that is not there
            raise ValueError(
                f"expected {module_name} to be a module that Python finds from here, found none"
            ) from None
        finally:
            sys.path.pop(0)
    if not hasattr(module, attribute):
        raise ValueError(f"expected {attribute} in {module_name}, found none")
    return getattr(module, attribute)


def _shapes_of_checkpoint(directory: str) -> list[torch.Tensor]:
    checkpoint = Checkpoint(directory)
    found = [
        torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        for parameter in checkpoint.parameters
        if parameter.shape is not None
    ]
    if not found:
        raise ValueError(f"the checkpoint {directory} does not say which shapes its parameters had")
    return found


def _shapes_of_safetensors(path: str) -> list[tuple[int, ...]]:
    """Reads the header alone: 8 bytes with its length, then JSON."""
    if not os.path.exists(path):
        raise ValueError(f"expected {path} to be a safetensors file, found none")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > os.path.getsize(path):
            raise ValueError(f"expected {path} to be a safetensors file, its header is damaged")
        header = json.loads(file.read(length))
    return [tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"]


def _model(arguments: argparse.Namespace) -> Model:
    if (arguments.model is None) == (arguments.parameters is None):
        raise ValueError("expected MODEL or --parameters, and not both")
    if arguments.parameters is not None:
        return float(arguments.parameters)
    name: str = arguments.model
    if os.path.isdir(name):
        return _shapes_of_checkpoint(name)
    if name.endswith(".safetensors"):
        return _shapes_of_safetensors(name)
    if ":" not in name:
        raise ValueError(
            f"expected MODEL as package.module:Name, file.py:Name, a .safetensors file or a "
            f"checkpoint, got {name!r}"
        )
    maker = _imported(name)
    given = _json("--arguments", arguments.arguments, (dict, list), "a JSON object or list")
    if isinstance(maker, torch.nn.Module):
        return maker
    positional, named = (given, {}) if isinstance(given, list) else ([], given)
    return lambda: maker(*positional, **named)


def _optimizer_class(name: str) -> Any:
    found = _imported(name) if ":" in name else getattr(torch.optim, name, None)
    if found is None:
        raise ValueError(f"expected an optimizer of torch.optim or package:Class, got {name!r}")
    return found


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"expected a dtype of torch, such as bfloat16, got {name!r}")
    return found


def _run(arguments: argparse.Namespace) -> int:
    gib, gbit = arguments.memory_gib, arguments.network_gbit
    options = _json("--options", arguments.options, (dict,), "a JSON object")
    made = plan(
        _model(arguments),
        _optimizer_class(arguments.optimizer),
        world_sizes=_world_sizes(arguments.ranks),
        ranks_per_host=arguments.ranks_per_host,
        memory_bytes=None if gib is None else gib * _GIB,
        dtype=_dtype(arguments.dtype),
        gradient_dtype=_dtype(arguments.gradient_dtype),
        other_bytes=arguments.other_gib * _GIB,
        network_bandwidth=None if gbit is None else gbit * 1e9 / 8,
        host_bandwidth=None if arguments.host_gbs is None else arguments.host_gbs * 1e9,
        compute_seconds=arguments.compute_ms / 1e3,
        **options,
    )
    print(json.dumps(made.as_dict(), indent=1) if arguments.json else made)
    if arguments.png is not None:
        made.save_png(arguments.png)
        print(f"{arguments.png}: a picture of it", file=sys.stderr)
    return 0


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "plan",
        help="memory per rank, traffic and time of a model, before it runs",
        description="Computes what a model needs under DDP, torch's ZeRO and ours. Nothing is "
        "allocated and nothing is trained.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="what to plan for; see below")
    add("--parameters", type=float, metavar="N", help="instead of MODEL, such as 7e9")
    add(
        "--arguments",
        metavar="JSON",
        default="{}",
        help="that MODEL is called with: object or list",
    )
    add(
        "--optimizer",
        metavar="NAME",
        default="AdamW",
        help="of torch.optim (AdamW), or package:Class",
    )
    add("--options", metavar="JSON", default="{}", help='of the optimizer: {"momentum": 0.9}')
    add("--dtype", metavar="NAME", help="of the parameters, if not the model's")
    add("--gradient-dtype", metavar="NAME", help="what stage 2 sends gradients in")
    add("--ranks", metavar="N,N", default="1,2,4,8,16,32,64", help="world sizes (1,2,4,...,64)")
    add("--ranks-per-host", type=int, metavar="N", default=8, help="that share its link (8)")
    add("--memory-gib", type=float, metavar="GIB", help="of each rank: on how many does it fit?")
    add("--other-gib", type=float, metavar="GIB", default=0, help="for activations, per rank")
    add("--network-gbit", type=float, metavar="GBIT", help="a host's link, in Gbit/s")
    add("--host-gbs", type=float, metavar="GB", help="between ranks of a host, in GB/s per rank")
    add(
        "--compute-ms", type=float, metavar="MS", default=0, help="of the forward and backward pass"
    )
    add("--png", metavar="FILE", help="draw memory per rank")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)
