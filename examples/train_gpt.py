#!/usr/bin/env python3
"""Trains a small character-level transformer with DDP and a sharded optimizer.

The twin of train_gpt.cpp: the same model, text, batches and options. With --sharding none it is
plain DDP, and the losses are the same.

  torchrun --standalone --nproc-per-node 2 -- examples/train_gpt.py [options]

Started alone, it trains in one process.
"""

import argparse
import csv
import math
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

TEXT = Path(__file__).resolve().parent / "data" / "keepers_log.txt"

# Short memory for a short run. The fused kernels are the ones that the C++ engine runs.
ADAM = {"lr": 5e-3, "betas": (0.9, 0.95), "fused": True}
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, ADAM),
    "adam": (torch.optim.Adam, ADAM),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 5e-4}),
    "muon": (torch.optim.AdamW, ADAM),  # Muon has the blocks' matrices, AdamW the rest
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GRADIENTS = {"full": None, "bf16": torch.bfloat16, "int8": torch.int8}


class Block(nn.Module):
    def __init__(self, layers: int, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)

        # The more blocks add to the residual stream, the smaller their weights start.
        residual = 0.02 / math.sqrt(2 * layers)
        nn.init.normal_(self.query_key_value.weight, 0, 0.02)
        nn.init.normal_(self.mix.weight, 0, residual)
        nn.init.normal_(self.widen.weight, 0, 0.02)
        nn.init.normal_(self.narrow.weight, 0, residual)

    def attention(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.query_key_value(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.mix(mixed.transpose(1, 2).reshape(rows, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.narrow(F.gelu(self.widen(self.mlp_norm(x)), approximate="tanh"))


class Gpt(nn.Module):
    """The embedding of a position includes the few characters before it, so that one block learns
    what would otherwise take two."""

    BEFORE = 7

    def __init__(self, vocabulary_size: int, layers: int, width: int, heads: int, context: int):
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary_size, width)
        self.before = nn.Embedding(self.BEFORE * vocabulary_size, width)
        self.position = nn.Embedding(context, width)
        nn.init.normal_(self.token.weight, 0, 0.02)
        nn.init.normal_(self.before.weight, 0, 0.02)
        nn.init.normal_(self.position.weight, 0, 0.02)
        self.blocks = nn.Sequential(*(Block(layers, width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.token(tokens) + self.position.weight[:length]
        for distance in range(1, min(self.BEFORE, length - 1) + 1):
            before = tokens[:, :-distance] + (distance - 1) * self.token.num_embeddings
            x[:, distance:] += self.before(before)
        return F.linear(self.norm(self.blocks(x)), self.token.weight)

    @torch.no_grad()
    def generate(self, prompt: Tensor, count: int, generator: torch.Generator, temperature: float):
        tokens = prompt.unsqueeze(0)
        for _ in range(count):
            scores = self(tokens[:, -self.context :])[:, -1].float()
            chances = F.softmax(scores / temperature, -1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=generator)], 1)
        return tokens.squeeze(0)


class Text:
    """A text as numbers: its distinct bytes, sorted, are the vocabulary."""

    def __init__(self, content: bytes):
        self.vocabulary = bytes(sorted(set(content)))
        place = {byte: index for index, byte in enumerate(self.vocabulary)}
        self.tokens = torch.tensor([place[byte] for byte in content])

    def decode(self, tokens: Tensor) -> str:
        return bytes(self.vocabulary[token] for token in tokens).decode(errors="replace")


def batches(text: Text, context: int, batch: int, seed: int, rank: int, world_size: int):
    """Random batches, input and target. Every rank draws the starts of the whole batch and takes
    its own rows, so the union over ranks does not depend on how many there are."""
    generator = torch.Generator().manual_seed(seed)
    rows = batch // world_size
    while True:
        starts = torch.randint(len(text.tokens) - context, (batch,), generator=generator)
        mine = starts[rank * rows : (rank + 1) * rows]
        sequences = text.tokens[mine.unsqueeze(1) + torch.arange(context + 1)]
        yield sequences[:, :-1], sequences[:, 1:]


def make_optimizer(options: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    optimizer_class, defaults = OPTIMIZERS[options.optimizer]
    if options.lr is not None and options.optimizer != "muon":
        defaults = defaults | {"lr": options.lr}
    if options.sharding == "none":
        return optimizer_class(model.parameters(), **defaults)
    from shardstep import ZeroRedundancyOptimizer, muon_groups

    params = model.parameters()
    if options.optimizer == "muon":  # the output layer is the embedding
        params = muon_groups(model, head=(), lr=options.lr or 0.02)
    if options.stage == 2:
        defaults = defaults | {"stage": 2, "module": model}
        defaults |= {"gradient_dtype": GRADIENTS[options.gradients]}
    if options.master != "none":
        defaults = defaults | {"master_dtype": DTYPES[options.master]}
    if options.rounding != "nearest":
        defaults = defaults | {"rounding": options.rounding}
    return ZeroRedundancyOptimizer(params, optimizer_class, sharding=options.sharding, **defaults)


def warm_up_and_decay(optimizer: torch.optim.Optimizer, steps: int, done: int):
    """The learning rate rises over the first twentieth of the steps, then falls to a tenth."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda done: min((done + 1) / (0.05 * steps), 1 - 0.9 * done / steps),
        last_epoch=done - 1,
    )


class Progress:
    """A bar on a terminal, otherwise an occasional line; also writes the losses to a CSV file."""

    def __init__(self, steps: int, tokens_per_step: int, log: str | None, done: int):
        self.steps, self.tokens_per_step, self.done = steps, tokens_per_step, done
        self.losses: list[float] = []
        self.terminal = sys.stdout.isatty()
        self.start = time.monotonic()
        self.bar = tqdm(
            total=steps, initial=done, unit="step", file=sys.stdout, disable=not self.terminal
        )
        self.file = open(log, "w", newline="", buffering=1) if log else None  # noqa: SIM115
        self.log = csv.writer(self.file, lineterminator="\n") if self.file else None
        if self.log:
            self.log.writerow(["step", "loss"])

    def update(self, loss: float) -> None:
        self.losses.append(loss)
        step = self.done + len(self.losses)
        if self.log:
            self.log.writerow([step, loss])
        self.bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        self.bar.update()
        edge = step in (self.done + 1, self.steps)
        if not self.terminal and (edge or step % max(1, self.steps // 20) == 0):
            print(self.numbers(step, loss), flush=True)

    def numbers(self, step: int, loss: float) -> str:
        seconds = time.monotonic() - self.start
        made = step - self.done
        left = round(seconds / made * (self.steps - step))
        return (
            f"step {step:{len(str(self.steps))}}/{self.steps}  loss {loss:.4f}  "
            f"{made * self.tokens_per_step / seconds:6.0f} tokens/s  "
            f"ETA {left // 60}:{left % 60:02}"
        )

    def close(self) -> None:
        self.bar.close()
        if self.file:
            self.file.close()


def nbytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def peak_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


MEMORY = ("optimizer state", "parameters", "gradients", "process peak")


def gather_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, int]]:
    """What each rank holds, in bytes. Collective."""
    parameters = list(model.parameters())
    local = getattr(optimizer, "optim", optimizer)
    state = nbytes(value for values in local.state.values() for value in values.values())
    sharded = 0
    if local is not optimizer:
        # In stage 2 `.grad` stands for the whole gradient, of which this rank holds its part.
        state, sharded = (optimizer.stats()[what] for what in ("state_bytes", "gradient_bytes"))
    mine = torch.tensor(
        [
            state,
            nbytes(parameters),
            sharded or nbytes(parameter.grad for parameter in parameters),
            peak_memory(),
        ]
    )
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    return {
        f"rank {rank}": dict(zip(MEMORY, row.tolist(), strict=True))
        for rank, row in enumerate(ranks)
    }


def replicated_memory(
    rank: dict[str, int], model: nn.Module, options: argparse.Namespace
) -> dict[str, int]:
    """What a rank would hold if it kept the whole state, computed from the sizes."""
    state = 0
    for name, parameter in model.named_parameters():
        by_muon = options.optimizer == "muon" and name.startswith("blocks.") and parameter.dim() > 1
        copies = 2 if options.optimizer in ("adam", "adamw", "muon") and not by_muon else 1
        wide = options.master != "none" or options.rounding != "nearest"
        state += copies * (4 * parameter.numel() if wide else parameter.nbytes)
        state += 4 * parameter.numel() if options.master != "none" else 0
    return rank | {"optimizer state": state, "gradients": rank["parameters"], "process peak": 0}


def print_memory(memory: dict[str, dict[str, int]]) -> None:
    line = "{:22} {:>16} {:>12} {:>12} {:>13}"
    print("\n" + line.format("memory", *MEMORY))
    for name, row in memory.items():
        sizes = (f"{row[what] / 2**20:.1f} MiB" if row[what] else "-" for what in MEMORY)
        print(line.format(name, *sizes))


def write_memory(memory: dict[str, dict[str, int]], file: str) -> None:
    with open(file, "w", newline="") as out:
        log = csv.writer(out, lineterminator="\n")
        log.writerow(["who", *(what.replace(" ", "_") for what in MEMORY[:3])])
        for name, row in memory.items():
            log.writerow([name, *(row[what] for what in MEMORY[:3])])


def describe(options: argparse.Namespace, world_size: int) -> str:
    how = "on every rank" if options.sharding == "none" else f"sharded by {options.sharding}"
    return f"{options.optimizer} {how}, {world_size} rank{'s' if world_size > 1 else ''}"


def train(options: argparse.Namespace, text: Text) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))

    torch.manual_seed(options.seed)
    model = Gpt(len(text.vocabulary), options.layers, options.width, options.heads, options.context)
    model.to(DTYPES[options.dtype])
    ddp: torch.nn.Module = model  # in stage 2 the optimizer averages the gradients
    if options.stage == 1:
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(options, model)
    source = batches(text, options.context, options.batch, options.seed, rank, world_size)
    done = 0
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]  # the schedule's, even if a checkpoint has another lr
    if options.checkpoint and Path(options.checkpoint, "index.json").exists():
        done = optimizer.load_checkpoint(options.checkpoint, module=model)["step"]
        for _ in range(done):
            next(source)
    schedule = warm_up_and_decay(optimizer, options.steps, done)

    progress = None  # on rank 0 only
    if rank == 0:
        elements = sum(parameter.numel() for parameter in model.parameters())
        print(f"{elements} parameters, {len(text.tokens)} characters of text, ", end="")
        print(describe(options, world_size), flush=True)
        if done:
            print(f"resuming after step {done}", flush=True)
        progress = Progress(options.steps, options.batch * options.context, options.log, done)

    stopped = False
    for step in range(done + 1, options.steps + 1):
        inputs, targets = next(source)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast == "bf16"):
            scores = ddp(inputs)
        loss = F.cross_entropy(scores.float().flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()

        # The interrupt is sent along with the loss, so that all ranks stop after the same step.
        status = torch.tensor([loss.item(), len(interrupts)], dtype=torch.float64)
        dist.all_reduce(status)
        if progress:
            progress.update(status[0].item() / world_size)
        stopped = status[1].item() > 0
        due = step % options.every == 0 or step == options.steps or stopped
        if options.checkpoint and due:  # written in the background
            optimizer.save_checkpoint(
                options.checkpoint, module=model, extra={"step": step}, asynchronous=True
            )
        if stopped:
            break
    if options.checkpoint:
        optimizer.wait_checkpoint()

    memory = gather_memory(model, optimizer)
    if progress:
        progress.close()
        memory["replicated"] = replicated_memory(memory["rank 0"], model, options)
        if stopped:
            print("\nInterrupted.")
        else:
            generator = torch.Generator().manual_seed(options.seed)
            sample = model.generate(text.tokens[:1], 300, generator, temperature=0.3)
            print(f"\nA sample of what the model writes now:\n\n{text.decode(sample)}")
        print_memory(memory)
        if options.memory:
            write_memory(memory, options.memory)
        if options.plot:
            from plot_run import plot_run

            steps = range(done + 1, done + len(progress.losses) + 1)
            title = describe(options, world_size)
            plot_run(list(steps), progress.losses, memory, options.plot, title)


def whole_number(low: int, high: int):
    def parse(word: str) -> int:
        if not word.isdecimal() or not low <= int(word) <= high:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {low} to {high}, got '{word}'"
            )
        return int(word)

    return parse


def positive(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a positive number, got '{word}'")
    return value


def writable(word: str) -> str:
    try:
        with open(word, "a"):
            return word
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"expected a file that can be written, got '{word}': {error.strerror}"
        ) from None


def parse_options() -> tuple[argparse.Namespace, Text]:
    """Finds mistakes on the command line before the ranks connect."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def count(name: str, default: int, help: str) -> None:
        kind = whole_number(1, 1_000_000)
        help = f"{help} (default {default})"
        parser.add_argument(name, type=kind, metavar="N", default=default, help=help)

    count("--layers", 1, "transformer blocks")
    count("--width", 128, "features per position, a multiple of --heads")
    count("--heads", 4, "attention heads per block")
    count("--context", 64, "characters that the model sees at once")
    count("--batch", 16, "sequences per step, over all ranks")
    count("--steps", 1600, "optimizer steps")
    add = parser.add_argument
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="local optimizer (default adamw)")
    add("--lr", type=positive, metavar="X", help="learning rate (default: suits the optimizer)")
    add("--dtype", choices=DTYPES, default="fp32", help="of the parameters (default fp32)")
    masters = "fp32: update float32 copies of bf16 parameters, divided as the state (default none)"
    add("--master", choices=("none", "fp32"), default="none", help=masters)
    roundings = "of bf16 parameters without masters (default nearest)"
    add("--rounding", choices=("nearest", "stochastic"), default="nearest", help=roundings)
    autocast = "bf16: multiply matrices in bfloat16 (default none)"
    add("--autocast", choices=("none", "bf16"), default="none", help=autocast)
    seed = whole_number(0, 2**63 - 1)
    add("--seed", type=seed, metavar="N", default=1, help="of weights, batches and sample")
    add("--text", metavar="FILE", default=TEXT, help="text to learn (default: a keeper's log)")
    add(
        "--sharding",
        choices=("none", "parameter", "element"),
        default="element",
        help="how the ranks divide the optimizer state; none: not at all (default element)",
    )
    stages = "1: divide the optimizer state, under DDP; 2: divide the gradients too (default 1)"
    add("--stage", type=int, choices=(1, 2), default=1, help=stages)
    gradients = "how wide gradients travel in stage 2; int8: in blocks with a scale (default full)"
    add("--gradients", choices=GRADIENTS, default="full", help=gradients)
    add("--log", type=writable, metavar="FILE", help="write step,loss to this CSV file")
    add("--memory", type=writable, metavar="FILE", help="write each rank's memory to this CSV file")
    add("--checkpoint", metavar="DIR", help="save to this directory, and resume from what is there")
    count("--every", 100, "steps from one checkpoint to the next")
    add("--plot", type=writable, metavar="FILE", help="draw losses and memory (png, pdf or svg)")
    options = parser.parse_args()

    if options.width % options.heads:
        parser.error(
            f"--width: expected a multiple of --heads {options.heads}, got '{options.width}'"
        )
    if options.stage == 2 and options.sharding == "none":
        parser.error("--stage 2: expected a sharded optimizer, got '--sharding none'")
    if options.gradients != "full" and options.stage == 1:
        parser.error("--gradients: expected '--stage 2', got '--stage 1', where DDP sends them")
    if options.optimizer == "muon" and options.sharding == "none":
        parser.error("--optimizer muon: expected a sharded optimizer, got '--sharding none'")
    narrow = options.dtype == "bf16" and options.sharding != "none"
    if options.master != "none" and not narrow:
        parser.error("--master: expected a sharded optimizer and '--dtype bf16'")
    if options.rounding != "nearest" and not (narrow and options.master == "none"):
        parser.error("--rounding: expected a sharded optimizer, '--dtype bf16', and no --master")
    if options.checkpoint and options.sharding == "none":
        parser.error("--checkpoint: expected a sharded optimizer, got '--sharding none'")
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if options.batch % world_size:
        parser.error(
            f"--batch: expected a multiple of the {world_size} ranks, got '{options.batch}'"
        )
    try:
        content = Path(options.text).read_bytes()
    except OSError as error:
        parser.error(
            f"--text: expected a file that can be read, got '{options.text}': {error.strerror}"
        )
    if len(content) <= options.context:
        parser.error(
            f"--text: expected at least --context + 1 = {options.context + 1} characters, "
            f"got {len(content)} in '{options.text}'"
        )
    return options, Text(content)


def main() -> None:
    options, text = parse_options()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(options, text)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
