// Checkpoint, CheckpointWriter and Checkpointer for Python. Calls that read, write or wait release
// the GIL.

#include "shardstep/checkpoint.h"

#include <pybind11/functional.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/tensor_dtypes.h>

#include "bindings.h"
#include "checkpoint/checkpointer.h"
#include "values.h"

namespace shardstep::python {
namespace {

using torch::wrap_pybind_function;
using torch::wrap_pybind_function_no_gil;

at::ScalarType dtype_of(py::handle object) {
  TORCH_CHECK_TYPE(THPDtype_Check(object.ptr()), "shardstep: expected a torch.dtype, got ",
                   std::string(py::repr(object)));
  return reinterpret_cast<THPDtype*>(object.ptr())->scalar_type;
}

const char* sharding_name(Sharding sharding) {
  return sharding == Sharding::kElement ? "element" : "parameter";
}

// From {"params": [...], **options}, as in a state_dict().
std::vector<StateDict::ParamGroup> groups_from_python(const py::list& groups) {
  std::vector<StateDict::ParamGroup> result;
  for (auto group : groups) {
    const auto what = c10::str("param group ", result.size());
    py::dict options;
    std::vector<int64_t> params;
    for (auto [key, value] : group.cast<py::dict>()) {
      if (py::isinstance<py::str>(key) && key.cast<std::string>() == "params") {
        params = value.cast<std::vector<int64_t>>();
      } else {
        options[key] = value;
      }
    }
    result.push_back({values_from_python(options, what), std::move(params)});
  }
  return result;
}

py::list groups_to_python(const std::vector<StateDict::ParamGroup>& groups) {
  py::list result;
  for (const auto& group : groups) {
    auto dict = values_to_python(group.options);
    dict["params"] = group.params;
    result.append(dict);
  }
  return result;
}

std::map<int64_t, NamedValues> state_from_python(const py::dict& state) {
  std::map<int64_t, NamedValues> result;
  for (auto [index, values] : state) {
    TORCH_CHECK_TYPE(py::isinstance<py::int_>(index), "shardstep: cannot save the state of ",
                     std::string(py::repr(index)), ": expected the index of a parameter");
    const auto i = index.cast<int64_t>();
    result.emplace(i, values_from_python(values.cast<py::dict>(), c10::str("state.", i)));
  }
  return result;
}

py::dict state_to_python(const std::map<int64_t, NamedValues>& state) {
  py::dict result;
  for (const auto& [index, values] : state) result[py::int_(index)] = values_to_python(values);
  return result;
}

py::dict state_dict_to_python(const StateDict& dict) {
  py::dict result;
  result["state"] = state_to_python(dict.state);
  result["param_groups"] = groups_to_python(dict.param_groups);
  return result;
}

py::dict to_python(const std::map<std::string, c10::IValue>& values) {
  py::dict result;
  for (const auto& [name, value] : values) result[py::str(name)] = value_to_python(value);
  return result;
}

void bind_index(py::module_& module) {
  py::class_<CheckpointPart>(module, "CheckpointPart")
      .def_readonly("file", &CheckpointPart::file)
      .def_property_readonly("begin", [](const CheckpointPart& p) { return p.elements.begin; })
      .def_property_readonly("end", [](const CheckpointPart& p) { return p.elements.end; })
      .def_readonly("offset", &CheckpointPart::offset)
      .def_readonly("checksums", &CheckpointPart::checksums);
  py::class_<CheckpointTensor>(module, "CheckpointTensor")
      .def_property_readonly("dtype",
                             [](const CheckpointTensor& t) { return dtype_object(t.dtype); })
      .def_readonly("shape", &CheckpointTensor::shape)
      .def_readonly("order", &CheckpointTensor::order)
      .def_property_readonly("strides", &CheckpointTensor::strides)
      .def_property_readonly("nbytes", &CheckpointTensor::nbytes)
      .def_readonly("parts", &CheckpointTensor::parts);
  py::class_<CheckpointFile>(module, "CheckpointFile")
      .def_readonly("name", &CheckpointFile::name)
      .def_readonly("rank", &CheckpointFile::rank)
      .def_readonly("bytes", &CheckpointFile::bytes);
  py::class_<CheckpointParameter>(module, "CheckpointParameter")
      .def_readonly("name", &CheckpointParameter::name)
      .def_readonly("shape", &CheckpointParameter::shape)
      .def_property_readonly("dtype", [](const CheckpointParameter& p) {
        return p.dtype ? dtype_object(*p.dtype) : py::none();
      });
}

void bind_reader(py::module_& module) {
  auto index = [](const Checkpoint& checkpoint) -> const CheckpointIndex& {
    return checkpoint.index();
  };
  py::class_<Checkpoint>(module, "Checkpoint")
      .def(py::init(wrap_pybind_function_no_gil([](const std::string& directory) {
             return std::make_unique<Checkpoint>(directory);
           })),
           py::arg("directory"))
      .def_property_readonly("directory", &Checkpoint::directory)
      .def_property_readonly("id", [=](const Checkpoint& c) { return index(c).id; })
      .def_property_readonly("world_size", [=](const Checkpoint& c) { return index(c).world_size; })
      .def_property_readonly("stage", [=](const Checkpoint& c) { return index(c).stage; })
      .def_property_readonly("sharding",
                             [=](const Checkpoint& c) { return sharding_name(index(c).sharding); })
      .def_property_readonly("block", [=](const Checkpoint& c) { return index(c).block; })
      .def_property_readonly("files", [=](const Checkpoint& c) { return index(c).files; })
      .def_property_readonly("parameters", [=](const Checkpoint& c) { return index(c).parameters; })
      .def_property_readonly("param_groups", wrap_pybind_function([=](const Checkpoint& c) {
                               return groups_to_python(index(c).param_groups);
                             }))
      .def_property_readonly("state", [=](const Checkpoint& c) { return index(c).state; })
      .def_property_readonly("values", wrap_pybind_function([=](const Checkpoint& c) {
                               return to_python(index(c).values);
                             }))
      .def_property_readonly("module_values", wrap_pybind_function([=](const Checkpoint& c) {
                               return to_python(index(c).module_values);
                             }))
      .def_property_readonly("tensors", [=](const Checkpoint& c) { return index(c).tensors; })
      .def("module_names", &Checkpoint::module_names)
      .def_property_readonly("extra", wrap_pybind_function([=](const Checkpoint& c) {
                               return value_to_python(index(c).extra);
                             }))
      .def("read", wrap_pybind_function_no_gil(
                       [](Checkpoint& c, const std::string& name) { return c.read(name); }))
      .def("read",
           wrap_pybind_function_no_gil([](Checkpoint& c, const std::string& name, int64_t begin,
                                          int64_t end) { return c.read(name, Range{begin, end}); }))
      .def("verify", wrap_pybind_function_no_gil([](Checkpoint& c) { c.verify(); }))
      .def("verify", wrap_pybind_function_no_gil(
                         [](Checkpoint& c, const std::string& name) { c.verify(name); }))
      .def("verify_headers", wrap_pybind_function_no_gil([](Checkpoint& c) { c.verify_headers(); }))
      .def("state_dict", wrap_pybind_function([](Checkpoint& c) {
             StateDict dict;
             {
               const py::gil_scoped_release no_gil;
               dict = c.state_dict();
             }
             return state_dict_to_python(dict);
           }))
      .def_property_readonly("bytes_read", &Checkpoint::bytes_read);
}

using DeclaredTensors = std::map<std::string, std::tuple<py::object, std::vector<int64_t>>>;
using DeclaredParameters =
    std::vector<std::tuple<std::optional<std::string>, std::vector<int64_t>, py::object>>;

// `state` and `values` as in Checkpoint; tensors as (dtype, shape), parameters as (name, shape,
// dtype).
std::unique_ptr<CheckpointWriter> make_writer(
    const std::string& directory, const DeclaredTensors& tensors, const py::list& param_groups,
    const DeclaredParameters& parameters, const std::map<int64_t, std::vector<std::string>>& state,
    const py::dict& values, const py::object& extra) {
  CheckpointIndex index;
  for (const auto& [name, tensor] : tensors) {
    auto& declared = index.tensors[name];
    declared.dtype = dtype_of(std::get<0>(tensor));
    declared.shape = std::get<1>(tensor);
  }
  index.param_groups = groups_from_python(param_groups);
  for (const auto& [name, shape, dtype] : parameters) {
    index.parameters.push_back({name, shape, dtype_of(dtype)});
  }
  index.state = state;
  for (auto [name, value] : values) {
    const auto text = name.cast<std::string>();
    index.values.emplace(text, value_from_python(value, text));
  }
  index.extra = value_from_python(extra, "extra");
  const py::gil_scoped_release no_gil;
  return std::make_unique<CheckpointWriter>(directory, std::move(index));
}

void bind_writer(py::module_& module) {
  py::class_<CheckpointWriter>(module, "CheckpointWriter")
      .def(py::init(wrap_pybind_function(make_writer)), py::arg("directory"), py::kw_only(),
           py::arg("tensors"), py::arg("param_groups"), py::arg("parameters"), py::arg("state"),
           py::arg("values") = py::dict(), py::arg("extra") = py::none())
      .def("write", wrap_pybind_function_no_gil(
                        [](CheckpointWriter& writer, const std::string& name,
                           const at::Tensor& tensor) { writer.write(name, tensor); }))
      .def("commit", wrap_pybind_function_no_gil([](CheckpointWriter& w) { w.commit(); }));
}

template <class Convert>
void bind_converter(py::module_& module, const char* name, Convert convert) {
  module.def(name,
             wrap_pybind_function_no_gil(
                 [convert](const std::string& source, const std::string& target,
                           const ConvertProgress& progress) { convert(source, target, progress); }),
             py::arg("source"), py::arg("target"), py::arg("progress") = nullptr);
}

using PyModule = std::vector<std::tuple<std::string, at::Tensor, bool>>;

std::vector<ModuleTensor> module_of(const PyModule& tensors) {
  std::vector<ModuleTensor> module;
  for (const auto& [name, tensor, is_buffer] : tensors) module.push_back({name, tensor, is_buffer});
  return module;
}

std::map<std::string, c10::IValue> module_values_of(const py::dict& values) {
  std::map<std::string, c10::IValue> result;
  for (auto [name, value] : values) {
    const auto text = name.cast<std::string>();
    result.emplace(text, value_from_python(value, "module." + text));
  }
  return result;
}

std::exception_ptr error_of(const std::optional<std::string>& error) {
  return error ? std::make_exception_ptr(std::runtime_error(*error)) : nullptr;
}

// Called without the GIL.
std::function<void(CheckpointProgress)> progress_of(const py::object& callback) {
  if (callback.is_none()) return nullptr;
  const std::shared_ptr<py::object> shared(new py::object(callback), [](py::object* object) {
    const py::gil_scoped_acquire gil;
    delete object;
  });
  return [shared](CheckpointProgress progress) {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    (*shared)(progress.written, progress.total);
  };
}

void save(Checkpointer& checkpointer, const std::string& directory, const py::dict& state,
          const py::list& param_groups, const std::vector<std::string>& names,
          const PyModule& module, const py::dict& module_values,
          const std::map<std::string, at::Tensor>& rng, const py::object& extra, bool background,
          const py::object& progress, std::optional<double> timeout,
          std::optional<int64_t> keep_last, const std::optional<std::string>& failed) {
  CheckpointContent content;
  auto error = error_of(failed);
  if (!error) {
    try {
      content.state = state_from_python(state);
      content.param_groups = groups_from_python(param_groups);
      content.names = names;
      content.module = module_of(module);
      content.module_values = module_values_of(module_values);
      content.rng = rng;
      content.extra = value_from_python(extra, "extra");
    } catch (...) {
      error = std::current_exception();
    }
  }
  SaveOptions options;
  options.mode = background ? SaveMode::kBackground : SaveMode::kBlocking;
  options.progress = progress_of(progress);
  if (timeout) {
    options.timeout = std::chrono::milliseconds(static_cast<int64_t>(*timeout * 1000));
  }
  options.keep_last = keep_last;
  const py::gil_scoped_release no_gil;
  checkpointer.save(directory, std::move(content), options, error);
}

py::dict load(Checkpointer& checkpointer, const std::string& directory,
              const py::list& param_groups, const std::vector<py::dict>& defaults,
              const std::vector<std::string>& names, const PyModule& module,
              const std::vector<std::string>& module_values,
              const std::vector<bool>& known_elementwise,
              const std::optional<std::string>& failed) {
  CheckpointTarget target;
  auto error = error_of(failed);
  if (!error) {
    try {
      target = {.param_groups = groups_from_python(param_groups),
                .names = names,
                .defaults = {},
                .known_elementwise = known_elementwise,
                .module = module_of(module),
                .module_values = module_values};
      for (const auto& values : defaults) {
        target.defaults.push_back(values_from_python(values, "the optimizer's defaults"));
      }
    } catch (...) {
      error = std::current_exception();
    }
  }
  LoadedCheckpoint loaded;
  {
    const py::gil_scoped_release no_gil;
    loaded = checkpointer.load(directory, target, nullptr, error);
  }
  py::dict result;
  result["state"] = state_to_python(loaded.state);
  result["has_masters"] = loaded.has_masters;
  result["param_groups"] = groups_to_python(loaded.param_groups);
  result["module"] = loaded.module;
  result["module_values"] = to_python(loaded.module_values);
  result["rng"] = loaded.rng;
  result["extra"] = value_to_python(loaded.extra);
  return result;
}

void bind_checkpointer(py::module_& module) {
  py::class_<Checkpointer>(module, "Checkpointer")
      .def(py::init<const ShardEngine&>(), py::arg("engine"), py::keep_alive<1, 2>())
      .def("save", wrap_pybind_function(save), py::arg("directory"), py::kw_only(),
           py::arg("state"), py::arg("param_groups"), py::arg("names"), py::arg("module"),
           py::arg("module_values"), py::arg("rng"), py::arg("extra"), py::arg("background"),
           py::arg("progress"), py::arg("timeout"), py::arg("keep_last"), py::arg("error"))
      .def("wait", wrap_pybind_function_no_gil([](Checkpointer& c) { c.wait(); }))
      .def("finish", wrap_pybind_function_no_gil([](Checkpointer& c) { return c.finish(); }))
      .def_property_readonly("bytes_read", &Checkpointer::bytes_read)
      .def("progress",
           [](const Checkpointer& c) {
             const auto progress = c.progress();
             return std::make_pair(progress.written, progress.total);
           })
      .def("load", wrap_pybind_function(load), py::arg("directory"), py::kw_only(),
           py::arg("param_groups"), py::arg("defaults"), py::arg("names"), py::arg("module"),
           py::arg("module_values"), py::arg("known_elementwise"), py::arg("error"))
      .def("share", wrap_pybind_function_no_gil(
                        [](const Checkpointer& c, const std::optional<std::string>& error) {
                          c.share(error_of(error));
                        }));
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  bind_index(module);
  bind_reader(module);
  bind_writer(module);
  bind_converter(module, "export_state_dict", export_state_dict);
  bind_converter(module, "import_state_dict", import_state_dict);
  bind_checkpointer(module);
}

}  // namespace shardstep::python
