#include "shardstep/state_dict.h"

#include <ATen/ATen.h>
#include <c10/core/CPUAllocator.h>
#include <caffe2/serialize/inline_container.h>

#include <bit>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "format/pickle.h"
#include "format/replacing_file.h"
#include "format/state_dict_file.h"
#include "format/zip_file.h"

namespace shardstep {

namespace {

using caffe2::serialize::PyTorchStreamReader;
using caffe2::serialize::PyTorchStreamWriter;
using detail::PickleNode;
using Kind = PickleNode::Kind;

// Larger tensors of a StateDictFile are read only on request.
constexpr size_t kSmallBytes = 4096;
constexpr const char* kDtypeKey = "torch.dtype";
constexpr const char* kByteOrder = std::endian::native == std::endian::little ? "little" : "big";

void write_values(detail::PickleWriter& pickle, const NamedValues& values) {
  for (const auto& item : values) {
    pickle.string(item.key());
    pickle.value(item.value(), item.key());
  }
}

void write_param_group(detail::PickleWriter& pickle, const StateDict::ParamGroup& group) {
  pickle.begin_dict();
  write_values(pickle, group.options);
  pickle.string("params");
  pickle.begin_list();
  for (auto index : group.params) pickle.integer(index);
  pickle.end_list();
  pickle.end_dict();
}

void write_dict(detail::PickleWriter& pickle, const StateDict& dict) {
  pickle.begin_dict();
  pickle.string("state");
  pickle.begin_dict();
  for (const auto& [index, values] : dict.state) {
    pickle.integer(index);
    pickle.begin_dict();
    write_values(pickle, values);
    pickle.end_dict();
  }
  pickle.end_dict();
  pickle.string("param_groups");
  pickle.begin_list();
  for (const auto& group : dict.param_groups) write_param_group(pickle, group);
  pickle.end_list();
  pickle.end_dict();
}

// The position in the file of each index that param_groups names.
std::map<int64_t, int64_t> positions(const std::vector<StateDict::ParamGroup>& groups) {
  std::map<int64_t, int64_t> positions;
  for (const auto& group : groups) {
    for (auto index : group.params) {
      bool is_new = positions.emplace(index, positions.size()).second;
      TORCH_CHECK_VALUE(is_new, "parameter ", index, " appears twice in param_groups");
    }
  }
  return positions;
}

int64_t position(const std::map<int64_t, int64_t>& positions, int64_t index) {
  auto found = positions.find(index);
  TORCH_CHECK_VALUE(found != positions.end(), "state of parameter ", index,
                    ", which is not among the ", positions.size(), " parameters of param_groups");
  return found->second;
}

// The bytes of a storage in host memory; copied from other devices, one storage at a time.
at::Tensor host_bytes(const c10::Storage& storage) {
  auto options = at::TensorOptions().dtype(at::kByte).device(storage.device());
  auto bytes = at::empty({0}, options);
  bytes.set_(storage, 0, {static_cast<int64_t>(storage.nbytes())}, {1});
  return bytes.cpu();
}

PickleNode& entry(const PickleNode& dict, const std::string& key, const char* what) {
  TORCH_CHECK_VALUE(dict.kind == Kind::kDict, "expected ", what, " to be a dict, got ",
                    describe(dict));
  for (size_t i = dict.items.size(); i > 0; i -= 2) {
    const auto& candidate = *dict.items[i - 2];
    if (candidate.kind == Kind::kLeaf && candidate.value.isString() &&
        candidate.value.toStringRef() == key) {
      return *dict.items[i - 1];
    }
  }
  TORCH_CHECK_VALUE(false, "expected ", what, " to have the key '", key, "'");
}

// How many values a pickle may still become. Dicts that are shared in it are copied, and without a
// bound a small file would fill the memory.
struct Budget {
  size_t left;
  void spend(size_t count) {
    TORCH_CHECK_VALUE(count <= left,
                      "more values than the file has bytes, in dicts that it repeats");
    left -= count;
  }
};

// Every key except `except`.
NamedValues read_values(const PickleNode& dict, Budget& budget, const std::string& what,
                        const char* except = nullptr) {
  TORCH_CHECK_VALUE(dict.kind == Kind::kDict, "expected ", what, " to be a dict, got ",
                    describe(dict));
  budget.spend(dict.items.size());
  NamedValues values;
  for (size_t i = 0; i < dict.items.size(); i += 2) {
    const auto& key = *dict.items[i];
    TORCH_CHECK_VALUE(key.kind == Kind::kLeaf && key.value.isString(), "expected ", what,
                      " to have strings as keys, got ", describe(key));
    const auto& name = key.value.toStringRef();
    if (except && name == except) continue;
    try {
      values.insert(name, detail::as_value(*dict.items[i + 1]));
    } catch (const c10::Error& error) {
      TORCH_CHECK_VALUE(false, "in ", what, ", '", name, "': ", error.what_without_backtrace());
    }
  }
  return values;
}

StateDict::ParamGroup read_param_group(const PickleNode& node, Budget& budget) {
  StateDict::ParamGroup group;
  const auto& params = entry(node, "params", "a param group");
  TORCH_CHECK_VALUE(params.kind == Kind::kList, "expected 'params' to be a list of ints, got ",
                    describe(params));
  budget.spend(params.items.size());
  for (const auto& param : params.items) {
    TORCH_CHECK_VALUE(param->kind == Kind::kLeaf && param->value.isInt(),
                      "expected 'params' to be a list of ints, got ", describe(*param), " in it");
    group.params.push_back(param->value.toInt());
  }
  group.options = read_values(node, budget, "a param group", "params");
  return group;
}

// Python's load_state_dict uses the order of params and not the numbers in it, and so do we.
StateDict read_dict(const PickleNode& root, Budget budget) {
  StateDict dict;
  const auto& groups = entry(root, "param_groups", "the file's value");
  TORCH_CHECK_VALUE(groups.kind == Kind::kList, "expected 'param_groups' to be a list, got ",
                    describe(groups));
  for (const auto& group : groups.items) {
    dict.param_groups.push_back(read_param_group(*group, budget));
  }
  auto places = positions(dict.param_groups);

  const auto& state = entry(root, "state", "the file's value");
  TORCH_CHECK_VALUE(state.kind == Kind::kDict, "expected 'state' to be a dict, got ",
                    describe(state));
  for (size_t i = 0; i < state.items.size(); i += 2) {
    const auto& key = *state.items[i];
    TORCH_CHECK_VALUE(key.kind == Kind::kLeaf && key.value.isInt(),
                      "expected ints as the keys of 'state', got ", describe(key));
    auto index = key.value.toInt();
    auto what = "state of parameter " + std::to_string(index);
    bool is_new =
        dict.state.emplace(position(places, index), read_values(*state.items[i + 1], budget, what))
            .second;
    TORCH_CHECK_VALUE(is_new, what, " twice");
  }
  for (auto& group : dict.param_groups) {
    for (auto& index : group.params) index = position(places, index);
  }
  return dict;
}

// The record's bytes, straight from the file.
c10::Storage read_record(PyTorchStreamReader& file, const std::string& name, size_t size) {
  auto* allocator = c10::GetCPUAllocator();
  c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<int64_t>(size),
                       allocator->allocate(size), allocator, /*resizable=*/true);
  if (size > 0) file.getRecord(name, storage.mutable_data(), size);
  return storage;
}

std::string_view text(const c10::Storage& storage) {
  return {static_cast<const char*>(storage.data()), storage.nbytes()};
}

// `load` returns the storage that a record of the file holds.
StateDict read_file(
    PyTorchStreamReader& file, size_t file_size,
    const std::function<c10::Storage(const std::string& name, size_t nbytes)>& load) {
  TORCH_CHECK_VALUE(file.hasRecord("data.pkl"), "a zip file that torch.save did not write");
  TORCH_CHECK_VALUE(!file.hasRecord("constants.pkl"), "a TorchScript module");
  const auto read = [&](const std::string& name) {
    return read_record(file, name, file.getRecordSize(name));
  };
  if (file.hasRecord("byteorder")) {
    const auto order = read("byteorder");
    TORCH_CHECK_VALUE(text(order) == kByteOrder, "numbers in ", text(order), "-endian byte order");
  }
  const auto pickle = read("data.pkl");
  // A record may be called by several names, as its name's case is ignored, and records may
  // overlap.
  auto left = file_size;
  const auto root = detail::read_pickle(text(pickle), [&](const std::string& key, size_t nbytes) {
    const auto name = "data/" + key;
    const auto size = file.getRecordSize(name);
    TORCH_CHECK_VALUE(size == nbytes, "record ", name, " has ", size, " bytes, expected ", nbytes);
    TORCH_CHECK_VALUE(size <= left, "tensors of more bytes than the file has");
    left -= size;
    return load(name, nbytes);
  });
  return read_dict(*root, {pickle.nbytes()});
}

// Runs `body`, whose errors do not name the file yet.
template <class Body>
auto reading(const std::string& path, const Body& body) {
  std::string found;
  try {
    return body();
  } catch (const c10::Error& failure) {
    found = failure.what_without_backtrace();
  } catch (const std::exception& failure) {
    found = failure.what();
  }
  TORCH_CHECK_VALUE(false, "shardstep: cannot read ", path,
                    " as an optimizer's state dict: ", found);
}

size_t checked_size(const std::string& path) {
  std::error_code error;
  auto status = std::filesystem::status(path, error);
  TORCH_CHECK_VALUE(std::filesystem::exists(status), "shardstep: cannot read ", path,
                    ": no such file");
  TORCH_CHECK_VALUE(std::filesystem::is_regular_file(status), "shardstep: cannot read ", path,
                    ": it is not a regular file");
  return std::filesystem::file_size(path);
}

}  // namespace

