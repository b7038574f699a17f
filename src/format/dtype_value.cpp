#include "format/dtype_value.h"

#include <ATen/core/ivalue_inl.h>
#include <c10/core/ScalarType.h>

namespace shardstep::detail {
namespace {

struct DtypeHolder : torch::CustomClassHolder {
  explicit DtypeHolder(at::ScalarType held) : dtype(held) {}
  const at::ScalarType dtype;
};

}  // namespace

c10::IValue dtype_to_value(at::ScalarType dtype) {
  return c10::IValue::make_capsule(c10::make_intrusive<DtypeHolder>(dtype));
}

std::optional<at::ScalarType> value_to_dtype(const c10::IValue& value) {
  if (!value.isCapsule()) return std::nullopt;
  const auto capsule = value.toCapsule();
  const auto* holder = dynamic_cast<const DtypeHolder*>(capsule.get());
  return holder != nullptr ? std::optional(holder->dtype) : std::nullopt;
}

std::string python_dtype_name(at::ScalarType dtype) {
  return std::string(c10::getDtypeNames(dtype).first);
}

std::optional<at::ScalarType> python_dtype_named(const std::string& name) {
  const auto& known = c10::getStringToDtypeMap();
  const auto found = known.find(name);
  return found != known.end() ? std::optional(found->second) : std::nullopt;
}

}  // namespace shardstep::detail
