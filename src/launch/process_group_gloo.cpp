#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <cstdlib>

#include "launch/process_group_backends.h"

namespace shardstep::detail {
namespace {

bool is_gloo(c10d::Backend& backend) {
  return dynamic_cast<c10d::ProcessGroupGloo*>(&backend) != nullptr;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store,
                                                    int rank, int size,
                                                    std::chrono::milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  const char* interface = std::getenv("GLOO_SOCKET_IFNAME");
  options->devices.push_back(interface != nullptr && *interface != '\0'
                                 ? c10d::ProcessGroupGloo::createDeviceForInterface(interface)
                                 : c10d::ProcessGroupGloo::createDefaultDevice());
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

bool refuses_to_send_to_lost_ranks(c10d::Backend& backend) { return is_gloo(backend); }

bool reduce_scatter_is_all_reduce(c10d::Backend& backend) { return is_gloo(backend); }

bool reports_completion(c10d::Work& work) {
  return dynamic_cast<c10d::ProcessGroupGloo::AsyncWork*>(&work) != nullptr;
}

}  // namespace shardstep::detail
