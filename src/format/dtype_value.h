#pragma once

// torch.dtype as a value among others: IValue itself takes a dtype for an int.

#include <ATen/core/ivalue.h>

#include <optional>
#include <string>

#include "shardstep/export.h"

namespace shardstep::detail {

SHARDSTEP_API c10::IValue dtype_to_value(at::ScalarType dtype);
// Nothing if the value is none of these.
SHARDSTEP_API std::optional<at::ScalarType> value_to_dtype(const c10::IValue& value);

// Python's names: "float32". Nothing if there is no such dtype.
std::string python_dtype_name(at::ScalarType dtype);
std::optional<at::ScalarType> python_dtype_named(const std::string& name);

}  // namespace shardstep::detail
