#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <optional>

#include "format/pickle.h"
#include "format/pickle_format.h"
#include "shardstep/state_dict.h"

namespace shardstep::detail {

namespace {

using Kind = PickleNode::Kind;

constexpr int kMaxDepth = 32;
constexpr size_t kMaxDims = 64;

PickleNodePtr leaf(c10::IValue value) {
  auto node = std::make_shared<PickleNode>();
  node->value = std::move(value);
  return node;
}

PickleNodePtr container(Kind kind) {
  auto node = std::make_shared<PickleNode>();
  node->kind = kind;
  return node;
}

void add(PickleNode& parent, const PickleNodePtr& child) {
  TORCH_CHECK_VALUE(!parent.complete, "a container that changes after it was used");
  child->complete = true;
  parent.depth = std::max(parent.depth, child->depth + 1);
  TORCH_CHECK_VALUE(parent.depth <= kMaxDepth, "containers nested deeper than ", kMaxDepth);
  parent.items.push_back(child);
}

int64_t int_of(const PickleNode& node, const char* what) {
  TORCH_CHECK_VALUE(node.kind == Kind::kLeaf && node.value.isInt(), "expected an int as ", what,
                    ", got ", describe(node));
  return node.value.toInt();
}

const std::string& string_of(const PickleNode& node, const char* what) {
  TORCH_CHECK_VALUE(node.kind == Kind::kLeaf && node.value.isString(), "expected a string as ",
                    what, ", got ", describe(node));
  return node.value.toStringRef();
}

std::vector<int64_t> ints_of(const PickleNode& node, const char* what) {
  TORCH_CHECK_VALUE(node.kind == Kind::kTuple && node.items.size() <= kMaxDims,
                    "expected a short tuple as ", what, ", got ", describe(node));
  std::vector<int64_t> ints;
  for (const auto& item : node.items) ints.push_back(int_of(*item, what));
  return ints;
}

// The elements that a storage must have for a tensor of this shape; unset if the shape is invalid.
std::optional<int64_t> extent(int64_t offset, const std::vector<int64_t>& sizes,
                              const std::vector<int64_t>& strides) {
  if (sizes.size() != strides.size() || offset < 0) return std::nullopt;
  int64_t last = offset;
  int64_t numel = 1;
  for (size_t i = 0; i < sizes.size(); ++i) {
    int64_t span = 0;
    if (sizes[i] < 0 || strides[i] < 0 || __builtin_mul_overflow(numel, sizes[i], &numel) ||
        (sizes[i] > 0 && __builtin_mul_overflow(sizes[i] - 1, strides[i], &span)) ||
        __builtin_add_overflow(last, span, &last) || last == INT64_MAX) {
      return std::nullopt;
    }
  }
  return numel == 0 ? 0 : last + 1;
}

// The dtype that a torch global names, if any.
std::optional<at::ScalarType> dtype_named(const PickleNode& node) {
  constexpr std::string_view kTorch = "torch.";
  if (node.kind != Kind::kGlobal || !node.name.starts_with(kTorch)) return std::nullopt;
  const auto& dtypes = c10::getStringToDtypeMap();
  const auto found = dtypes.find(node.name.substr(kTorch.size()));
  return found == dtypes.end() ? std::nullopt : std::optional(found->second);
}

class PickleReader {
 public:
  PickleReader(std::string_view bytes, const StorageLoader& load_storage)
      : bytes_(bytes), load_storage_(load_storage) {}

  PickleNodePtr read();

 private:
  // Reads one instruction; false at the end.
  bool step();

  std::string_view take(size_t size);
  std::string_view take_line();
  uint64_t take_number(int width);
  PickleNodePtr take_long();
  PickleNodePtr take_real();

  void push(PickleNodePtr node) { stack_.push_back(std::move(node)); }
  PickleNodePtr pop();
  PickleNodePtr& top();
  // What is above the last mark.
  std::vector<PickleNodePtr> pop_mark();
  std::vector<PickleNodePtr> pop_some(size_t count);

