#pragma once

// The contents of Python's Optimizer.state_dict() as a value, and the file that torch.save writes
// for it. Tensors are handles: copying a StateDict does not copy their elements. Thread safety: as
// a value type; if two threads write to one path, one of the two files remains, whole. Nothing here
// is collective.

#include <ATen/core/ivalue.h>
#include <torch/ordered_dict.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "shardstep/export.h"

namespace shardstep {

// Values by name, in order of insertion: tensors, ints, doubles, bools, strings, none, dtypes, and
// tuples or lists of these.
using NamedValues = torch::OrderedDict<std::string, c10::IValue>;

// A torch.dtype as a value. IValue has no dtype, so it is the dict {"torch.dtype": name}.
SHARDSTEP_API c10::IValue dtype_to_value(at::ScalarType dtype);
// Unset if the value is something else.
SHARDSTEP_API std::optional<at::ScalarType> value_to_dtype(const c10::IValue& value);

struct StateDict {
  struct ParamGroup {
    NamedValues options;
    // Positions of the group's parameters, counted across groups.
    std::vector<int64_t> params;
  };
  // By the parameter's position across groups; parameters that have no state are absent.
  std::map<int64_t, NamedValues> state;
  std::vector<ParamGroup> param_groups;
};

// Writes what Python's torch.save(optimizer.state_dict(), path) would; torch.load(path,
// weights_only=True) reads it. A file at `path` is replaced atomically at the end, and is unchanged
// if this throws. Storages are written whole and once, however many tensors view them.
SHARDSTEP_API void write_state_dict(const StateDict& dict, const std::string& path);

// Reads a file of write_state_dict or of Python's torch.save, with tensors on the CPU. For anything
// else, throws a ValueError that names the file and what was found in it.
SHARDSTEP_API StateDict read_state_dict(const std::string& path);

}  // namespace shardstep
