#pragma once

// The device that tests run on: SHARDSTEP_TEST_DEVICE is "cpu", the default, or "sim", the
// simulated accelerator of tests/sim_device.

#include <ATen/core/Tensor.h>

namespace shardstep::test {

// On the simulated device from now on, whatever the environment says.
void use_sim_device();
bool on_sim_device();

// This rank's device. Ranks that are threads have one each.
at::Device device();
at::Tensor on_device(const at::Tensor& tensor);

}  // namespace shardstep::test
