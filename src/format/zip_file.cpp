#include "format/zip_file.h"

#include <c10/util/Exception.h>
#include <caffe2/serialize/file_adapter.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string_view>

namespace shardstep::detail {

namespace {

using caffe2::serialize::FileAdapter;
using caffe2::serialize::PyTorchStreamReader;
using caffe2::serialize::ReadAdapterInterface;

// An entry of the directory: this signature, at 10 how the record is compressed, at 20 and 24 its
// bytes in the file and when read, at 28, 30 and 32 the lengths of the name, the extra fields and
// the comment, which follow at 46, at 38 the attributes. Numbers are little-endian.
constexpr std::string_view kEntrySignature = "PK\1\2";
constexpr size_t kEntryBytes = 46;
// An extra field: its kind, its length, its content. This kind has those of the two sizes that are
// kSeeExtra in the entry, 8 bytes each, first the one when read.
constexpr uint64_t kZip64 = 1;
constexpr uint64_t kSeeExtra = 0xffffffff;
constexpr uint64_t kStored = 0;       // not compressed
constexpr uint64_t kIsFolder = 0x10;  // among the attributes
// The end record of a zip64 file: this signature, at 40 and 48 the directory's size and offset. The
// other end record needs no check: the sum of its numbers, of 32 bits, cannot wrap in the reader.
constexpr std::string_view kWideEndSignature = "PK\6\6";
constexpr size_t kWideEndBytes = 56;

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

struct RecordSizes {
  uint64_t in_file = 0;
  uint64_t when_read = 0;
};

RecordSizes record_sizes(std::string_view entry, std::string_view extra) {
  auto wide = extra_field(extra, kZip64);
  const auto size_at = [&](size_t position) {
    const auto size = number_at(entry, position, 4);
    if (size != kSeeExtra || wide.size() < sizeof(uint64_t)) return size;
    const auto wide_size = number_at(wide, 0, sizeof(uint64_t));
    wide.remove_prefix(sizeof(uint64_t));
    return wide_size;
  };
  RecordSizes sizes;
  sizes.when_read = size_at(24);  // the first of the extra field
  sizes.in_file = size_at(20);
  return sizes;
}

bool is_folder(std::string_view entry, std::string_view name) {
  return name.ends_with('/') || (number_at(entry, 38, 4) & kIsFolder) != 0;
}

// What is wrong with a zip's directory; empty if nothing is.
std::string_view fault_of_directory(std::string_view directory, uint64_t file_size) {
  while (directory.size() >= kEntryBytes && directory.starts_with(kEntrySignature)) {
    const auto name = number_at(directory, 28, 2);
    const auto extra = number_at(directory, 30, 2);
    const auto entry_bytes = kEntryBytes + name + extra + number_at(directory, 32, 2);
    if (entry_bytes > directory.size()) break;  // torch's reader refuses the rest
    const auto sizes = record_sizes(directory, directory.substr(kEntryBytes + name, extra));
    if (std::max(sizes.in_file, sizes.when_read) > file_size) {
      return "a record is larger than the file, which is damaged, or compressed, as torch.save "
             "does not write it";
    }
    // In these cases torch's reader reports success, and leaves the caller's memory as it was; of
    // compressed records, if they are damaged.
    if (number_at(directory, 10, 2) != kStored && sizes.when_read > 0) {
      return "a record is compressed, as torch.save does not write it";
    }
    const bool is_skipped =
        sizes.in_file == 0 || is_folder(directory, directory.substr(kEntryBytes, name));
    if (is_skipped && sizes.when_read > 0) {
      return "a record with contents is marked as a folder or as empty, so the file is damaged";
    }
    directory.remove_prefix(entry_bytes);
  }
  return {};
}

// What is wrong with the end record of a zip64 file; empty if nothing is.
std::string_view fault_of_wide_end(std::string_view end, uint64_t file_size) {
  const auto size = number_at(end, 40, 8);
  const auto offset = number_at(end, 48, 8);
  if (size <= file_size && offset <= file_size - size) return {};
  return "the zip's directory is said to be outside the file, which is damaged or cut short";
}

// Torch's reader reads the directory by one call, the only one that must return entries; whatever
// starts like one before the reader is made is checked. So is the end record of a zip64 file, whose
// read has its size. What is wrong is said by failing all calls, since an exception would pass
// through a library written in C, and one failed read of that end record is ignored there.
class CheckedFile : public ReadAdapterInterface {
 public:
  explicit CheckedFile(const std::string& path) : file_(path) {}

  size_t size() const override { return file_.size(); }

  size_t read(uint64_t position, void* buffer, size_t size, const char* what) const override {
    const auto read = file_.read(position, buffer, size, what);
    if (is_open_) return read;
    const std::string_view bytes(static_cast<const char*>(buffer), read);
    if (fault_.empty()) check(bytes);
    return fault_.empty() ? read : 0;
  }

  // From here on, what is read are records.
  void set_open() {
    TORCH_INTERNAL_ASSERT(found_directory_, "the zip's directory was not seen");
    is_open_ = true;
  }
  // What is wrong with the file; empty if nothing was found.
  std::string_view fault() const { return fault_; }

 private:
  void check(std::string_view bytes) const {
    if (bytes.starts_with(kEntrySignature)) {
      found_directory_ = true;
      fault_ = fault_of_directory(bytes, file_.size());
    } else if (bytes.size() == kWideEndBytes && bytes.starts_with(kWideEndSignature)) {
      fault_ = fault_of_wide_end(bytes, file_.size());
    }
  }

  FileAdapter file_;
  bool is_open_ = false;
  // Set by read(), which torch declares const.
  mutable bool found_directory_ = false;
  mutable std::string_view fault_;
};

[[noreturn]] void refuse(const CheckedFile& file) {
  TORCH_CHECK_VALUE(file.fault().empty(), file.fault());
  TORCH_CHECK_VALUE(false, "not a zip file as torch.save writes it, or a damaged one");
}

std::unique_ptr<PyTorchStreamReader> read_directory(const std::shared_ptr<CheckedFile>& file) {
  try {
    return std::make_unique<PyTorchStreamReader>(file);
  } catch (const c10::Error&) {
    refuse(*file);
  } catch (const std::out_of_range&) {  // a version of too many digits
    refuse(*file);
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
