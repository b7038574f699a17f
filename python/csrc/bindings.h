#pragma once

// The parts of the extension module `shardstep._C`.

#include <torch/csrc/utils/pybind.h>

namespace shardstep::python {

void bind_checkpoint(py::module_& module);
void bind_engine(py::module_& module);
void bind_overlapped_step(py::module_& module);

}  // namespace shardstep::python
