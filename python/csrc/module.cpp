#include <torch/version.h>

#include "bindings.h"
#include "shard/master_param.h"
#include "shardstep/local_optimizer.h"
#include "shardstep/optim/muon.h"
#include "shardstep/version.h"

PYBIND11_MODULE(_C, module) {
  module.attr("version") = shardstep::version();
  module.attr("torch_version") = TORCH_VERSION;
  module.attr("master_key") = shardstep::kMasterKey;
  module.def("is_known_elementwise", &shardstep::is_known_elementwise, py::arg("name"));
  module.def("muon_cost", &shardstep::optim::muon_cost, py::arg("param"), py::arg("ns_steps") = 5);
  shardstep::python::bind_engine(module);
  shardstep::python::bind_overlapped_step(module);
  shardstep::python::bind_checkpoint(module);
}
