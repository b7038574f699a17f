#include <torch/version.h>

#include "bindings.h"
#include "shardstep/local_optimizer.h"
#include "shardstep/version.h"

PYBIND11_MODULE(_C, module) {
  module.attr("version") = shardstep::version();
  module.attr("torch_version") = TORCH_VERSION;
  module.def("is_known_elementwise", &shardstep::is_known_elementwise, py::arg("name"));
  shardstep::python::bind_engine(module);
  shardstep::python::bind_overlapped_step(module);
  shardstep::python::bind_checkpoint(module);
}
