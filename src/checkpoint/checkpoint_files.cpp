#include "checkpoint/checkpoint_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>

#include "checkpoint/directory_lock.h"
#include "failure_points.h"
#include "format/crc32.h"

namespace shardstep::detail {
namespace {

namespace fs = std::filesystem;

int64_t bytes_of(const ShardPart& part) {
  return part.elements.size() * static_cast<int64_t>(c10::elementSize(part.whole.dtype));
}

std::string index_path(const std::string& directory) {
  return (fs::path(directory) / kIndexName).string();
}

// Gives the index that is about to be replaced its second name, and removes that again if it was
// not replaced. Where files cannot have two names, readers may find shards missing.
class PreviousIndex {
 public:
  explicit PreviousIndex(const std::string& directory) {
    const auto id = current_id(directory);
    if (!id) return;
    const auto path = (fs::path(directory) / previous_index_name(*id)).string();
    if (::link(index_path(directory).c_str(), path.c_str()) == 0) path_ = path;
  }
  ~PreviousIndex() {
    if (!path_.empty() && !replaced_) ::unlink(path_.c_str());
  }
  PreviousIndex(const PreviousIndex&) = delete;
  PreviousIndex& operator=(const PreviousIndex&) = delete;
  void replaced() { replaced_ = true; }

 private:
  std::string path_;
  bool replaced_ = false;
};

void try_sync_directory(const std::string& directory) {
  try {
    sync_directory(directory);
  } catch (const c10::Error&) {
  }
}

// Removes what saves left behind, except the shards of `id` and of indexes that are being read.
// Failures are ignored, since the checkpoint is complete.
void remove_leftovers(const std::string& directory, const std::string& id) {
  if (current_id(directory) != id) return;  // a writer without a lock was faster
  const auto names = names_in_directory(directory);
  std::vector<std::string> kept{id};
  for (const auto& name : names) {
    const auto previous = id_of_previous_index(name);
    if (!previous || *previous == id) continue;
    if (!retire_index((fs::path(directory) / name).string())) kept.push_back(*previous);
  }
  for (const auto& name : names) {
    const bool stays = std::any_of(kept.begin(), kept.end(), [&](const std::string& one) {
      return name.starts_with(shard_prefix(one));
    });
    if (is_save_file(name) && !stays) ::unlink((fs::path(directory) / name).c_str());
  }
}

}  // namespace

std::vector<std::string> names_in_directory(const std::string& directory) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  return names;
}

bool retire_index(const std::string& path) {
  // Over NFS, an exclusive lock requires a file that is open for writing.
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) return errno == ENOENT;
  const bool unread = try_lock_alone(descriptor);
  if (unread) ::unlink(path.c_str());
  ::close(descriptor);
  return unread;
}

std::string new_id() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 16; ++i) id += "0123456789abcdef"[random() & 15];
  return id;
}

void make_directory(const std::string& directory) {
  std::error_code error;
  // Not lexically: ".." of a link is the parent of what it points to.
  auto path = fs::weakly_canonical(fs::absolute(directory, error), error);
  if (!path.has_filename()) path = path.parent_path();
  std::vector<fs::path> missing;  // the innermost first
  for (; !fs::exists(path, error) && path.has_relative_path(); path = path.parent_path()) {
    missing.push_back(path);
  }
  // Who made it may have died before its name was durable. Not ours to read, perhaps.
  if (path.has_relative_path()) try_sync_directory(path.parent_path().string());
  error.clear();
  // One by one, so that at most the name of the last is not durable if this process dies.
  for (auto each = missing.rbegin(); each != missing.rend() && !error; ++each) {
    fs::create_directory(*each, error);
    if (!error) sync_directory(each->parent_path().string());
  }
  TORCH_CHECK(!error && fs::is_directory(directory, error),
              "shardstep: cannot create the directory ", directory, ": ",
              (error ? error : std::make_error_code(std::errc::not_a_directory)).message());
}

void check_replaceable(const std::string& directory) {
  // A foreign index.json, for example that of a web page, must not be replaced.
  const auto path = index_path(directory);
  std::error_code error;
  if (!fs::exists(path, error)) return;
  TORCH_CHECK_VALUE(
      is_index_text(ReadFile(path).head(kIndexHeadBytes)), "shardstep: expected ", path,
      " to be absent or the index of a checkpoint, got another file; save to another directory");
}

