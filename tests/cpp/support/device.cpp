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

}  // namespace shardstep::test
