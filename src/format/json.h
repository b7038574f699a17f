#pragma once

// The JSON of the index: values survive exactly, and reading trusts nothing.
// A value is null, a bool, an int, a double, a string, a list of values, or an object with one key:
//   {"double": "inf" | "-inf" | "nan"}       {"tuple": [value, …]}       {"dict": [[key, value],
//   …]}
//   {"tensor": {"dtype": …, "shape": […], "bytes": hex}}      {"dtype": "float32"}

#include <ATen/core/ivalue.h>

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "shardstep/state_dict.h"

namespace shardstep::detail {

using Json = nlohmann::json;

// Throws ValueError, naming `what`, for a value that JSON cannot hold.
Json to_json(const c10::IValue& value, const std::string& what);
Json to_json(const NamedValues& values, const std::string& what);
c10::IValue value_from_json(const Json& json, const std::string& what);
NamedValues values_from_json(const Json& json, const std::string& what);

// As text; throws ValueError for strings that are not UTF-8.
std::string dump(const Json& json, const std::string& what);
Json parse_json(std::string_view text);

// Parts of an object of unknown origin. Each throws ValueError that names `what`.
const Json& member(const Json& object, const std::string& key, const std::string& what);
int64_t to_int(const Json& json, const std::string& what, int64_t least = 0);
const std::string& to_string(const Json& json, const std::string& what);
const Json& to_list(const Json& json, const std::string& what);
const Json& to_object(const Json& json, const std::string& what);
std::vector<int64_t> to_ints(const Json& json, const std::string& what);

// The names of dtypes in safetensors.
std::string dtype_name(at::ScalarType dtype, const std::string& what);
at::ScalarType dtype_named(const std::string& name, const std::string& what);

// How many bytes a tensor has; throws ValueError for an impossible one.
int64_t checked_nbytes(const std::vector<int64_t>& shape, at::ScalarType dtype,
                       const std::string& what);

}  // namespace shardstep::detail
