#include "shardstep/checkpoint.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <deque>
#include <filesystem>
#include <numeric>

#include "checkpoint/checkpoint_files.h"
#include "checkpoint/checkpoint_series.h"
#include "checkpoint/directory_lock.h"
#include "format/crc32.h"
#include "shard/bucket.h"

namespace shardstep {
namespace {

namespace fs = std::filesystem;

// The most shards that are kept open: a process may have 1024 open files.
constexpr size_t kMostOpen = 64;

// Runs `body`, whose errors do not name the file yet.
template <class Body>
auto naming(const std::string& path, Body body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    const std::string found = error.what_without_backtrace();
    if (found.starts_with("shardstep: ")) throw;
    TORCH_CHECK_VALUE(false, "shardstep: cannot read ", path, ": ", found);
  }
}

// Runs `body`, whose errors may not name the directory yet.
template <class Body>
auto writing(const std::string& directory, Body body) {
  try {
    return body();
  } catch (const c10::ValueError& error) {
    const std::string found = error.what_without_backtrace();
    if (found.starts_with("shardstep: ")) throw;
    TORCH_CHECK_VALUE(false, "shardstep: cannot write ", directory, ": ", found);
  }
}

// Whether a shard's header says the same about a part as the index.
bool tells(const CheckpointIndex& shard, const std::string& name, const CheckpointTensor& tensor,
           const CheckpointPart& part) {
  const auto found = shard.tensors.find(name);
  if (found == shard.tensors.end()) return false;
  const auto& told = found->second;
  const auto& own = told.parts.front();
  return told.dtype == tensor.dtype && told.shape == tensor.shape && told.order == tensor.order &&
         own.elements == part.elements && own.offset == part.offset &&
         own.checksums == part.checksums;
}

}  // namespace

int64_t CheckpointTensor::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

int64_t CheckpointTensor::nbytes() const {
  return numel() * static_cast<int64_t>(c10::elementSize(dtype));
}

std::vector<int64_t> CheckpointTensor::strides() const {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i > 0; --i) {
    const auto axis = order.empty() ? i - 1 : static_cast<size_t>(order[i - 1]);
    strides[axis] = stride;
    stride *= std::max<int64_t>(shape[axis], 1);
  }
  return strides;
}

std::vector<int64_t> memory_order(const at::Tensor& tensor) {
  std::vector<int64_t> axes(tensor.dim());
  std::iota(axes.begin(), axes.end(), 0);
  if (tensor.is_contiguous()) return {};
  std::stable_sort(axes.begin(), axes.end(),
                   [&](int64_t a, int64_t b) { return tensor.stride(a) > tensor.stride(b); });
  return axes;
}

CheckpointTensor detail::describe(const at::Tensor& tensor) {
  return {.dtype = tensor.scalar_type(),
          .shape = tensor.sizes().vec(),
          .order = is_dense(tensor) ? memory_order(tensor) : std::vector<int64_t>{},
          .parts = {}};
}

std::string state_name(int64_t index, const std::string& key) {
  return c10::str("state.", index, ".", key);
}

struct Checkpoint::Files {
  std::string directory;
  CheckpointIndex index;
  std::unique_ptr<detail::ReadFile> lock;               // the index, which keeps the shards
  std::vector<std::unique_ptr<detail::ReadFile>> open;  // by file, when needed first
  std::deque<size_t> opened;                            // in order of time
  std::vector<char> scratch;
  int64_t bytes_read = 0;