c10::IValue dtype_to_value(at::ScalarType dtype) {
  c10::impl::GenericDict value(c10::StringType::get(), c10::AnyType::get());
  value.insert(kDtypeKey, std::string(c10::getDtypeNames(dtype).first));
  return value;
}

std::optional<at::ScalarType> value_to_dtype(const c10::IValue& value) {
  if (!value.isGenericDict()) return std::nullopt;
  const auto dict = value.toGenericDict();
  const auto name = dict.find(kDtypeKey);
  if (dict.size() != 1 || name == dict.end() || !name->value().isString()) return std::nullopt;
  const auto& dtypes = c10::getStringToDtypeMap();
  const auto found = dtypes.find(name->value().toStringRef());
  return found == dtypes.end() ? std::nullopt : std::optional(found->second);
}

void write_state_dict(const StateDict& dict, const std::string& path) {
  detail::write_state_dict(dict, path, [&](const c10::Storage&, void*) {
    TORCH_CHECK_VALUE(false, "shardstep: cannot write ", path, ": a tensor on the meta device");
  });
}

StateDict read_state_dict(const std::string& path) {
  const auto size = checked_size(path);
  return reading(path, [&] {
    const auto file = detail::open_zip(path);
    return read_file(*file, size, [&](const std::string& name, size_t nbytes) {
      return read_record(*file, name, nbytes);
    });
  });
}

