#include "support/device.h"

#include <ATen/ATen.h>

#include <cstdlib>
#include <string>

#include "sim_device.h"

namespace shardstep::test {
namespace {

bool& simulated() {
  static bool value = [] {
    const char* const name = std::getenv("SHARDSTEP_TEST_DEVICE");
    const bool sim = name != nullptr && std::string(name) == "sim";
    if (sim) sim::activate();
    return sim;
  }();
  return value;
}

}  // namespace

void use_sim_device() {
  sim::activate();
  simulated() = true;
}

bool on_sim_device() { return simulated(); }

at::Device device() {
  return on_sim_device() ? sim::device(sim::current_device()) : at::Device(at::kCPU);
}

at::Tensor on_device(const at::Tensor& tensor) { return tensor.to(device()); }

at::Tensor randn(at::IntArrayRef sizes, const at::Generator& generator) {
  return on_device(at::randn(sizes, generator));
}

at::Tensor zeros(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::zeros(sizes, at::TensorOptions(dtype).device(device()));
}

at::Tensor ones(at::IntArrayRef sizes) { return at::ones(sizes, device()); }

bool same(const at::Tensor& one, const at::Tensor& other) {
  return at::equal(one.cpu(), other.cpu());
}

bool near(const at::Tensor& one, const at::Tensor& other, double relative, double absolute) {
  return at::allclose(one.cpu(), other.cpu(), relative, absolute);
}

std::vector<ExchangeKind> exchanges(const std::vector<ExchangeKind>& on_cpu) {
  return on_sim_device() ? std::vector{ExchangeKind::kNative} : on_cpu;
}

}  // namespace shardstep::test
