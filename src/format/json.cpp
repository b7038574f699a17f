#include "format/json.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "format/tensor_memory.h"

namespace shardstep::detail {
namespace {

constexpr int kDeepest = 64;
// Tensors among hyper-parameters are scalars; anything large belongs in a shard.
constexpr int64_t kMostInlineBytes = 1 << 16;
constexpr size_t kMostAxes = 64;

constexpr std::array<std::pair<const char*, at::ScalarType>, 16> kDtypes = {{
    {"BOOL", at::kBool},
    {"U8", at::kByte},
    {"I8", at::kChar},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"I16", at::kShort},
    {"U16", at::kUInt16},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I32", at::kInt},
    {"U32", at::kUInt32},
    {"F32", at::kFloat},
    {"F64", at::kDouble},
    {"I64", at::kLong},
    {"U64", at::kUInt64},
    {"C64", at::kComplexFloat},
}};

std::string to_hex(const void* data, size_t size) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(2 * size);
  for (const auto* byte = static_cast<const uint8_t*>(data); size > 0; --size, ++byte) {
    text += kDigits[*byte >> 4];
    text += kDigits[*byte & 15];
  }
  return text;
}

int digit(char c, const std::string& what) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  TORCH_CHECK_VALUE(false, what, ": expected hexadecimal digits");
}

Json tensor_to_json(const at::Tensor& tensor, const std::string& what) {
  TORCH_CHECK_VALUE(has_memory(tensor), what, ": expected ", kWithMemory, ", got ",
                    describe_memory(tensor));
  TORCH_CHECK_VALUE(static_cast<int64_t>(tensor.nbytes()) <= kMostInlineBytes, what,
                    ": expected a tensor of at most ", kMostInlineBytes,
                    " bytes inside other values, got ", tensor.nbytes());
  const auto host = tensor.detach().cpu().contiguous();
  return {{"tensor",
           {{"dtype", dtype_name(host.scalar_type(), what)},
            {"shape", host.sizes().vec()},
            {"bytes", to_hex(host.const_data_ptr(), host.nbytes())}}}};
}

at::Tensor tensor_from_json(const Json& json, const std::string& what) {
  const auto dtype = dtype_named(to_string(member(json, "dtype", what), what), what);
  const auto shape = to_ints(member(json, "shape", what), what);
  const auto& hex = to_string(member(json, "bytes", what), what);
  const int64_t bytes = checked_nbytes(shape, dtype, what);
  TORCH_CHECK_VALUE(static_cast<uint64_t>(bytes) * 2 == hex.size(), what, ": expected ", bytes,
                    " bytes of a tensor, got ", hex.size() / 2);
  auto tensor = at::empty(shape, dtype);
  auto* to = static_cast<uint8_t*>(tensor.mutable_data_ptr());
  for (size_t i = 0; i < hex.size(); i += 2) {
    *to++ = static_cast<uint8_t>(digit(hex[i], what) * 16 + digit(hex[i + 1], what));
  }
  return tensor;
}

