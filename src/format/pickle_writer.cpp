#include <ATen/ATen.h>

#include <bit>

#include "format/pickle.h"
#include "format/pickle_format.h"
#include "shardstep/state_dict.h"

namespace shardstep::detail {

PickleWriter::PickleWriter() {
  put(op::kProto);
  put(kPickleProtocol);
}

std::string PickleWriter::finish() {
  put(op::kStop);
  return std::move(bytes_);
}

void PickleWriter::put_number(uint64_t number, int width) {
  for (int i = 0; i < width; ++i) put(static_cast<char>(number >> (8 * i)));
}

// Memoizes the value just written, so that it need not be written again.
void PickleWriter::put_memo(const std::string& key) {
  auto id = static_cast<uint32_t>(memo_.size());
  memo_.emplace(key, id);
  if (id < 256) {
    put(op::kBinPut);
    put_number(id, 1);
  } else {
    put(op::kLongBinPut);
    put_number(id, 4);
  }
}

bool PickleWriter::get_memo(const std::string& key) {
  auto found = memo_.find(key);
  if (found == memo_.end()) return false;
  put(found->second < 256 ? op::kBinGet : op::kLongBinGet);
  put_number(found->second, found->second < 256 ? 1 : 4);
  return true;
}

void PickleWriter::begin_dict() {
  put(op::kEmptyDict);
  put(op::kMark);
}

void PickleWriter::end_dict() { put(op::kSetItems); }

void PickleWriter::begin_list() {
  put(op::kEmptyList);
  put(op::kMark);
}

void PickleWriter::end_list() { put(op::kAppends); }

void PickleWriter::string(const std::string& text) {
  if (get_memo("s" + text)) return;
  TORCH_CHECK_VALUE(text.size() <= UINT32_MAX, "shardstep: a string of ", text.size(),
                    " bytes is too long for a state dict");
  put(op::kBinUnicode);
  put_number(text.size(), 4);
  bytes_ += text;
  put_memo("s" + text);
}

void PickleWriter::integer(int64_t number) {
  auto bits = static_cast<uint64_t>(number);
  if (number >= 0 && number < 256) {
    put(op::kBinInt1);
    put_number(bits, 1);
  } else if (number == static_cast<int32_t>(number)) {
    put(op::kBinInt);
    put_number(bits, 4);
  } else {
    put(op::kLong1);
    put_number(8, 1);
    put_number(bits, 8);
  }
}

void PickleWriter::real(double number) {
  put(op::kBinFloat);
  auto bits = std::bit_cast<uint64_t>(number);
  for (int shift = 56; shift >= 0; shift -= 8) put(static_cast<char>(bits >> shift));
}

void PickleWriter::global(const std::string& module, const std::string& name) {
  auto text = module + "\n" + name + "\n";
  if (get_memo("g" + text)) return;
  put(op::kGlobal);
  bytes_ += text;
  put_memo("g" + text);
}

void PickleWriter::sizes(at::IntArrayRef sizes) {
  put(op::kMark);
  for (auto size : sizes) integer(size);
  put(op::kTuple);
}

void PickleWriter::value(const c10::IValue& value, const std::string& name) {
  if (value.isNone()) {
    put(op::kNone);
  } else if (value.isBool()) {
    put(value.toBool() ? op::kNewTrue : op::kNewFalse);
  } else if (value.isInt()) {
    integer(value.toInt());
  } else if (value.isDouble()) {
    real(value.toDouble());
  } else if (value.isString()) {
    string(value.toStringRef());
  } else if (value.isTensor()) {
    tensor(value.toTensor(), name);
  } else if (value.isTuple()) {
    put(op::kMark);
    for (const auto& element : value.toTupleRef().elements()) this->value(element, name);
    put(op::kTuple);
  } else if (value.isList()) {
    begin_list();
    for (const c10::IValue& element : value.toList()) this->value(element, name);
    end_list();
  } else if (const auto dtype = value_to_dtype(value)) {
    global("torch", std::string(c10::getDtypeNames(*dtype).first));
  } else {
    TORCH_CHECK_VALUE(false, "shardstep: a state dict cannot hold '", name, "' of type ",
                      value.tagKind());
  }
}

// torch._utils._rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks), where the
// storage is the persistent id ("storage", type, key, location, elements).
void PickleWriter::tensor(at::Tensor tensor, const std::string& name) {
  TORCH_CHECK_VALUE(tensor.defined(), "shardstep: a state dict cannot hold '", name,
                    "', an undefined tensor");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && !tensor.is_quantized() &&
                        !tensor.unsafeGetTensorImpl()->is_python_dispatch() &&
                        tensor.has_storage() && storage_type(tensor.scalar_type()),
                    "shardstep: a state dict cannot hold '", name, "', a tensor of type ",
                    tensor.toString());
  tensor = tensor.resolve_conj().resolve_neg();
  auto dtype = tensor.scalar_type();
  auto [entry, is_new] =
      storage_keys_.try_emplace({tensor.storage().unsafeGetStorageImpl(), dtype}, storages_.size());
  if (is_new) storages_.push_back(tensor.storage());

  global("torch._utils", "_rebuild_tensor_v2");
  put(op::kMark);
  put(op::kMark);
  string("storage");
  global("torch", storage_type(dtype));
  string(std::to_string(entry->second));
  string("cpu");
  integer(static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize()));
  put(op::kTuple);
  put(op::kBinPersId);
  integer(tensor.storage_offset());
  sizes(tensor.sizes());
  sizes(tensor.strides());
  put(tensor.requires_grad() ? op::kNewTrue : op::kNewFalse);
  global("collections", "OrderedDict");
  put(op::kEmptyTuple);
  put(op::kReduce);
  put(op::kTuple);
  put(op::kReduce);
}

}  // namespace shardstep::detail