std::optional<std::string> current_id(const std::string& directory) {
  try {
    const ReadFile file(index_path(directory));
    if (auto id = id_in_head(file.head(kIndexHeadBytes))) return id;
    return id_of_index(file.text(kMostHeaderBytes));
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

std::unique_ptr<ReadFile> open_index(const std::string& directory) {
  constexpr int kMostTries = 1000;
  const auto path = index_path(directory);
  for (int tries = 0; tries < kMostTries; ++tries) {
    auto file = std::make_unique<ReadFile>(path);
    // Otherwise it was replaced before it was locked, and may be removed soon.
    if (file->lock_shared() && file->is_in_place()) return file;
  }
  TORCH_CHECK_VALUE(false, "shardstep: cannot read ", path,
                    ": it is replaced repeatedly; try again later");
}

ReadFile::ReadFile(const std::string& path) : path_(path) {
  // Must not block on a pipe.
  do {
    descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  } while (descriptor_ < 0 && errno == EINTR);
  const int failed = descriptor_ < 0 ? errno : 0;
  TORCH_CHECK_VALUE(descriptor_ >= 0, "shardstep: cannot read ", path, ": ",
                    std::generic_category().message(failed));
  struct stat status{};
  const bool regular = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
  if (!regular) ::close(descriptor_);
  TORCH_CHECK_VALUE(regular, "shardstep: cannot read ", path, ": it is not a regular file");
  size_ = status.st_size;
}

ReadFile::~ReadFile() {
  if (locked_) unlock(descriptor_);
  ::close(descriptor_);
}

bool ReadFile::lock_shared() { return locked_ = try_lock_shared(descriptor_); }
bool ReadFile::is_in_place() const { return is_at(descriptor_, path_); }

void ReadFile::read_at(int64_t offset, void* to, int64_t size) const {
  constexpr int64_t kMost = 1 << 30;
  auto* next = static_cast<char*>(to);
  while (size > 0) {
    const auto count = ::pread(descriptor_, next, std::min(size, kMost), offset);
    if (count < 0 && errno == EINTR) continue;
    TORCH_CHECK_VALUE(count > 0, "shardstep: cannot read ", path_, ": ",
                      count == 0 ? "it is truncated" : std::generic_category().message(errno));
    next += count;
    offset += count;
    size -= count;
  }
}

std::string ReadFile::head(int64_t most) const {
  std::string text(std::min(size_, most), '\0');
  read_at(0, text.data(), static_cast<int64_t>(text.size()));
  return text;
}

std::string ReadFile::text(int64_t most) const {
  TORCH_CHECK_VALUE(size_ <= most, "shardstep: cannot read ", path_, ": expected at most ", most,
                    " bytes, got ", size_);
  std::string text(size_, '\0');
  read_at(0, text.data(), size_);
  return text;
}

std::string read_shard_header(const ReadFile& file) {
  uint64_t length = 0;
  TORCH_CHECK_VALUE(file.size() >= static_cast<int64_t>(sizeof(length)), "not a safetensors file");
  file.read_at(0, &length, sizeof(length));
  TORCH_CHECK_VALUE(
      length <= static_cast<uint64_t>(
                    std::min(file.size() - static_cast<int64_t>(sizeof(length)), kMostHeaderBytes)),
      "not a safetensors file: a header of ", length, " bytes");
  std::string header(length, '\0');
  file.read_at(sizeof(length), header.data(), static_cast<int64_t>(length));
  return header;
}

ShardWriter::ShardWriter(const std::string& directory, ShardContent content,
                         const CheckpointIndex& index, int rank)
    : content_(std::move(content)),
      index_(index),
      rank_(rank),
      file_((fs::path(directory) / shard_name(index.id, rank)).string()) {
  for (const auto& part : content_.parts) {
    checksums_.emplace_back((bytes_of(part) + index.block - 1) / index.block);
  }
  layout_ = layout_of(content_, index, rank, checksums_);
  file_.reserve(layout_.bytes);
}

ShardWriter::~ShardWriter() = default;

void ShardWriter::write(size_t part, const at::Tensor& tensor,
                        const std::function<void(int64_t)>& on_bytes) {
  const int64_t bytes = bytes_of(content_.parts[part]);
  const auto host = tensor.detach().cpu();
  TORCH_INTERNAL_ASSERT(static_cast<int64_t>(host.nbytes()) == bytes &&
                        host.is_non_overlapping_and_dense());
  const auto* data = static_cast<const char*>(host.const_data_ptr());
  for (int64_t at = 0; at < bytes; at += index_.block) {
    const int64_t size = std::min(index_.block, bytes - at);
    checksums_[part][at / index_.block] = crc32(data + at, size);
    file_.write_at(layout_.offsets[part] + at, data + at, size);
    if (on_bytes) on_bytes(size);
  }
}

void ShardWriter::commit() {
  const auto final_layout = layout_of(content_, index_, rank_, checksums_);
  TORCH_INTERNAL_ASSERT(final_layout.bytes == layout_.bytes);
  file_.write_at(0, final_layout.header.data(), final_layout.header.size());
  file_.commit();
}

void commit_index(const std::string& directory, CheckpointIndex index) {
  for (int rank = 0; rank < index.world_size; ++rank) {
    const auto path = (fs::path(directory) / shard_name(index.id, rank)).string();
    try {
      const ReadFile file(path);
      merge_shard(read_shard_header(file), rank, file.size(), index);
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, "shardstep: the shard ", path, " of rank ", rank,
                  " cannot be part of the checkpoint: ", error.what_without_backtrace());
    }
  }
  for (auto& [name, tensor] : index.tensors) {
    std::stable_sort(tensor.parts.begin(), tensor.parts.end(),
                     [](const CheckpointPart& a, const CheckpointPart& b) {
                       return a.elements.begin < b.elements.begin;
                     });
  }
  try {
    check_index(index);
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "shardstep: the shards in ", directory,
                " do not belong together: ", error.what_without_backtrace());
  }
  const auto text = index_to_text(index);
  ReplacingFile file(index_path(directory));
  file.write(text.data(), text.size());
  file.check();
  // Other ranks' shards may have got their names only just now.
  if (index.world_size > 1) sync_directory(directory);
  PreviousIndex previous(directory);
  SHARDSTEP_FAILURE_POINT("index: written");
  try {
    file.commit();
  } catch (...) {
    // It may be in place without being durable.
    if (current_id(directory) == index.id) previous.replaced();
    throw;
  }
  previous.replaced();
  SHARDSTEP_FAILURE_POINT("index: in place");
  remove_leftovers(directory, index.id);
}

void remove_shard(const std::string& directory, const std::string& id, int rank) {
  if (current_id(directory) == id) return;
  ::unlink((fs::path(directory) / shard_name(id, rank)).c_str());
}

}  // namespace shardstep::detail