Json double_to_json(double value) {
  if (std::isfinite(value)) return value;
  return {{"double", std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf"}};
}

Json encode(const c10::IValue& value, const std::string& what, int depth) {
  TORCH_CHECK_VALUE(depth < kDeepest, what, ": expected values nested less than ", kDeepest,
                    " deep");
  auto list = [&](const auto& items) {
    auto json = Json::array();
    for (size_t i = 0; i < items.size(); ++i) {
      json.push_back(encode(items[i], c10::str(what, "[", i, "]"), depth + 1));
    }
    return json;
  };
  if (value.isNone()) return nullptr;
  if (value.isBool()) return value.toBool();
  if (value.isInt()) return value.toInt();
  if (value.isDouble()) return double_to_json(value.toDouble());
  if (value.isString()) return value.toStringRef();
  if (value.isTensor()) return tensor_to_json(value.toTensor(), what);
  if (value.isTuple()) return {{"tuple", list(value.toTupleRef().elements().vec())}};
  if (value.isList()) return list(value.toList().vec());
  if (const auto dtype = value_to_dtype(value)) {
    return {{"dtype", std::string(c10::getDtypeNames(*dtype).first)}};
  }
  if (value.isGenericDict()) {
    auto pairs = Json::array();
    for (const auto& item : value.toGenericDict()) {
      TORCH_CHECK_VALUE(item.key().isString(), what, ": expected strings as keys, got ",
                        item.key().tagKind());
      const auto& key = item.key().toStringRef();
      pairs.push_back({key, encode(item.value(), what + "." + key, depth + 1)});
    }
    return {{"dict", std::move(pairs)}};
  }
  TORCH_CHECK_VALUE(
      false, what,
      ": expected numbers, strings, bools, none, dtypes, tensors, or lists, tuples and dicts "
      "of these, got ",
      value.tagKind());
}

c10::IValue decode(const Json& json, const std::string& what, int depth);

c10::IValue decode_tagged(const Json& json, const std::string& what, int depth) {
  TORCH_CHECK_VALUE(json.size() == 1, what, ": expected an object with one key");
  const auto& tag = json.begin().key();
  const auto& content = json.begin().value();
  if (tag == "double") {
    const auto& name = to_string(content, what);
    if (name == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (name == "inf") return std::numeric_limits<double>::infinity();
    if (name == "-inf") return -std::numeric_limits<double>::infinity();
  } else if (tag == "dtype") {
    const auto& dtypes = c10::getStringToDtypeMap();
    const auto found = dtypes.find(to_string(content, what));
    if (found != dtypes.end()) return dtype_to_value(found->second);
  } else if (tag == "tensor") {
    return tensor_from_json(content, what);
  } else if (tag == "tuple") {
    std::vector<c10::IValue> items;
    for (const auto& item : to_list(content, what)) items.push_back(decode(item, what, depth + 1));
    return c10::ivalue::Tuple::create(std::move(items));
  } else if (tag == "dict") {
    c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
    for (const auto& pair : to_list(content, what)) {
      TORCH_CHECK_VALUE(pair.is_array() && pair.size() == 2, what, ": expected pairs in a dict");
      const auto& key = to_string(pair[0], what);
      TORCH_CHECK_VALUE(dict.insert(key, decode(pair[1], what, depth + 1)).second, what,
                        ": the key '", key, "' twice");
    }
    return dict;
  }
  TORCH_CHECK_VALUE(false, what, ": expected a value, got an object with the key '", tag, "'");
}

c10::IValue decode(const Json& json, const std::string& what, int depth) {
  TORCH_CHECK_VALUE(depth < kDeepest, what, ": expected values nested less than ", kDeepest,
                    " deep");
  switch (json.type()) {
    case Json::value_t::null:
      return {};
    case Json::value_t::boolean:
      return json.get<bool>();
    case Json::value_t::number_integer:
    case Json::value_t::number_unsigned:
      return to_int(json, what, std::numeric_limits<int64_t>::min());
    case Json::value_t::number_float:
      return json.get<double>();
    case Json::value_t::string:
      return json.get<std::string>();
    case Json::value_t::array: {
      c10::impl::GenericList list(c10::AnyType::get());
      for (const auto& item : json) list.push_back(decode(item, what, depth + 1));
      return list;
    }
    default:
      return decode_tagged(json, what, depth);
  }
}

}  // namespace

Json to_json(const c10::IValue& value, const std::string& what) { return encode(value, what, 0); }

Json to_json(const NamedValues& values, const std::string& what) {
  auto pairs = Json::array();
  for (const auto& item : values) {
    pairs.push_back({item.key(), to_json(item.value(), what + "." + item.key())});
  }
  return pairs;
}

c10::IValue value_from_json(const Json& json, const std::string& what) {
  return decode(json, what, 0);
}

NamedValues values_from_json(const Json& json, const std::string& what) {
  NamedValues values;
  for (const auto& pair : to_list(json, what)) {
    TORCH_CHECK_VALUE(pair.is_array() && pair.size() == 2, what, ": expected pairs");
    const auto& key = to_string(pair[0], what);
    TORCH_CHECK_VALUE(!values.contains(key), what, ": the key '", key, "' twice");
    values.insert(key, value_from_json(pair[1], what + "." + key));
  }
  return values;
}

std::string dump(const Json& json, const std::string& what) {
  try {
    return json.dump();
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(false, what, ": expected strings in UTF-8, got: ", error.what());
  }
}

Json parse_json(std::string_view text) {
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    TORCH_CHECK_VALUE(false, "expected JSON, got: ", error.what());
  }
}

const Json& member(const Json& object, const std::string& key, const std::string& what) {
  const auto found = to_object(object, what).find(key);
  TORCH_CHECK_VALUE(found != object.end(), what, ": expected the key '", key, "'");
  return *found;
}

int64_t to_int(const Json& json, const std::string& what, int64_t least) {
  TORCH_CHECK_VALUE(
      json.is_number_integer() && (!json.is_number_unsigned() ||
                                   json.get<uint64_t>() <= std::numeric_limits<int64_t>::max()),
      what, ": expected a whole number of 64 bits, got ", json.type_name());
  const auto value = json.get<int64_t>();
  TORCH_CHECK_VALUE(value >= least, what, ": expected a number of at least ", least, ", got ",
                    value);
  return value;
}

const std::string& to_string(const Json& json, const std::string& what) {
  TORCH_CHECK_VALUE(json.is_string(), what, ": expected a string, got ", json.type_name());
  return json.get_ref<const std::string&>();
}

const Json& to_list(const Json& json, const std::string& what) {
  TORCH_CHECK_VALUE(json.is_array(), what, ": expected a list, got ", json.type_name());
  return json;
}

const Json& to_object(const Json& json, const std::string& what) {
  TORCH_CHECK_VALUE(json.is_object(), what, ": expected an object, got ", json.type_name());
  return json;
}

std::vector<int64_t> to_ints(const Json& json, const std::string& what) {
  std::vector<int64_t> numbers;
  for (const auto& item : to_list(json, what)) numbers.push_back(to_int(item, what));
  return numbers;
}

std::string dtype_name(at::ScalarType dtype, const std::string& what) {
  for (const auto& [name, type] : kDtypes) {
    if (type == dtype) return name;
  }
  TORCH_CHECK_VALUE(false, what, ": safetensors has no dtype ", dtype);
}

at::ScalarType dtype_named(const std::string& name, const std::string& what) {
  for (const auto& [known, type] : kDtypes) {
    if (name == known) return type;
  }
  TORCH_CHECK_VALUE(false, what, ": expected a dtype of safetensors, got '", name, "'");
}

int64_t checked_nbytes(const std::vector<int64_t>& shape, at::ScalarType dtype,
                       const std::string& what) {
  // Axes without elements count as one, so that strides fit too.
  constexpr int64_t kMost = int64_t{1} << 60;
  TORCH_CHECK_VALUE(shape.size() <= kMostAxes, what, ": expected at most ", kMostAxes,
                    " axes, got ", shape.size());
  auto bytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool empty = false;
  for (int64_t size : shape) {
    TORCH_CHECK_VALUE(size >= 0 && std::max<int64_t>(size, 1) <= kMost / bytes, what,
                      ": expected the shape of a tensor that can exist, got ",
                      at::IntArrayRef(shape));
    bytes *= std::max<int64_t>(size, 1);
    empty = empty || size == 0;
  }
  return empty ? 0 : bytes;
}

}  // namespace shardstep::detail
