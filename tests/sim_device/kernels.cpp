// Kernels of the device: what creates, views and copies tensors, and for everything else the CPU's
// kernel, on an alias of the device's memory.

#include "kernels.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <vector>

#include "device.h"
#include "memory.h"
#include "sim_device.h"

namespace sim {

at::Tensor host_tensor(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto alias =
      at::from_blob(host_alias(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
  alias._set_conj(tensor.is_conj());
  alias._set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return alias;
}

namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// Creating

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

at::Tensor empty_on(const at::Device& device, const at::Tensor& like) {
  return empty_strided(like.sizes(), like.strides(), like.scalar_type(), {}, device, {});
}

void grow(const at::Tensor& tensor) {
  const size_t bytes =
      (tensor.storage_offset() + tensor.numel()) * static_cast<size_t>(tensor.element_size());
  if (tensor.numel() > 0 && bytes > tensor.storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  }
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size,
                          std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow(self);
  return self;
}

at::Tensor& set_nothing_(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  at::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator(), true);
  return at::native::set_storage_cpu_(self, std::move(storage), 0, {0}, {});
}

// Copying

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  host_tensor(to).copy_(host_tensor(from));
  if (!to.is_privateuseone()) {
    count_read(from.device().index());
  } else if (!from.is_privateuseone() && !non_blocking) {
    count_upload(to.device().index());
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  count_read(self.device().index());
  return host_tensor(self).item();
}

void record_stream(at::Tensor&, c10::Stream) {}

at::Tensor to_device(const at::Tensor& result, const at::Device& device) {
  auto copy = empty_on(device, result);
  if (result.numel() > 0) host_tensor(copy).copy_(result);
  return copy;
}

// Convolutions: torch asks devices of other vendors for these.

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = host_tensor(*bias);
  return to_device(at::convolution(host_tensor(input), host_tensor(weight), host_bias, stride,
                                   padding, dilation, transposed, output_padding, groups),
                   input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  const int64_t channels = weight.size(transposed ? 1 : 0) * (transposed ? groups : 1);
  auto [input_gradient, weight_gradient, bias_gradient] = at::convolution_backward(
      host_tensor(gradient), host_tensor(input), host_tensor(weight), at::IntArrayRef({channels}),
      stride, padding, dilation, transposed, output_padding, groups, mask);
  auto moved = [&](const at::Tensor& result) {
    return result.defined() ? to_device(result, input.device()) : result;
  };
  return {moved(input_gradient), moved(weight_gradient), moved(bias_gradient)};
}

// Everything else

// The arguments of one call, whose device tensors are replaced by host tensors.
class HostArguments {
 public:
  HostArguments(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : name_(op.schema().name()), device_(c10::DeviceType::CPU) {
    const size_t count = op.schema().arguments().size();
    for (size_t i = stack.size() - count; i < stack.size(); ++i) find_device(stack[i]);
    for (size_t i = 0; i < count; ++i) {
      auto& value = stack[stack.size() - count + i];
      originals_.push_back(value);
      value = value.isNone() && draws(op.schema().arguments()[i]) ? default_generator()
                                                                  : replaced(value);
    }
  }

  const at::Device& device() const { return device_; }
  bool any() const { return !pairs_.empty(); }
  const c10::IValue& original(size_t argument) const { return originals_[argument]; }

  // Tensors that the kernel has resized get their new shape and contents.
  void update_resized() const {
    for (const auto& [own, host] : pairs_) {
      if (own.sizes() == host.sizes()) continue;
      own.resize_(host.sizes());
      if (own.numel() > 0) host_tensor(own).copy_(host);
    }
  }

  // A result on the device: a view of an argument if the kernel made one, else a copy.
  at::Tensor result(const at::Tensor& host) const {
    if (!host.defined()) return host;
    if (host.numel() > 0 && is_host_alias(host.const_data_ptr())) return view_of_argument(host);
    return to_device(host, device_);
  }

 private:
  void find_device(const c10::IValue& value) {
    if (value.isTensor()) {
      check_device(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) check_device(tensor);
    } else if (value.isOptionalTensorList()) {
      for (const c10::IValue& one : value.toListRef()) find_device(one);
    } else if (value.isDevice() && value.toDevice().is_privateuseone() && device_.is_cpu()) {
      device_ = value.toDevice();
      if (!device_.has_index()) device_ = sim::device(current_device());
    }
  }

  void check_device(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_privateuseone()) {
      TORCH_CHECK(device_.is_cpu() || device_ == tensor.device(),
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  device_, " and ", tensor.device(), " (", name_, ")");
      device_ = tensor.device();
      return;
    }
    // Indices may be on the CPU on CUDA too.
    const bool index = name_.find("index") != std::string::npos;
    TORCH_CHECK(tensor.dim() == 0 || index,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                "sim and ", tensor.device(), " (", name_, ")");
  }

  static bool draws(const c10::Argument& argument) {
    const auto optional = argument.type()->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
  }

  c10::IValue default_generator() const {
    return cpu_generator(at::detail::getPrivateUse1Hooks().getDefaultGenerator(device_.index()));
  }

  c10::IValue replaced(const c10::IValue& value) {
    if (value.isTensor()) return host(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(host(tensor));
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const c10::IValue& one : value.toListRef()) {
        tensors.push_back(one.isTensor() ? std::optional(host(one.toTensor())) : std::nullopt);
      }
      return tensors;
    }
    if (value.isDevice()) return c10::Device(c10::DeviceType::CPU);
    if (value.isGenerator()) {
      TORCH_CHECK(value.toGenerator().device().is_privateuseone(),
                  "Expected a 'sim' device type for generator but found 'cpu' (", name_, ")");
      return cpu_generator(value.toGenerator());
    }
    return value;
  }

  at::Tensor host(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
    return pairs_.emplace_back(tensor, host_tensor(tensor)).second;
  }

  at::Tensor view_of_argument(const at::Tensor& host) const {
    for (const auto& [own, alias] : pairs_) {
      if (own.numel() == 0) continue;
      const auto* begin = host_alias(own.storage().data());
      const auto* data = static_cast<const uint8_t*>(host.const_data_ptr());
      if (data < begin || data >= begin + own.storage().nbytes()) continue;
      TORCH_CHECK(own.dtype() == host.dtype(), "sim: ", name_, " views another dtype");
      return at::as_strided(own, host.sizes(), host.strides(),
                            (data - begin) / host.element_size());
    }
    TORCH_CHECK(false, "sim: ", name_, " returned memory of no argument");
  }

  std::string name_;
  at::Device device_;
  std::vector<c10::IValue> originals_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

// The argument that this result is, if it was changed in place.
std::optional<size_t> changed_argument(const c10::FunctionSchema& schema, size_t result) {
  const auto* alias = schema.returns()[result].alias_info();
  if (alias == nullptr || !alias->isWrite()) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) return i;
  }
  return std::nullopt;
}

