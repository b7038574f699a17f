"""shardstep on the command line: plan a run, look at checkpoints, check an installation."""

import argparse
import sys
from collections.abc import Sequence

import shardstep
from shardstep import _doctor, _plan_command, checkpoint
from shardstep._text import run_command

_EXAMPLES = """
examples:
  shardstep plan --parameters 7e9 --memory-gib 80       how many ranks does a model need?
  shardstep plan mymodels:Net --png plan.png            memory of a module of yours, with a picture
  shardstep doctor                                      what to paste into a bug report
  torchrun --nproc-per-node 4 -m shardstep doctor       the same for the ranks that you train with
  shardstep inspect run                                 what is in a checkpoint
  shardstep verify run                                  is every byte as it was written?
  shardstep convert run model.safetensors               its weights, for any other program
  shardstep convert run adam.pt                         its optimizer state as a torch.save file

`shardstep COMMAND --help` says more. `python -m shardstep` is the same command.
exit status: 0 success, 1 damage or a failed check, 2 any other error.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="shardstep",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=shardstep.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _plan_command.add_command(commands)
    _doctor.add_command(commands)
    checkpoint.add_commands(commands)
    return run_command(parser, arguments)


if __name__ == "__main__":
    sys.exit(main())
