#include <ATen/ATen.h>
#include <shardstep/process_group.h>
#include <shardstep/version.h>

#include <cstdio>

int main() {
  auto group = shardstep::init_process_group();
  std::vector<at::Tensor> tensors{at::ones({3})};
  group->allreduce(tensors)->wait();
  std::printf("shardstep %s, %d rank(s), sum %g\n", shardstep::version(), group->getSize(),
              tensors[0].sum().item<double>());
  return tensors[0].sum().item<double>() == 3.0 * group->getSize() ? 0 : 1;
}
