"""Checkpoints as files: reading them, and weights for other programs, without ranks and without an
optimizer."""

import ctypes
import functools
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from typing import Any, BinaryIO

import torch

from shardstep import _C
from shardstep._checkpoint_content import module_tensors, modules_with_extra_state

_MODULE = "module."


class Checkpoint(_C.Checkpoint):
    """A checkpoint that save_checkpoint() wrote, on any number of ranks, from Python or C++.

    Opening it reads the index alone; tensors are read, and verified, when asked for. It stays
    readable while another checkpoint is saved to the directory::

        checkpoint = shardstep.Checkpoint("runs/latest")
        checkpoint.load_module(model)                       # weights, into any module
        checkpoint.module_names()                           # ["0.weight", "0.bias", ...]
        checkpoint.shape("module.0.weight")                 # torch.Size([64, 8])
        checkpoint.read("module.0.weight")                  # a whole tensor
        checkpoint.read("module.0.weight", 0, 100)          # some elements, in memory order
        checkpoint.state_dict()                             # for a plain optimizer

    Tensors are called `module.<name>`, `state.<parameter>.<key>` and `rng.<rank>.<device>`.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """`directory` may be a link, such as `latest`."""
        super().__init__(os.fspath(directory))

    @functools.cached_property
    def tensors(self) -> dict[str, _C.CheckpointTensor]:
        """The dtype, the shape and the place of each tensor, by its name."""
        return super().tensors

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self.tensors)

    def shape(self, name: str) -> torch.Size:
        """The shape of a tensor; ValueError if there is none of this name."""
        return torch.Size(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor; ValueError if there is none of this name."""
        return self._tensor(name).dtype

    def _tensor(self, name: str) -> _C.CheckpointTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise ValueError(
                f"shardstep: expected a tensor {name} in the checkpoint {self.directory}, got none"
            ) from None

    def module_state_dict(self) -> dict[str, torch.Tensor]:
        """The weights by their names in the module. Tied weights appear once."""
        names = self._module_names()
        return {name: self.read(_MODULE + name) for name in names}

    def _module_names(self) -> list[str]:
        names = self.module_names()
        if not names:
            raise ValueError(
                f"shardstep: expected weights in the checkpoint {self.directory}, got none; save "
                "it with module="
            )
        return names

    def load_module(self, module: torch.nn.Module) -> None:
        """Copies the weights into a module, cast to its dtypes, one tensor in memory at a time.

        Extra state is loaded too. The module may be wrapped in DistributedDataParallel or
        torch.compile. If a tensor is missing on either side, has a different shape or is damaged,
        raises ValueError and changes nothing.
        """
        saved = set(self._module_names())
        tensors = module_tensors(module)
        for name, tensor, _ in tensors:
            if name not in saved:
                raise ValueError(
                    f"shardstep: expected the module's {name} in the checkpoint "
                    f"{self.directory}, got none"
                )
            if (shape := self.shape(_MODULE + name)) != tensor.shape:
                raise ValueError(
                    f"shardstep: expected {name} of shape {list(tensor.shape)}, got "
                    f"{list(shape)} in the checkpoint {self.directory}"
                )
        extra_states = modules_with_extra_state(module)
        values = self.module_values
        unused = sorted(saved - {name for name, _, _ in tensors} - extra_states.keys())
        if unused:
            raise ValueError(
                f"shardstep: expected the checkpoint {self.directory} to hold this module, got "
                f"{unused[0]}, which the module lacks"
            )
        for name, _, _ in tensors:
            self.verify(_MODULE + name)
        with torch.no_grad():
            for name, tensor, _ in tensors:
                tensor.copy_(self.read(_MODULE + name))
        for name, part in extra_states.items():
            if name in values:
                part.set_extra_state(values[name])
            elif name in saved:
                part.set_extra_state(self.read(_MODULE + name))
            else:
                warnings.warn(
                    f"shardstep: the checkpoint in {self.directory} has no {name}: the module "
                    "keeps its own",
                    stacklevel=2,
                )


_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def _header(checkpoint: Checkpoint, names: list[str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers asks for it
    offset = 0
    for name in names:
        tensor = checkpoint.tensors[_MODULE + name]
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"shardstep: safetensors files have no {tensor.dtype}, as {name} is")
        end = offset + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def _write(
    checkpoint: Checkpoint,
    names: list[str],
    file: BinaryIO,
    progress: Callable[[int, int], object] | None,
) -> None:
    header = _header(checkpoint, names)
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    total = sum(checkpoint.tensors[_MODULE + name].nbytes for name in names)
    done = 0
    for name in names:
        tensor = checkpoint.read(_MODULE + name).contiguous()
        if tensor.nbytes > 0:
            file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)


def export_weights(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    progress: Callable[[int, int], object] | None = None,
) -> None:
    """Writes the module's weights to a safetensors file, with one tensor in memory at a time.

    The file appears under its name when it is complete.
    """
    checkpoint = Checkpoint(source)
    names = checkpoint._module_names()
    target = os.path.abspath(os.fspath(target))
    descriptor, temporary = tempfile.mkstemp(
        prefix=os.path.basename(target) + ".", dir=os.path.dirname(target)
    )
    try:
        with open(descriptor, "wb") as file:
            _write(checkpoint, names, file, progress)
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
