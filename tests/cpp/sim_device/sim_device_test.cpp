// The simulated device behaves as an accelerator does.

#include "sim_device.h"

#include <gtest/gtest.h>

#include "support/device.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep::test {
namespace {

const bool active = (use_sim_device(), true);

TEST(SimDevice, ComputesAsTheCpu) {
  const auto random = generator(1);
  const auto a = torch::randn({5, 7}, random), b = torch::randn({7, 3}, random);
  const auto sim_a = on_device(a).requires_grad_(), sim_b = on_device(b);
  torch::tanh(sim_a.mm(sim_b)).sum().backward();
  const auto cpu_a = a.clone().requires_grad_();
  torch::tanh(cpu_a.mm(b)).sum().backward();
  EXPECT_TRUE(at::equal(sim_a.grad().cpu(), cpu_a.grad()));
  EXPECT_EQ(sim_a.grad().device(), device());
}

TEST(SimDeviceDeathTest, HostCannotTouchItsMemory) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto tensor = torch::zeros({4}, device());
  EXPECT_DEATH(static_cast<volatile float*>(tensor.data_ptr())[0] = 1, "");
}

TEST(SimDevice, RefusesToMixDevices) {
  const auto here = torch::ones({3}, sim::device(0)), there = torch::ones({3}, sim::device(1));
  EXPECT_THROW(here + there, c10::Error);
  EXPECT_THROW(here + torch::ones({3}), c10::Error);
  EXPECT_THROW(here.addmv(torch::ones({3, 3}, sim::device(1)), here), c10::Error);
  EXPECT_EQ((here + torch::tensor(2.0)).sum().item<double>(), 9);
}

TEST(SimDevice, CountsMemoryPerDevice) {
  const auto before = sim::memory_allocated(2), other = sim::memory_allocated(3);
  {
    const auto tensor = torch::zeros({1000}, sim::device(2));
    EXPECT_EQ(sim::memory_allocated(2), before + 4000);
    sim::reset_peak_memory(2);
    {
      const auto more = torch::zeros({500}, sim::device(2));
    }
    EXPECT_EQ(sim::max_memory_allocated(2), before + 6000);
  }
  EXPECT_EQ(sim::memory_allocated(2), before);
  EXPECT_EQ(sim::memory_allocated(3), other);
}

TEST(SimDevice, CountsWhenTheHostWaits) {
  const auto tensor = torch::ones({10}, sim::device(0));
  const auto count = [&](const auto& body) {
    const auto before = sim::host_syncs(0).all();
    body();
    return sim::host_syncs(0).all() - before;
  };
  EXPECT_EQ(count([&] { tensor.add(1).mul_(tensor.sum()); }), 0);
  EXPECT_EQ(count([&] { tensor.sum().item<double>(); }), 1);
  EXPECT_EQ(count([&] { (void)tensor.cpu(); }), 1);
  EXPECT_EQ(count([&] { (void)at::equal(tensor, tensor); }), 1);
  EXPECT_EQ(count([&] { (void)torch::ones({10}).to(sim::device(0)); }), 1);
  EXPECT_EQ(count([&] { (void)torch::ones({10}).to(sim::device(0), /*non_blocking=*/true); }), 0);
  EXPECT_EQ(count([&] { (void)tensor.nonzero(); }), 1);
}

TEST(SimDevice, NewAndFreedMemoryIsNaN) {
  EXPECT_TRUE(torch::empty({100}, device()).isnan().all().item<bool>());
}

}  // namespace
}  // namespace shardstep::test