// Whether the host must wait before it goes on: for a value, or for the size of a result.
bool reads_values(const c10::FunctionSchema& schema) {
  static const std::vector<std::string_view> sized{"aten::nonzero", "aten::masked_select",
                                                   "aten::_unique2", "aten::unique_dim"};
  return std::any_of(schema.returns().begin(), schema.returns().end(),
                     [](const auto& result) {
                       return result.type()->kind() == c10::TypeKind::BoolType ||
                              result.type()->kind() == c10::TypeKind::NumberType ||
                              result.type()->kind() == c10::TypeKind::FloatType ||
                              result.type()->kind() == c10::TypeKind::IntType;
                     }) ||
         std::find(sized.begin(), sized.end(), schema.name()) != sized.end();
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  HostArguments arguments(op, *stack);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  arguments.update_resized();
  if (arguments.any() && reads_values(schema)) count_read(arguments.device().index());
  const size_t first = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& value = (*stack)[first + i];
    if (const auto argument = changed_argument(schema, i)) {
      value = arguments.original(*argument);
    } else if (value.isTensor()) {
      value = arguments.result(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> results;
      for (const at::Tensor& one : value.toTensorVector()) results.push_back(arguments.result(one));
      value = results;
    }
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage",
         static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view",
         static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("view.dtype", &at::native::view_dtype);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

}  // namespace
}  // namespace sim