namespace detail {

void write_state_dict(const StateDict& dict, const std::string& path,
                      const StorageContent& content) {
  PickleWriter pickle;
  std::string bytes;
  try {
    auto places = positions(dict.param_groups);
    for (const auto& item : dict.state) position(places, item.first);
    write_dict(pickle, dict);
    bytes = pickle.finish();
  } catch (const c10::Error& error) {
    TORCH_CHECK_VALUE(false, "shardstep: cannot write ", path, ": ",
                      error.what_without_backtrace());
  }

  ReplacingFile file(path);
  {
    // Its destructor writes too and must not see a failure, so ReplacingFile keeps it for check().
    PyTorchStreamWriter records([&](const void* data, size_t size) {
      file.write(data, size);
      return size;
    });
    auto put = [&](const std::string& name, const void* data, size_t size) {
      records.writeRecord(name, data, size);
      file.check();
    };
    put("data.pkl", bytes.data(), bytes.size());
    put(".format_version", "1", 1);
    put(".storage_alignment", "64", 2);
    put("byteorder", kByteOrder, std::string_view(kByteOrder).size());
    std::vector<char> buffer;  // one for all, since many would fragment the heap
    for (size_t i = 0; i < pickle.storages().size(); ++i) {
      const auto& storage = pickle.storages()[i];
      const auto name = "data/" + std::to_string(i);
      if (storage.device().is_meta()) {
        buffer.resize(std::max(buffer.size(), storage.nbytes()));
        content(storage, buffer.data());
        put(name, buffer.data(), storage.nbytes());
      } else {
        auto host = host_bytes(storage);
        put(name, host.const_data_ptr(), host.nbytes());
      }
    }
    records.writeEndOfFile();
  }
  file.commit();
}

struct StateDictFile::Impl {
  std::string path;
  std::unique_ptr<PyTorchStreamReader> file;
  StateDict dict;
  std::unordered_map<const c10::StorageImpl*, std::string> records;  // of meta storages

  c10::Storage load(const std::string& name, size_t nbytes) {
    if (nbytes <= kSmallBytes) return read_record(*file, name, nbytes);
    c10::Storage storage(c10::Storage::use_byte_size_t(), static_cast<int64_t>(nbytes),
                         c10::GetAllocator(at::kMeta), /*resizable=*/true);
    records.insert_or_assign(storage.unsafeGetStorageImpl(), name);
    return storage;
  }
};

StateDictFile::StateDictFile(const std::string& path) : impl_(std::make_unique<Impl>()) {
  impl_->path = path;
  const auto size = checked_size(path);
  reading(path, [&] {
    impl_->file = open_zip(path);
    impl_->dict = read_file(*impl_->file, size, [&](const std::string& name, size_t nbytes) {
      return impl_->load(name, nbytes);
    });
    return 0;
  });
}

StateDictFile::~StateDictFile() = default;

const StateDict& StateDictFile::dict() const { return impl_->dict; }

at::Tensor StateDictFile::read(const at::Tensor& tensor) {
  const auto& name = impl_->records.at(tensor.storage().unsafeGetStorageImpl());
  return reading(impl_->path, [&] {
    auto storage = read_record(*impl_->file, name, tensor.storage().nbytes());
    return at::empty({0}, tensor.scalar_type())
        .set_(storage, tensor.storage_offset(), tensor.sizes(), tensor.strides());
  });
}

}  // namespace detail
}  // namespace shardstep
