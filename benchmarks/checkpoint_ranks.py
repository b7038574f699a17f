"""How costs per rank grow with the number of ranks that saved the old checkpoint: 1 to 512,
simulated.

Each of them left a shard with the state of its own parameter and a part of one that all share. One
process then saves over that checkpoint, and one loads a part of it. Columns:

  index     kB of index.json
  save      milliseconds that save_checkpoint blocks, asynchronous, onto that directory
  open      milliseconds until a loading rank has read and checked the index
  part      milliseconds until it has read one shard's part
"""

import json
import statistics
import tempfile
import time
import zlib
from itertools import pairwise
from pathlib import Path

from table import markdown

ELEMENTS = 4096
ROUNDS = 5


def simulate(directory: Path, ranks: int) -> None:
    """Writes the files that so many ranks would have written."""
    import torch

    id = "0123456789abcdef"
    data = torch.arange(float(ELEMENTS)).numpy().tobytes()
    checksum = f"{zlib.crc32(data):08x}"
    tensors: dict = {"state.0.sum": {"dtype": "F32", "shape": [ranks * ELEMENTS], "parts": []}}
    files = []
    for rank in range(ranks):
        begin = rank * ELEMENTS
        part = {"file": rank, "offset": 8, "checksums": checksum}
        tensors["state.0.sum"]["parts"].append({**part, "elements": [begin, begin + ELEMENTS]})
        own = {**part, "offset": 8 + len(data), "elements": [0, ELEMENTS]}
        tensors[f"state.{rank + 1}.sum"] = {"dtype": "F32", "shape": [ELEMENTS], "parts": [own]}
        name = f"shard-{id}-{rank}.safetensors"
        (directory / name).write_bytes(bytes(8) + data + data)
        files.append({"name": name, "rank": rank, "bytes": 8 + 2 * len(data)})
    shapes = [[ranks * ELEMENTS], *[[ELEMENTS]] * ranks]
    index = {
        "format": "shardstep checkpoint",
        "version": 1,
        "world_size": ranks,
        "stage": 1,
        "sharding": "element",
        "checksum": {"kind": "crc-32", "block": 1 << 20},
        "param_groups": [{"options": [["lr", 0.1]], "params": list(range(ranks + 1))}],
        "parameters": [{"name": None, "shape": shape, "dtype": "F32"} for shape in shapes],
        "state": {str(i): ["sum"] for i in range(ranks + 1)},
        "values": {},
        "extra": None,
        "files": files,
        "tensors": tensors,
    }
    rest = f'"id":"{id}",{json.dumps(index)[1:]}'.encode()
    (directory / "index.json").write_bytes(b'{"crc-32":"%08x",' % zlib.crc32(rest) + rest)


def round_of(zero, folder: str, ranks: int) -> dict[str, float]:
    from shardstep._C import Checkpoint

    simulate(Path(folder), ranks)
    index = (Path(folder) / "index.json").stat().st_size
    times = [time.perf_counter()]
    checkpoint = Checkpoint(folder)
    times.append(time.perf_counter())
    checkpoint.read("state.0.sum", (ranks - 1) * ELEMENTS, ranks * ELEMENTS)
    del checkpoint
    times.append(time.perf_counter())
    zero.save_checkpoint(folder, asynchronous=True)
    times.append(time.perf_counter())
    zero.wait_checkpoint()
    opened, part, saved = (1000 * (end - begin) for begin, end in pairwise(times))
    return {"index": index / 1000, "save": saved, "open": opened, "part": part}


def measure(ranks: int) -> dict[str, float]:
    import torch
    from shardstep import ZeroRedundancyOptimizer

    parameter = torch.nn.Parameter(torch.zeros(ELEMENTS))
    zero = ZeroRedundancyOptimizer([parameter], torch.optim.Adam, lr=0.1)
    parameter.grad = torch.ones(ELEMENTS)
    zero.step()
    rounds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(round_of(zero, folder, ranks))
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def main() -> None:
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        rows = {str(ranks): measure(ranks) for ranks in (1, 8, 64, 512)}
        dist.destroy_process_group()
    columns = {name: (lambda row, name=name: f"{row[name]:.2f}") for name in rows["1"]}
    print(markdown("ranks that saved", columns, rows))


if __name__ == "__main__":
    main()
