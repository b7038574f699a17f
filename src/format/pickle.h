#pragma once

// The part of Python's pickle format, protocol 2, that torch.save uses for plain data: numbers,
// strings, tuples, lists, dicts, and tensors whose bytes are in separate records. Reading builds a
// tree and calls nothing, so a hostile file can only be refused. Knows nothing about files.

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace shardstep::detail {

// Writes one pickle, from start to end. Containers are written in parts:
// begin_dict(), then keys and values alternately, end_dict().
class PickleWriter {
 public:
  PickleWriter();

  void begin_dict();
  void end_dict();
  void begin_list();
  void end_list();
  void string(const std::string& text);
  void integer(int64_t number);
  // A tensor, number, bool, string, none, or a tuple or list of these; `name` is for errors.
  void value(const c10::IValue& value, const std::string& name);

  // Ends the pickle and returns it.
  std::string finish();
  // The storages that tensors referred to; their keys are "0", "1", ...
  const std::vector<c10::Storage>& storages() const { return storages_; }

 private:
  void put(char op) { bytes_.push_back(op); }
  void put_number(uint64_t number, int width);
  void put_memo(const std::string& key);
  bool get_memo(const std::string& key);
  void real(double number);
  void global(const std::string& module, const std::string& name);
  void sizes(at::IntArrayRef sizes);
  void tensor(at::Tensor tensor, const std::string& name);

  std::string bytes_;
  std::unordered_map<std::string, uint32_t> memo_;
  std::vector<c10::Storage> storages_;
  // Two dtypes over one storage make two records: Python's format cannot express it in one.
  std::map<std::pair<const c10::StorageImpl*, at::ScalarType>, int64_t> storage_keys_;
};

// One value of a pickle. A container is complete once it is part of another, so values form no
// cycle, and `depth` is bounded.
struct PickleNode {
  enum class Kind { kLeaf, kTuple, kList, kDict, kGlobal, kStorage };
  Kind kind = Kind::kLeaf;
  // kLeaf: the value; kTuple and kList: the value once as_value has made it.
  c10::IValue value;
  // kTuple, kList: the elements; kDict: keys and values alternately.
  std::vector<std::shared_ptr<PickleNode>> items;
  // kGlobal: "module.name".
  std::string name;
  c10::Storage storage;
  at::ScalarType dtype = at::ScalarType::Undefined;
  int depth = 1;
  bool complete = false;
  bool converted = false;
};
using PickleNodePtr = std::shared_ptr<PickleNode>;

// Returns the storage of `nbytes` bytes that the file keeps under `key`.
using StorageLoader = std::function<c10::Storage(const std::string& key, size_t nbytes)>;

// Reads one pickle; throws a ValueError that says what is wrong with it.
PickleNodePtr read_pickle(std::string_view bytes, const StorageLoader& load_storage);

// The node as a NamedValues value; throws ValueError if it is, or contains, anything else.
c10::IValue as_value(PickleNode& node);

// A description of the node for errors, in Python's terms: "a dict", "the int 3".
std::string describe(const PickleNode& node);

}  // namespace shardstep::detail
