#include <unordered_map>

#include "format/state_dict_file.h"
#include "shard/bucket.h"
#include "shardstep/checkpoint.h"

namespace shardstep {
namespace {

// Reports how many bytes of tensors are done.
class Meter {
 public:
  Meter(const ConvertProgress& progress, int64_t total) : progress_(progress), total_(total) {}
  void add(int64_t bytes) {
    done_ += bytes;
    if (progress_) progress_(done_, total_);
  }

 private:
  const ConvertProgress& progress_;
  int64_t total_;
  int64_t done_ = 0;
};

// A file of some bytes can name a tensor of any size whose elements are the same few bytes.
void check_size(const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.nbytes() <= tensor.storage().nbytes(), "shardstep: expected ", name,
                    " to have memory for each of its elements, got ", tensor.nbytes(),
                    " bytes of elements in ", tensor.storage().nbytes(),
                    "; save a tensor that was expanded as tensor.clone()");
}

// The index of a checkpoint made from a state dict, which knows only the number of parameters.
CheckpointIndex index_of(const StateDict& dict) {
  CheckpointIndex index;
  index.param_groups = dict.param_groups;
  for (const auto& group : dict.param_groups) {
    index.parameters.resize(index.parameters.size() + group.params.size());
  }
  for (const auto& [param, values] : dict.state) {
    auto& keys = index.state[param];
    for (const auto& item : values) {
      keys.push_back(item.key());
      const auto name = state_name(param, item.key());
      if (item.value().isTensor()) {
        check_size(name, item.value().toTensor());
        index.tensors.emplace(name, detail::describe(item.value().toTensor()));
      } else {
        index.values.emplace(name, item.value());
      }
    }
  }
  return index;
}

}  // namespace

void export_state_dict(const std::string& directory, const std::string& path,
                       const ConvertProgress& progress) {
  Checkpoint checkpoint(directory);
  int64_t total = 0;
  std::unordered_map<const c10::StorageImpl*, std::string> names;
  const auto dict = checkpoint.state_dict([&](const std::string& name) {
    const auto& info = checkpoint.index().tensors.at(name);
    const auto options = at::TensorOptions(info.dtype).device(at::kMeta);
    const auto tensor = at::empty_strided(info.shape, info.strides(), options);
    names.emplace(tensor.storage().unsafeGetStorageImpl(), name);
    total += info.nbytes();
    return tensor;
  });
  Meter meter(progress, total);
  detail::write_state_dict(dict, path, [&](const c10::Storage& storage, void* memory) {
    checkpoint.read_to(names.at(storage.unsafeGetStorageImpl()), memory);
    meter.add(static_cast<int64_t>(storage.nbytes()));
  });
}

void import_state_dict(const std::string& path, const std::string& directory,
                       const ConvertProgress& progress) {
  detail::StateDictFile file(path);
  auto index = index_of(file.dict());
  int64_t total = 0;
  for (const auto& [name, tensor] : index.tensors) total += tensor.nbytes();
  Meter meter(progress, total);
  CheckpointWriter writer(directory, std::move(index));
  for (const auto& [param, values] : file.dict().state) {
    for (const auto& item : values) {
      if (!item.value().isTensor()) continue;
      const auto& tensor = item.value().toTensor();
      writer.write(state_name(param, item.key()), tensor.is_meta() ? file.read(tensor) : tensor);
      meter.add(static_cast<int64_t>(tensor.nbytes()));
    }
  }
  writer.commit();
}

}  // namespace shardstep