  void open_directory(const std::string& from) {
    directory = from;
    const auto path = (fs::path(from) / detail::kIndexName).string();
    std::error_code error;
    TORCH_CHECK_VALUE(fs::exists(path, error), "shardstep: expected a checkpoint in ", from,
                      ", got ", fs::is_directory(from, error) ? "no " : "no directory with ",
                      detail::kIndexName);
    lock = detail::open_index(from);
    index =
        naming(path, [&] { return detail::index_from_text(lock->text(detail::kMostHeaderBytes)); });
    open.resize(index.files.size());
  }
  std::string path(size_t file) const {
    return (fs::path(directory) / index.files[file].name).string();
  }
  detail::ReadFile& at(size_t file) {
    if (open[file]) return *open[file];
    if (opened.size() >= kMostOpen) {
      open[opened.front()] = nullptr;
      opened.pop_front();
    }
    open[file] = open_shard(file);
    opened.push_back(file);
    return *open[file];
  }
  std::unique_ptr<detail::ReadFile> open_shard(size_t file) const {
    try {
      auto shard = std::make_unique<detail::ReadFile>(path(file));
      TORCH_CHECK_VALUE(shard->size() == index.files[file].bytes, "shardstep: cannot read ",
                        path(file), ": expected ", index.files[file].bytes, " bytes, got ",
                        shard->size());
      return shard;
    } catch (const c10::Error& error) {
      const auto now = detail::current_id(directory);
      TORCH_CHECK_VALUE(!now || *now == index.id, error.what_without_backtrace(),
                        "; the checkpoint was replaced while it was read; open it again");
      throw;
    }
  }
  // Reads the bytes [begin, end) of a part to `to`, or nowhere, and verifies their blocks.
  void read(const std::string& name, const CheckpointPart& part, int64_t part_bytes, int64_t begin,
            int64_t end, char* to) {
    const auto& file = at(part.file);
    for (int64_t block = begin / index.block; block * index.block < end; ++block) {
      const int64_t first = block * index.block;
      const int64_t size = std::min(index.block, part_bytes - first);
      const bool whole = to != nullptr && begin <= first && first + size <= end;
      if (!whole) scratch.resize(std::max<size_t>(scratch.size(), size));
      char* const place = whole ? to + (first - begin) : scratch.data();
      file.read_at(part.offset + first, place, size);
      bytes_read += size;
      const auto checksum = detail::crc32(place, size);
      TORCH_CHECK_VALUE(checksum == part.checksums[block], "shardstep: cannot read ",
                        path(part.file), ": ", name, " is damaged: the ", size, " bytes at ",
                        part.offset + first, " do not match their checksum");
      if (!whole && to != nullptr) {
        const int64_t from = std::max(begin, first), until = std::min(end, first + size);
        std::copy(place + (from - first), place + (until - first), to + (from - begin));
      }
    }
  }
};

Checkpoint::Checkpoint(const std::string& directory) : files_(std::make_unique<Files>()) {
  // A link such as `latest` may be moved meanwhile, and the checkpoint that it pointed at removed.
  for (;;) {
    const auto target = detail::resolve_link(directory);
    try {
      files_->open_directory(target);
      return;
    } catch (const c10::Error&) {
      if (detail::resolve_link(directory) == target) throw;
    }
  }
}

Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

const std::string& Checkpoint::directory() const { return files_->directory; }
const CheckpointIndex& Checkpoint::index() const { return files_->index; }
int64_t Checkpoint::bytes_read() const { return files_->bytes_read; }

const CheckpointTensor& Checkpoint::find(const std::string& name) const {
  const auto found = files_->index.tensors.find(name);
  TORCH_CHECK_VALUE(found != files_->index.tensors.end(), "shardstep: expected a tensor ", name,
                    " in the checkpoint ", files_->directory, ", got none");
  return found->second;
}

void Checkpoint::read_into(const std::string& name, Range elements, char* to) {
  const auto& tensor = find(name);
  const auto width = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  for (const auto& part : tensor.parts) {
    const auto wanted = intersect(part.elements, elements);
    if (wanted.empty()) continue;
    files_->read(name, part, part.elements.size() * width,
                 (wanted.begin - part.elements.begin) * width,
                 (wanted.end - part.elements.begin) * width,
                 to == nullptr ? nullptr : to + (wanted.begin - elements.begin) * width);
  }
}

at::Tensor Checkpoint::read(const std::string& name) {
  const auto& info = find(name);
  auto tensor = at::empty_strided(info.shape, info.strides(), info.dtype);
  read_to(name, tensor.mutable_data_ptr());
  return tensor;
}

void Checkpoint::read_to(const std::string& name, void* memory) {
  read_into(name, {0, find(name).numel()}, static_cast<char*>(memory));
}

at::Tensor Checkpoint::read(const std::string& name, Range elements) {
  const auto& info = find(name);
  TORCH_CHECK_VALUE(
      0 <= elements.begin && elements.begin <= elements.end && elements.end <= info.numel(),
      "shardstep: expected a range of the ", info.numel(), " elements of ", name, ", got ",
      elements.begin, " to ", elements.end);
  auto tensor = at::empty({elements.size()}, info.dtype);
  read_into(name, elements, static_cast<char*>(tensor.mutable_data_ptr()));
  return tensor;
}

void Checkpoint::verify(const std::string& name) {
  read_into(name, {0, find(name).numel()}, nullptr);
}

void Checkpoint::verify_headers() {
  // Each shard by itself, so that a wrong header is not blamed on another shard.
  const auto& index = files_->index;
  std::vector<std::vector<std::pair<std::string, const CheckpointPart*>>> parts(index.files.size());
  for (const auto& [name, tensor] : index.tensors) {
    for (const auto& part : tensor.parts) parts[part.file].emplace_back(name, &part);
  }
  for (size_t f = 0; f < index.files.size(); ++f) {
    CheckpointIndex told;
    told.id = index.id;
    naming(files_->path(f), [&] {
      detail::merge_shard(detail::read_shard_header(files_->at(f)), static_cast<int>(f),
                          files_->at(f).size(), told);
    });
    for (const auto& [name, part] : parts[f]) {
      TORCH_CHECK_VALUE(tells(told, name, index.tensors.at(name), *part),
                        "shardstep: the header of ", files_->path(f),
                        " does not match the index in ", name);
    }
  }
}

