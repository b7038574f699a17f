#include "format/zip_file.h"

#include <c10/util/Exception.h>
#include <caffe2/serialize/file_adapter.h>

#include <algorithm>
#include <cstdint>
#include <string_view>

namespace shardstep::detail {

namespace {

using caffe2::serialize::FileAdapter;
using caffe2::serialize::PyTorchStreamReader;
using caffe2::serialize::ReadAdapterInterface;

// An entry of the directory: this signature, at 20 and 24 the record's bytes in the file and when
// read, at 28, 30 and 32 the lengths of the name, the extra fields and the comment, which follow at
// 46. Numbers are little-endian.
constexpr std::string_view kEntrySignature = "PK\1\2";
constexpr size_t kEntryBytes = 46;
// An extra field: its kind, its length, its content. This kind has those of the two sizes that are
// kSeeExtra in the entry, 8 bytes each, first the one when read.
constexpr uint64_t kZip64 = 1;
constexpr uint64_t kSeeExtra = 0xffffffff;

uint64_t number_at(std::string_view bytes, size_t position, size_t width) {
  uint64_t number = 0;
  for (size_t i = 0; i < width; ++i) {
    number |= uint64_t{static_cast<uint8_t>(bytes[position + i])} << 8 * i;
  }
  return number;
}

// What the extra fields have of this kind; empty if they have none.
std::string_view extra_field(std::string_view extra, uint64_t kind) {
  constexpr size_t kHead = 4;
  while (extra.size() >= kHead) {
    const auto length = number_at(extra, 2, 2);
    if (length > extra.size() - kHead) break;
    if (number_at(extra, 0, 2) == kind) return extra.substr(kHead, length);
    extra.remove_prefix(kHead + length);
  }
  return {};
}

// The bytes of an entry's record, in the file or when read, whichever are more.
uint64_t record_bytes(std::string_view entry, std::string_view extra) {
  auto wide = extra_field(extra, kZip64);
  const auto size_at = [&](size_t position) {
    const auto size = number_at(entry, position, 4);
    if (size != kSeeExtra || wide.size() < sizeof(uint64_t)) return size;
    const auto wide_size = number_at(wide, 0, sizeof(uint64_t));
    wide.remove_prefix(sizeof(uint64_t));
    return wide_size;
  };
  const auto read = size_at(24);
  return std::max(read, size_at(20));
}

// Whether no record of a zip's directory is larger than `most`.
bool records_fit(std::string_view directory, uint64_t most) {
  while (directory.size() >= kEntryBytes && directory.starts_with(kEntrySignature)) {
    const auto name = number_at(directory, 28, 2);
    const auto extra = number_at(directory, 30, 2);
    const auto entry_bytes = kEntryBytes + name + extra + number_at(directory, 32, 2);
    if (entry_bytes > directory.size()) break;  // torch's reader refuses the rest
    if (record_bytes(directory, directory.substr(kEntryBytes + name, extra)) > most) return false;
    directory.remove_prefix(entry_bytes);
  }
  return true;
}

// Torch's reader reads the directory by one call, the only one that must return entries; whatever
// starts like one before the reader is made is checked. What is wrong is said by failing the call,
// since an exception would pass through a library written in C.
class CheckedFile : public ReadAdapterInterface {
 public:
  explicit CheckedFile(const std::string& path) : file_(path) {}

  size_t size() const override { return file_.size(); }

  size_t read(uint64_t position, void* buffer, size_t size, const char* what) const override {
    const auto read = file_.read(position, buffer, size, what);
    const std::string_view bytes(static_cast<const char*>(buffer), read);
    if (is_open_ || !bytes.starts_with(kEntrySignature)) return read;
    found_directory_ = true;
    fits_ = fits_ && records_fit(bytes, file_.size());
    return fits_ ? read : 0;
  }

  // From here on, what is read are records.
  void set_open() {
    TORCH_INTERNAL_ASSERT(found_directory_, "the zip's directory was not seen");
    is_open_ = true;
  }
  bool fits() const { return fits_; }

 private:
  FileAdapter file_;
  bool is_open_ = false;
  // Set by read(), which torch declares const.
  mutable bool found_directory_ = false;
  mutable bool fits_ = true;
};

std::unique_ptr<PyTorchStreamReader> read_directory(const std::shared_ptr<CheckedFile>& file) {
  try {
    return std::make_unique<PyTorchStreamReader>(file);
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(file->fits(),
                      "a record is larger than the file, which is damaged, or compressed, as "
                      "torch.save does not write it");
    TORCH_CHECK_VALUE(false, "not a zip file as torch.save writes it, or a damaged one");
  }
}

}  // namespace

std::unique_ptr<PyTorchStreamReader> open_zip(const std::string& path) {
  const auto file = std::make_shared<CheckedFile>(path);
  auto reader = read_directory(file);
  file->set_open();
  return reader;
}

}  // namespace shardstep::detail