  void memoize(uint64_t key);
  void recall(uint64_t key);
  void make_tuple(const std::vector<PickleNodePtr>& items);
  void extend(Kind kind, const std::vector<PickleNodePtr>& items);
  void global();
  void storage();
  void reduce();
  void build();
  PickleNodePtr tensor(const PickleNode& args);

  std::string_view bytes_;
  size_t position_ = 0;
  const StorageLoader& load_storage_;
  std::vector<PickleNodePtr> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint64_t, PickleNodePtr> memo_;
  std::unordered_map<std::string, PickleNodePtr> storages_;
};

std::string_view PickleReader::take(size_t size) {
  TORCH_CHECK_VALUE(size <= bytes_.size() - position_, "the pickle is truncated");
  auto part = bytes_.substr(position_, size);
  position_ += size;
  return part;
}

std::string_view PickleReader::take_line() {
  auto end = bytes_.find('\n', position_);
  TORCH_CHECK_VALUE(end != std::string_view::npos, "the pickle is truncated");
  auto line = take(end - position_);
  ++position_;
  return line;
}

uint64_t PickleReader::take_number(int width) {
  uint64_t number = 0;
  int shift = 0;
  for (auto byte : take(width)) {
    number |= uint64_t{static_cast<uint8_t>(byte)} << shift;
    shift += 8;
  }
  return number;
}

PickleNodePtr PickleReader::take_long() {
  auto width = static_cast<int>(take_number(1));
  TORCH_CHECK_VALUE(width <= 8, "an int of ", width, " bytes");
  if (width == 0) return leaf(int64_t{0});
  int unused = 64 - 8 * width;
  return leaf(static_cast<int64_t>(take_number(width) << unused) >> unused);
}

PickleNodePtr PickleReader::take_real() {
  uint64_t bits = 0;
  for (auto byte : take(8)) bits = bits << 8 | static_cast<uint8_t>(byte);
  return leaf(std::bit_cast<double>(bits));
}

PickleNodePtr& PickleReader::top() {
  TORCH_CHECK_VALUE(stack_.size() > (marks_.empty() ? 0 : marks_.back()), "an empty stack");
  return stack_.back();
}

PickleNodePtr PickleReader::pop() {
  auto node = top();
  stack_.pop_back();
  return node;
}

std::vector<PickleNodePtr> PickleReader::pop_some(size_t count) {
  std::vector<PickleNodePtr> items(count);
  for (size_t i = count; i-- > 0;) items[i] = pop();
  return items;
}

std::vector<PickleNodePtr> PickleReader::pop_mark() {
  TORCH_CHECK_VALUE(!marks_.empty(), "an end without a mark");
  auto items = pop_some(stack_.size() - marks_.back());
  marks_.pop_back();
  return items;
}

void PickleReader::memoize(uint64_t key) { memo_[key] = top(); }

void PickleReader::recall(uint64_t key) {
  auto found = memo_.find(key);
  TORCH_CHECK_VALUE(found != memo_.end(), "a reference to a missing object");
  found->second->complete = true;
  push(found->second);
}

void PickleReader::make_tuple(const std::vector<PickleNodePtr>& items) {
  auto tuple = container(Kind::kTuple);
  for (const auto& item : items) add(*tuple, item);
  tuple->complete = true;
  push(std::move(tuple));
}

void PickleReader::extend(Kind kind, const std::vector<PickleNodePtr>& items) {
  auto& target = *top();
  TORCH_CHECK_VALUE(target.kind == kind && (kind != Kind::kDict || items.size() % 2 == 0),
                    "items that do not belong in ", describe(target));
  for (const auto& item : items) add(target, item);
}

void PickleReader::global() {
  auto node = container(Kind::kGlobal);
  node->name = take_line();
  node->name += '.';
  node->name += take_line();
  push(std::move(node));
}

// ("storage", type, key, location, elements); the location is ignored, everything goes to the CPU.
void PickleReader::storage() {
  auto id = pop();
  TORCH_CHECK_VALUE(id->kind == Kind::kTuple && id->items.size() == 5 &&
                        string_of(*id->items[0], "a storage's tag") == "storage" &&
                        id->items[1]->kind == Kind::kGlobal,
                    "expected a storage, got ", describe(*id));
  const auto& type_name = id->items[1]->name;
  auto type = std::find_if(
      std::begin(kStorageTypes), std::end(kStorageTypes),
      [&](const auto& type) { return type_name == std::string("torch.") + type.name; });
  TORCH_CHECK_VALUE(type != std::end(kStorageTypes), "expected a torch storage, got ", type_name);
  const auto& key = string_of(*id->items[2], "a storage's key");
  auto numel = int_of(*id->items[4], "a storage's size");
  int64_t nbytes = 0;
  TORCH_CHECK_VALUE(
      numel >= 0 && !__builtin_mul_overflow(
                        numel, static_cast<int64_t>(c10::elementSize(type->dtype)), &nbytes),
      "a storage of ", numel, " elements");
  auto& node = storages_[key];
  if (!node) {
    auto loaded = container(Kind::kStorage);
    loaded->dtype = type->dtype;
    loaded->storage = load_storage_(key, nbytes);
    node = std::move(loaded);
  }
  TORCH_CHECK_VALUE(node->dtype == type->dtype && node->storage.nbytes() == size_t(nbytes),
                    "two descriptions of storage ", key);
  push(node);
}

PickleNodePtr PickleReader::tensor(const PickleNode& args) {
  TORCH_CHECK_VALUE(args.items.size() >= 5 && args.items[0]->kind == Kind::kStorage,
                    "a tensor without a storage");
  const auto& storage = *args.items[0];
  auto offset = int_of(*args.items[1], "a tensor's offset");
  auto sizes = ints_of(*args.items[2], "a tensor's sizes");
  auto strides = ints_of(*args.items[3], "a tensor's strides");
  auto needed = extent(offset, sizes, strides);
  auto present = static_cast<int64_t>(storage.storage.nbytes() / c10::elementSize(storage.dtype));
  TORCH_CHECK_VALUE(needed && std::max(*needed, offset) <= present, "a tensor of sizes ",
                    at::IntArrayRef(sizes), " and strides ", at::IntArrayRef(strides),
                    " at offset ", offset, " of a storage of ", present, " elements");
  auto tensor = at::empty({0}, at::TensorOptions(storage.dtype).device(storage.storage.device()));
  tensor.set_(storage.storage, offset, sizes, strides);
  const auto& grad = *args.items[4];
  if (grad.kind == Kind::kLeaf && grad.value.isBool() && grad.value.toBool()) {
    tensor.set_requires_grad(true);
  }
  return leaf(std::move(tensor));
}

void PickleReader::reduce() {
  auto args = pop();
  auto function = pop();
  TORCH_CHECK_VALUE(function->kind == Kind::kGlobal && args->kind == Kind::kTuple, "a call of ",
                    describe(*function));
  if (function->name == "torch._utils._rebuild_tensor_v2") {
    push(tensor(*args));
  } else if (function->name == "collections.OrderedDict" && args->items.empty()) {
    push(container(Kind::kDict));
  } else {
    TORCH_CHECK_VALUE(false, "an object of the Python class ", function->name);
  }
}

// Attributes of a dict, which torch.nn sets on a module's state dict; nothing here reads them.
void PickleReader::build() {
  pop();
  TORCH_CHECK_VALUE(top()->kind == Kind::kDict, "attributes of ", describe(*top()));
}

bool PickleReader::step() {
  auto code = take(1)[0];
  switch (code) {
    case op::kProto: {
      auto protocol = take_number(1);
      TORCH_CHECK_VALUE(protocol == kPickleProtocol, "pickle protocol ", protocol);
      break;
    }
    case op::kStop:
      return false;
    case op::kMark:
      marks_.push_back(stack_.size());
      break;
    case op::kNone:
      push(leaf({}));
      break;
    case op::kNewTrue:
      push(leaf(true));
      break;
    case op::kNewFalse:
      push(leaf(false));
      break;
    case op::kBinInt:
      push(leaf(int64_t{static_cast<int32_t>(take_number(4))}));
      break;
    case op::kBinInt1:
      push(leaf(static_cast<int64_t>(take_number(1))));
      break;
    case op::kBinInt2:
      push(leaf(static_cast<int64_t>(take_number(2))));
      break;
    case op::kLong1:
      push(take_long());
      break;
    case op::kBinFloat:
      push(take_real());
      break;
    case op::kBinUnicode:
      push(leaf(std::string(take(take_number(4)))));
      break;
    case op::kEmptyTuple:
      make_tuple({});
      break;
    case op::kTuple:
      make_tuple(pop_mark());
      break;
    case op::kTuple1:
      make_tuple(pop_some(1));
      break;
    case op::kTuple2:
      make_tuple(pop_some(2));
      break;
    case op::kTuple3:
      make_tuple(pop_some(3));
      break;
    case op::kEmptyList:
      push(container(Kind::kList));
      break;
    case op::kAppend:
      extend(Kind::kList, pop_some(1));
      break;
    case op::kAppends:
      extend(Kind::kList, pop_mark());
      break;
    case op::kEmptyDict:
      push(container(Kind::kDict));
      break;
    case op::kSetItem:
      extend(Kind::kDict, pop_some(2));
      break;
    case op::kSetItems:
      extend(Kind::kDict, pop_mark());
      break;
    case op::kGlobal:
      global();
      break;
    case op::kReduce:
      reduce();
      break;
    case op::kBuild:
      build();
      break;
    case op::kBinPersId:
      storage();
      break;
    case op::kBinPut:
      memoize(take_number(1));
      break;
    case op::kLongBinPut:
      memoize(take_number(4));
      break;
    case op::kBinGet:
      recall(take_number(1));
      break;
    case op::kLongBinGet:
      recall(take_number(4));
      break;
    default:
      TORCH_CHECK_VALUE(false, "pickle instruction ", int{static_cast<uint8_t>(code)}, " at byte ",
                        position_ - 1);
  }
  return true;
}

PickleNodePtr PickleReader::read() {
  while (step()) {
  }
  TORCH_CHECK_VALUE(marks_.empty(), "a mark without an end");
  return pop();
}

}  // namespace

PickleNodePtr read_pickle(std::string_view bytes, const StorageLoader& load_storage) {
  return PickleReader(bytes, load_storage).read();
}

c10::IValue as_value(PickleNode& node) {
  if (node.kind == Kind::kLeaf || node.converted) return node.value;
  if (const auto dtype = dtype_named(node)) return dtype_to_value(*dtype);
  TORCH_CHECK_VALUE(node.kind == Kind::kTuple || node.kind == Kind::kList,
                    "expected a tensor, number, bool, string, None, dtype, or a tuple or list of "
                    "these, got ",
                    describe(node));
  std::vector<c10::IValue> elements;
  for (const auto& item : node.items) elements.push_back(as_value(*item));
  if (node.kind == Kind::kTuple) {
    node.value = c10::ivalue::Tuple::create(std::move(elements));
  } else {
    c10::impl::GenericList list(c10::AnyType::get());
    for (auto& element : elements) list.push_back(std::move(element));
    node.value = std::move(list);
  }
  // Shared parts are converted once, so the size of the file bounds the work.
  node.converted = true;
  return node.value;
}

std::string describe(const PickleNode& node) {
  switch (node.kind) {
    case Kind::kTuple:
      return "a tuple";
    case Kind::kList:
      return "a list";
    case Kind::kDict:
      return "a dict";
    case Kind::kGlobal:
      return "Python's " + node.name;
    case Kind::kStorage:
      return "a storage";
    case Kind::kLeaf:
      break;
  }
  const auto& value = node.value;
  if (value.isNone()) return "None";
  if (value.isBool()) return value.toBool() ? "True" : "False";
  if (value.isInt()) return "the int " + std::to_string(value.toInt());
  if (value.isDouble()) return "the float " + std::to_string(value.toDouble());
  if (value.isString()) return "the string '" + value.toStringRef().substr(0, 64) + "'";
  return "a tensor";
}

}  // namespace shardstep::detail
