#pragma once

// Python's numbers, strings, tensors and containers as IValues and back.

#include <torch/csrc/utils/pybind.h>

#include <string>

#include "shardstep/state_dict.h"

namespace shardstep::python {

// Throws TypeError that names `what` for an object that is none of these.
c10::IValue value_from_python(py::handle object, const std::string& what);
NamedValues values_from_python(const py::dict& dict, const std::string& what);
// A torch.dtype.
py::object dtype_object(at::ScalarType dtype);
py::object value_to_python(const c10::IValue& value);
py::dict values_to_python(const NamedValues& values);

}  // namespace shardstep::python
