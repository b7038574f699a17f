// The zip files of torch.save, with directories and pickles that torch does not write.

#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>

#include "shardstep/state_dict.h"
#include "support/folder.h"

namespace shardstep {
namespace {

using test::Folder;

// Why the file is refused; empty if it is read.
std::string refusal(const std::string& path) {
  try {
    read_state_dict(path);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return {};
}

template <class Number>
Number number_at(const std::string& bytes, size_t position) {
  Number number;
  std::memcpy(&number, bytes.data() + position, sizeof(number));
  return number;
}

template <class Number>
std::string bytes_of(Number number) {
  return {reinterpret_cast<const char*>(&number), sizeof(number)};
}

// A zip file whose directory can be changed.
struct Zip {
  std::string bytes;

  void put(size_t position, const std::string& part) { bytes.replace(position, part.size(), part); }

  template <class Number>
  void add(size_t position, Number number) {
    put(position, bytes_of<Number>(number_at<Number>(bytes, position) + number));
  }

  // Where the directory's entry for a record begins.
  size_t entry(const std::string& record) const {
    const auto name = bytes.rfind("/" + record);
    TORCH_CHECK(name != std::string::npos, "no record ", record);
    return bytes.rfind("PK\1\2", name);
  }

  void set_sizes(const std::string& record, uint32_t in_file, uint32_t when_read) {
    put(entry(record) + 20, bytes_of(in_file) + bytes_of(when_read));
  }

  // In an extra field, as those of 4 GiB and more.
  void set_wide_sizes(const std::string& record, uint64_t in_file, uint64_t when_read) {
    set_sizes(record, 0xffffffff, 0xffffffff);
    const auto position = entry(record);
    const auto field =
        bytes_of<uint16_t>(1) + bytes_of<uint16_t>(16) + bytes_of(when_read) + bytes_of(in_file);
    add<uint16_t>(position + 30, field.size());
    bytes.insert(position + 46 + number_at<uint16_t>(bytes, position + 28), field);
    // The directory is longer now, and what follows it begins later.
    add<uint32_t>(bytes.rfind("PK\5\6") + 12, field.size());
    add<uint64_t>(bytes.rfind("PK\6\6") + 40, field.size());
    add<uint64_t>(bytes.rfind("PK\6\7") + 8, field.size());
  }
};

std::string pickled_text(const std::string& text) {
  return "X" + bytes_of<int32_t>(text.size()) + text;
}

// What torch.save writes for a tensor of `numel` floats in record data/<key>.
std::string pickled_tensor(const std::string& key, int32_t numel) {
  const auto count = "J" + bytes_of(numel), zero = "J" + bytes_of<int32_t>(0),
             one = "J" + bytes_of<int32_t>(1);
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + pickled_text("storage") +
         "ctorch\nFloatStorage\n" + pickled_text(key) + pickled_text("cpu") + count + "tQ" + zero +
         count + "\x85" + one + "\x85\x89" + "ccollections\nOrderedDict\n)RtR";
}

// A state dict of one parameter that has these tensors.
std::string pickled_dict(const std::vector<std::string>& keys, int32_t numel) {
  std::string pickle = "\x80\x02}(" + pickled_text("state") + "}" + pickled_text("param_groups") +
                       "](}(" + pickled_text("params") + "]" + pickled_text("tensors") + "](";
  for (const auto& key : keys) pickle += pickled_tensor(key, numel);
  return pickle + "eueu.";
}

class ZipFile : public testing::Test {
 protected:
  std::string refusal_of(const Zip& zip) const {
    std::ofstream(path_, std::ios::binary) << zip.bytes;
    return refusal(path_);
  }

  // With a hole of 4 GiB before the directory, which takes no room on the disk.
  std::string refusal_with_hole(Zip zip) const {
    constexpr uint64_t kHole = uint64_t{1} << 32;
    const auto directory = number_at<uint64_t>(zip.bytes, zip.bytes.rfind("PK\6\6") + 48);
    zip.add<uint64_t>(zip.bytes.rfind("PK\6\6") + 48, kHole);
    zip.add<uint64_t>(zip.bytes.rfind("PK\6\7") + 8, kHole);
    zip.put(zip.bytes.rfind("PK\5\6") + 16, bytes_of(0xffffffff));
    std::ofstream file(path_, std::ios::binary);
    file << zip.bytes.substr(0, directory);
    file.seekp(static_cast<std::streamoff>(directory + kHole));
    file << zip.bytes.substr(directory);
    file.close();
    return refusal(path_);
  }

  // As torch.save writes a dict of one scalar tensor.
  Zip written() const {
    StateDict dict;
    dict.param_groups.emplace_back().params = {0};
    dict.state[0].insert("step", at::scalar_tensor(3.0, at::kFloat));
    write_state_dict(dict, path_);
    return contents();
  }

  void write_zip(const std::vector<std::pair<std::string, std::string>>& records) const {
    caffe2::serialize::PyTorchStreamWriter zip(path_);
    for (const auto& [name, bytes] : records) zip.writeRecord(name, bytes.data(), bytes.size());
    zip.writeEndOfFile();
  }

  Zip contents() const {
    std::ifstream file(path_, std::ios::binary);
    return {{std::istreambuf_iterator<char>(file), {}}};
  }

  Folder folder_;
  const std::string path_ = folder_ / "a.pt";
};

// Torch allocates what the directory says, for some records before anyone can ask it for sizes.
TEST_F(ZipFile, ARecordLargerThanTheFileIsRefusedBeforeItIsAllocated) {
  const auto written = this->written();
  for (const char* record :
       {"version", ".data/serialization_id", "data.pkl", "byteorder", "data/0"}) {
    SCOPED_TRACE(record);
    const auto expect_refused = [&](const Zip& zip) {
      const auto error = refusal_of(zip);
      EXPECT_NE(error.find("a record is larger than the file"), std::string::npos) << error;
    };
    Zip zip = written;
    zip.set_sizes(record, 1, 0xffffffff);
    expect_refused(zip);
    zip.set_sizes(record, 0x7fffffff, 1);
    expect_refused(zip);
    zip.set_wide_sizes(record, 1, uint64_t{1} << 40);
    expect_refused(zip);
    zip = written;
    zip.set_wide_sizes(record, uint64_t{1} << 40, 1);
    expect_refused(zip);
  }
  Zip zip = written;
  zip.set_wide_sizes("byteorder", 6, 6);  // as they are
  EXPECT_EQ(refusal_of(zip), "");
}

// Torch allocates the directory too before it reads it, and adds its offset and size in 64 bits.
TEST_F(ZipFile, ADirectoryOutsideTheFileIsRefusedBeforeItIsAllocated) {
  const auto written = this->written();
  const auto refusal_at = [&](uint64_t size, uint64_t offset) {
    Zip zip = written;
    zip.put(zip.bytes.rfind("PK\6\6") + 40, bytes_of(size) + bytes_of(offset));
    return refusal_of(zip);
  };
  const auto end = written.bytes.rfind("PK\6\6");
  const auto size = number_at<uint64_t>(written.bytes, end + 40);
  const auto offset = number_at<uint64_t>(written.bytes, end + 48);
  EXPECT_EQ(refusal_at(size, offset), "");
  for (const auto& [size, offset] :
       std::vector<std::pair<uint64_t, uint64_t>>{{uint64_t{1} << 31, 0 - (uint64_t{1} << 31)},
                                                  {0xffffffff, 2 - (uint64_t{1} << 32)},
                                                  {size, 0 - size},
                                                  {size, written.bytes.size() - size + 1},
                                                  {written.bytes.size() + 1, 0}}) {
    const auto error = refusal_at(size, offset);
    EXPECT_NE(error.find("directory is said to be outside the file"), std::string::npos) << error;
  }
}

TEST_F(ZipFile, AFileOfMoreThan4GiBIsRead) { EXPECT_EQ(refusal_with_hole(written()), ""); }

// Torch's reader reads neither, reports success, and leaves what was in the memory before.
TEST_F(ZipFile, ARecordMarkedAsAFolderOrAsEmptyIsRefused) {
  const auto written = this->written();
  const auto expect_refused = [](const std::string& error) {
    EXPECT_NE(error.find("marked as a folder or as empty"), std::string::npos) << error;
  };
  for (const char* record :
       {"version", ".data/serialization_id", "data.pkl", "byteorder", "data/0"}) {
    SCOPED_TRACE(record);
    Zip zip = written;
    zip.add<uint32_t>(zip.entry(record) + 38, 0x10);
    expect_refused(refusal_of(zip));
    zip = written;
    zip.set_sizes(record, 0, 0xffffffff);
    expect_refused(refusal_with_hole(zip));
  }

  write_zip({{"data.pkl", pickled_dict({"a/"}, 1)}, {"data/ab", "1234"}});
  auto zip = contents();
  zip.put(zip.bytes.rfind("/data/ab"), "/data/a/");
  expect_refused(refusal_of(zip));
}

// Nor does it report that what was compressed is damaged.
TEST_F(ZipFile, ACompressedRecordIsRefused) {
  const auto written = this->written();
  for (const char* record : {"version", "data.pkl", "data/0"}) {
    SCOPED_TRACE(record);
    Zip zip = written;
    zip.put(zip.entry(record) + 10, bytes_of<uint16_t>(8));
    const auto error = refusal_of(zip);
    EXPECT_NE(error.find("a record is compressed"), std::string::npos) << error;
  }
}

// As zip tools add them for folders.
TEST_F(ZipFile, AnEmptyRecordMarkedAsAFolderIsIgnored) {
  write_zip({{"data.pkl", pickled_dict({"a"}, 1)}, {"data/a", "1234"}, {"data/", ""}});
  EXPECT_EQ(refusal(path_), "");
}

// The reader ignores the case of names, so one record can be called by many.
TEST_F(ZipFile, ARecordThatIsReadUnderManyNamesIsRefused) {
  const std::string content(4000, '\0');
  const auto write = [&](const std::vector<std::string>& keys) {
    write_zip({{"data.pkl", pickled_dict(keys, 1000)}, {"data/aa", content}});
  };
  write({"aa", "aa"});  // one storage
  EXPECT_EQ(refusal(path_), "");
  write({"aa", "aA", "Aa", "AA"});
  EXPECT_NE(refusal(path_).find("more bytes than the file has"), std::string::npos);
}

}  // namespace
}  // namespace shardstep
