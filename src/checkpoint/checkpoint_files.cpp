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

#include "format/crc32.h"

namespace shardstep::detail {
namespace {

namespace fs = std::filesystem;

int64_t bytes_of(const ShardPart& part) {
  return part.elements.size() * static_cast<int64_t>(c10::elementSize(part.whole.dtype));
}

// Nothing here is worth an error: the checkpoint stands.
void remove_leftovers(const std::string& directory, const CheckpointIndex& index) {
  std::error_code error;
  for (fs::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const auto name = entry->path().filename().string();
    const bool named = std::any_of(index.files.begin(), index.files.end(),
                                   [&](const CheckpointFile& file) { return file.name == name; });
    if (is_save_file(name) && !named) ::unlink(entry->path().c_str());
  }
}

// Others' index.json, for example of a web page, is not ours to replace.
void check_replaceable(const std::string& path) {
  if (!fs::exists(path)) return;
  std::string found;
  try {
    const auto json = parse_json(ReadFile(path).text(kMostHeaderBytes));
    if (json.is_object() && json.contains("format") && json["format"] == "shardstep checkpoint") {
      return;
    }
    found = "it is no index of a checkpoint";
  } catch (const c10::Error& error) {
    found = error.what_without_backtrace();
  }
  TORCH_CHECK_VALUE(false, "shardstep: expected ", path,
                    " to be absent or a checkpoint's: ", found);
}

}  // namespace

std::string new_id() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 16; ++i) id += "0123456789abcdef"[random() & 15];
  return id;
}

void prepare_directory(const std::string& directory) {
  std::error_code error;
  fs::create_directories(directory, error);
  TORCH_CHECK(!error && fs::is_directory(directory, error), "shardstep: cannot make the directory ",
              directory, ": ",
              (error ? error : std::make_error_code(std::errc::not_a_directory)).message());
  check_replaceable((fs::path(directory) / kIndexName).string());
}

ReadFile::ReadFile(const std::string& path) : path_(path) {
  // Not to hang at a pipe.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  const int failed = descriptor_ < 0 ? errno : 0;
  TORCH_CHECK_VALUE(descriptor_ >= 0, "shardstep: cannot read ", path, ": ",
                    std::generic_category().message(failed));
  struct stat status{};
  const bool regular = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
  if (!regular) ::close(descriptor_);
  TORCH_CHECK_VALUE(regular, "shardstep: cannot read ", path, ": it is no regular file");
  size_ = status.st_size;
}

ReadFile::~ReadFile() { ::close(descriptor_); }

void ReadFile::read_at(int64_t offset, void* to, int64_t size) const {
  constexpr int64_t kMost = 1 << 30;
  auto* next = static_cast<char*>(to);
  while (size > 0) {
    const auto count = ::pread(descriptor_, next, std::min(size, kMost), offset);
    if (count < 0 && errno == EINTR) continue;
    TORCH_CHECK_VALUE(count > 0, "shardstep: cannot read ", path_, ": ",
                      count == 0 ? "it ends too early" : std::generic_category().message(errno));
    next += count;
    offset += count;
    size -= count;
  }
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
  TORCH_CHECK_VALUE(file.size() >= static_cast<int64_t>(sizeof(length)), "no safetensors file");
  file.read_at(0, &length, sizeof(length));
  TORCH_CHECK_VALUE(
      length <= static_cast<uint64_t>(
                    std::min(file.size() - static_cast<int64_t>(sizeof(length)), kMostHeaderBytes)),
      "no safetensors file: a header of ", length, " bytes");
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
                  " is not as it was written: ", error.what_without_backtrace());
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
                " do not fit together: ", error.what_without_backtrace());
  }
  const auto text = index_to_text(index);
  ReplacingFile file((fs::path(directory) / kIndexName).string());
  file.write(text.data(), text.size());
  file.commit();
  remove_leftovers(directory, index);
}

}  // namespace shardstep::detail
