// The simulated device for Python: sim.py uses it.

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "sim_device.h"
#include "simccl.h"

namespace py = pybind11;

PYBIND11_MODULE(_sim_device, m) {
  py::module::import("torch.distributed");  // has the types of groups and stores
  m.attr("device_count") = sim::kDevices;
  m.def("activate", &sim::activate);
  m.def("current_device", &sim::current_device);
  m.def("set_device", &sim::set_current_device);
  m.def("default_generator",
        [](int device) { return at::detail::getPrivateUse1Hooks().getDefaultGenerator(device); });
  m.def("memory_allocated", &sim::memory_allocated);
  m.def("max_memory_allocated", &sim::max_memory_allocated);
  m.def("reset_peak_memory_stats", &sim::reset_peak_memory);
  m.def("synchronize", &sim::synchronize, py::call_guard<py::gil_scoped_release>());
  m.def("stream_waits", &sim::stream_waits);
  m.def("host_syncs", [](int device) {
    const auto syncs = sim::host_syncs(device);
    return std::pair(syncs.reads, syncs.uploads);
  });
  m.def(
      "make_simccl",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
         std::chrono::milliseconds timeout, const std::vector<uint64_t>& global_ranks) {
        return sim::make_simccl(store, rank, size, timeout, global_ranks);
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("traffic", [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    std::map<std::string, std::pair<int64_t, int64_t>> result;
    for (const auto& [name, traffic] : sim::traffic(group)) {
      result[name] = {traffic.calls, traffic.bytes};
    }
    return result;
  });
}
