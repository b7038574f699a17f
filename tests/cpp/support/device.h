#pragma once

// The device that tests run on: SHARDSTEP_TEST_DEVICE is "cpu", the default, or "sim", the
// simulated accelerator of tests/sim_device.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <vector>

#include "shardstep/sharding.h"

namespace shardstep::test {

// On the simulated device from now on, whatever the environment says.
void use_sim_device();
bool on_sim_device();

// This rank's device. Ranks that are threads have one each.
at::Device device();
at::Tensor on_device(const at::Tensor& tensor);

// Tensors on this device. Random numbers are drawn on the CPU: the same ones on every device.
at::Tensor randn(at::IntArrayRef sizes, const at::Generator& generator);
at::Tensor zeros(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat);
at::Tensor ones(at::IntArrayRef sizes);

// Of tensors that may be on different devices.
bool same(const at::Tensor& one, const at::Tensor& other);
bool near(const at::Tensor& one, const at::Tensor& other, double relative = 1e-5,
          double absolute = 1e-8);

// These on the CPU; on another device the one that it has.
std::vector<ExchangeKind> exchanges(const std::vector<ExchangeKind>& on_cpu);

// Ends a test that another device than the CPU makes no sense for.
#define SHARDSTEP_NEEDS_CPU(reason) \
  if (::shardstep::test::on_sim_device()) GTEST_SKIP() << "needs the CPU: " << reason

}  // namespace shardstep::test
