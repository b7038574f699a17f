#include "values.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

#include "format/tensor_memory.h"

namespace shardstep::python {
namespace {

constexpr int kDeepest = 64;

std::string type_name(py::handle object) {
  return py::str(py::type::of(object).attr("__qualname__"));
}

std::string key_name(py::handle key, const std::string& what) {
  TORCH_CHECK_TYPE(py::isinstance<py::str>(key), "shardstep: cannot save ", what,
                   ": expected strings as keys, got ", std::string(py::repr(key)));
  return key.cast<std::string>();
}

at::Tensor tensor_of(py::handle object, const std::string& what) {
  const auto& tensor = THPVariable_Unpack(object.ptr());
  TORCH_CHECK_TYPE(!tensor.key_set().has(c10::DispatchKey::Python), "shardstep: cannot save ", what,
                   ": expected a tensor with memory of its own, got ", type_name(object),
                   "; consolidate_state_dict() with torch.save, and sharded_state_dict() with "
                   "torch.distributed.checkpoint, take it");
  return tensor.detach();
}

c10::IValue convert(py::handle object, const std::string& what, int depth) {
  TORCH_CHECK_TYPE(depth < kDeepest, "shardstep: cannot save ", what,
                   ": expected values nested less than ", kDeepest, " deep");
  // Subclasses (numpy's floats, named tuples, enums) would not be restored as such.
  const auto* type = Py_TYPE(object.ptr());
  if (object.is_none()) return {};
  if (PyBool_Check(object.ptr())) return object.cast<bool>();
  if (type == &PyLong_Type) {
    int overflow = 0;
    const auto value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    TORCH_CHECK_TYPE(overflow == 0, "shardstep: cannot save ", what,
                     ": expected an int of 64 bits, got ", std::string(py::repr(object)));
    return static_cast<int64_t>(value);
  }
  if (type == &PyFloat_Type) return PyFloat_AS_DOUBLE(object.ptr());
  if (type == &PyUnicode_Type) return object.cast<std::string>();
  if (THPDtype_Check(object.ptr())) {
    return dtype_to_value(reinterpret_cast<THPDtype*>(object.ptr())->scalar_type);
  }
  if (THPVariable_Check(object.ptr())) return tensor_of(object, what);
  if (type == &PyTuple_Type) {
    std::vector<c10::IValue> items;
    for (auto item : object.cast<py::tuple>()) {
      items.push_back(convert(item, c10::str(what, "[", items.size(), "]"), depth + 1));
    }
    return c10::ivalue::Tuple::create(std::move(items));
  }
  if (type == &PyList_Type) {
    c10::impl::GenericList items(c10::AnyType::get());
    for (auto item : object.cast<py::list>()) {
      items.push_back(convert(item, c10::str(what, "[", items.size(), "]"), depth + 1));
    }
    return items;
  }
  if (type == &PyDict_Type) {
    c10::impl::GenericDict items(c10::StringType::get(), c10::AnyType::get());
    for (auto [key, value] : object.cast<py::dict>()) {
      const auto name = key_name(key, what);
      items.insert(name, convert(value, what + "." + name, depth + 1));
    }
    return items;
  }
  TORCH_CHECK_TYPE(
      false, "shardstep: cannot save ", what,
      ": expected a number, a string, a bool, None, a dtype, a tensor, or a list, tuple "
      "or dict of these, got ",
      type_name(object));
}

}  // namespace

py::object dtype_object(at::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

c10::IValue value_from_python(py::handle object, const std::string& what) {
  return convert(object, what, 0);
}

NamedValues values_from_python(const py::dict& dict, const std::string& what) {
  NamedValues values;
  for (auto [key, value] : dict) {
    const auto name = key_name(key, what);
    values.insert(name, value_from_python(value, what + "." + name));
  }
  return values;
}

py::object value_to_python(const c10::IValue& value) {
  if (value.isNone()) return py::none();
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isString()) return py::str(value.toStringRef());
  if (value.isTensor()) return py::cast(value.toTensor());
  if (value.isTuple()) {
    const auto& items = value.toTupleRef().elements();
    py::tuple tuple(items.size());
    for (size_t i = 0; i < items.size(); ++i) tuple[i] = value_to_python(items[i]);
    return tuple;
  }
  if (value.isList()) {
    py::list list;
    for (const auto& item : value.toList().vec()) list.append(value_to_python(item));
    return list;
  }
  if (const auto dtype = value_to_dtype(value)) return dtype_object(*dtype);
  TORCH_CHECK_TYPE(value.isGenericDict(), "shardstep: cannot convert to Python a ",
                   value.tagKind());
  py::dict dict;
  for (const auto& item : value.toGenericDict()) {
    dict[py::str(item.key().toStringRef())] = value_to_python(item.value());
  }
  return dict;
}

py::dict values_to_python(const NamedValues& values) {
  py::dict dict;
  for (const auto& item : values) dict[py::str(item.key())] = value_to_python(item.value());
  return dict;
}

}  // namespace shardstep::python
