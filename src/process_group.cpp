#include "shardstep/process_group.h"

#include "process_group_backends.h"

namespace shardstep {

ProcessGroupPtr make_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                   const ProcessGroupOptions& options) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  auto backend = detail::make_gloo_backend(store, rank, size, options.timeout());
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO, backend);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
  return group;
}

}  // namespace shardstep