void Checkpoint::verify() {
  verify_headers();
  for (const auto& item : index().tensors) verify(item.first);
}

std::vector<std::string> Checkpoint::module_names() const {
  std::vector<std::string> names;
  for (const auto& item : index().tensors) {
    if (item.first.starts_with(kModulePrefix)) {
      names.push_back(item.first.substr(std::string(kModulePrefix).size()));
    }
  }
  return names;
}

StateDict Checkpoint::state_dict() {
  return state_dict([this](const std::string& name) { return read(name); });
}

StateDict Checkpoint::state_dict(
    const std::function<at::Tensor(const std::string& name)>& read) const {
  const auto& index = files_->index;
  StateDict dict;
  dict.param_groups = index.param_groups;
  for (const auto& [param, keys] : index.state) {
    auto& values = dict.state[param];
    for (const auto& key : keys) {
      const auto name = state_name(param, key);
      const auto value = index.values.find(name);
      values.insert(key, value != index.values.end() ? value->second : c10::IValue(read(name)));
    }
  }
  return dict;
}

StateDict read_checkpoint(const std::string& directory) {
  return Checkpoint(directory).state_dict();
}

struct CheckpointWriter::State {
  std::string directory;
  CheckpointIndex index;  // without the contents of the shard
  std::map<std::string, size_t> parts;
  std::vector<bool> written;
  std::unique_ptr<detail::DirectoryLock> lock;
  std::unique_ptr<detail::ShardWriter> shard;  // removes its files before the lock is released
};

CheckpointWriter::CheckpointWriter(const std::string& directory, CheckpointIndex index)
    : state_(std::make_unique<State>()) {
  writing(directory, [&] { detail::check_state(index); });
  detail::ShardContent content;
  for (auto& [name, tensor] : index.tensors) {
    detail::checked_nbytes(tensor.shape, tensor.dtype, "shardstep: " + name);
    tensor.parts.clear();
    state_->parts.emplace(name, content.parts.size());
    content.parts.push_back({name, tensor, {0, tensor.numel()}, {}});
  }
  content.state = std::move(index.state);
  content.values = std::move(index.values);
  index.id = detail::new_id();
  index.world_size = 1;
  index.files.clear();
  index.tensors.clear();
  index.state.clear();
  index.values.clear();
  detail::make_directory(directory);
  detail::check_replaceable(directory);
  state_->lock = std::make_unique<detail::DirectoryLock>(directory);
  state_->directory = directory;
  state_->index = std::move(index);
  state_->written.resize(content.parts.size());
  state_->shard = writing(directory, [&] {
    return std::make_unique<detail::ShardWriter>(directory, std::move(content), state_->index, 0);
  });
}

CheckpointWriter::~CheckpointWriter() = default;

void CheckpointWriter::write(const std::string& name, const at::Tensor& tensor) {
  const auto found = state_->parts.find(name);
  TORCH_CHECK_VALUE(found != state_->parts.end(), "shardstep: expected a tensor that the index ",
                    "names, got ", name);
  const auto& info = state_->shard->content().parts[found->second].whole;
  TORCH_CHECK_VALUE(tensor.scalar_type() == info.dtype && tensor.sizes() == info.shape,
                    "shardstep: expected ", name, " of ", info.dtype, " and sizes ",
                    at::IntArrayRef(info.shape), ", got ", tensor.scalar_type(), " and ",
                    tensor.sizes());
  at::NoGradGuard no_grad;
  const auto like = at::empty_strided(info.shape, info.strides(),
                                      at::TensorOptions(info.dtype).device(at::kMeta));
  auto ordered = tensor.detach().cpu();
  if (!(is_dense(ordered) && memory_order(ordered) == info.order)) {
    ordered = at::empty_strided(like.sizes(), like.strides(), info.dtype).copy_(ordered);
  }
  state_->shard->write(found->second, ordered);
  state_->written[found->second] = true;
}

void CheckpointWriter::commit() {
  for (const auto& [name, part] : state_->parts) {
    TORCH_CHECK_VALUE(state_->written[part], "shardstep: expected ", name,
                      " to be written before commit");
  }
  state_->shard->commit();
  try {
    writing(state_->directory, [&] { detail::commit_index(state_->directory, state_->index); });
  } catch (...) {
    detail::remove_shard(state_->directory, state_->index.id, 0);
    throw;
  }
  state_->lock = nullptr;
}

}  // namespace shardstep
