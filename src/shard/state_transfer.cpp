#include "shard/state_transfer.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>

#include "comm/agreement.h"
#include "comm/peer_input.h"
#include "launch/who.h"
#include "shard/state_layout.h"

namespace shardstep {
namespace {

constexpr int64_t kInlineBytes = 64;

// How a value is sent.
enum class Form : int64_t {
  kBytes,   // in the catalogue
  kInline,  // a small tensor, in the catalogue
  kWhole,   // a tensor of any shape
  kCut,     // a tensor with one element per element of the slice
};

struct Entry {
  std::string name;
  Form form = Form::kBytes;
  std::string bytes;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
};

// What one rank has to send: for each of its slices, in order, the values of its state. A slice
// without state differs from a slice with empty state.
struct SliceEntries {
  bool has_state = false;
  std::vector<Entry> entries;
};
using Catalogue = std::vector<SliceEntries>;

class Writer {
 public:
  void number(int64_t value) { text(&value, sizeof(value)); }
  void string(const std::string& value) {
    number(static_cast<int64_t>(value.size()));
    text(value.data(), value.size());
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void text(const void* data, size_t size) { bytes_.append(static_cast<const char*>(data), size); }
  std::string bytes_;
};

class Reader {
 public:
  Reader(std::string bytes, const detail::PeerInput& peer)
      : bytes_(std::move(bytes)), peer_(peer) {}
  // Of things that take at least so many bytes each.
  int64_t count(int64_t bytes = 1) {
    return number("a count in a catalogue of state", 0, left() / bytes);
  }
  int64_t number(const char* what, int64_t least, int64_t most) {
    int64_t value = 0;
    std::memcpy(&value, take(sizeof(value)), sizeof(value));
    return peer_.check(what, value, least, most);
  }
  std::string string() {
    const int64_t size = count();
    return {take(size), static_cast<size_t>(size)};
  }
  void end() const {
    peer_.require(left() == 0, "a catalogue of state that goes on after its end");
  }

 private:
  int64_t left() const { return static_cast<int64_t>(bytes_.size()) - at_; }
  const char* take(int64_t size) {
    peer_.require(size <= left(), "a catalogue of state that ends early");
    at_ += size;
    return bytes_.data() + at_ - size;
  }
  std::string bytes_;
  const detail::PeerInput& peer_;
  int64_t at_ = 0;
};

std::string encode(const Catalogue& catalogue) {
  Writer out;
  out.number(static_cast<int64_t>(catalogue.size()));
  for (const auto& [has_state, entries] : catalogue) {
    out.number(has_state);
    out.number(static_cast<int64_t>(entries.size()));
    for (const auto& entry : entries) {
      out.string(entry.name);
      out.number(static_cast<int64_t>(entry.form));
      out.string(entry.bytes);
      out.number(static_cast<int64_t>(entry.dtype));
      out.number(static_cast<int64_t>(entry.sizes.size()));
      for (int64_t size : entry.sizes) out.number(size);
    }
  }
  return out.bytes();
}

bool can_be_of_state(at::ScalarType dtype) {
  return dtype != at::ScalarType::Undefined && !at::isQIntType(dtype);
}

void decode_entry(Reader& in, const detail::PeerInput& peer, Entry& entry) {
  constexpr int64_t kMostElements = int64_t{1} << 50;
  entry.name = in.string();
  entry.form = static_cast<Form>(
      in.number("a form in a catalogue of state", 0, static_cast<int64_t>(Form::kCut)));
  entry.bytes = in.string();
  entry.dtype = static_cast<at::ScalarType>(in.number(
      "a dtype in a catalogue of state", 0, static_cast<int64_t>(at::ScalarType::NumOptions) - 1));
  peer.require(can_be_of_state(entry.dtype),
               "a catalogue of state with a dtype that state cannot have");
  entry.sizes.resize(in.count(sizeof(int64_t)));
  // Strides are products of sizes too, in which a zero counts as one.
  int64_t product = 1, numel = 1;
  for (auto& size : entry.sizes) {
    size = in.number("a size in a catalogue of state", 0, kMostElements);
    numel = size == 0 ? 0 : numel;
    product = std::max<int64_t>(size, 1) *
              peer.check("the elements of state in a catalogue of state", product, 0,
                         kMostElements / std::max<int64_t>(size, 1));
  }
  if (entry.form != Form::kInline) return;
  const auto bytes = numel * product * static_cast<int64_t>(c10::elementSize(entry.dtype));
  peer.require(static_cast<int64_t>(entry.bytes.size()) == bytes,
               "a catalogue of state with a tensor of another size than it says");
}

// What a rank with so many slices sent.
Catalogue decode(std::string bytes, size_t slices, const detail::PeerInput& peer) {
  Reader in(std::move(bytes), peer);
  const auto expected = static_cast<int64_t>(slices);
  Catalogue catalogue(in.number("the slices in a catalogue of state", expected, expected));
  constexpr int64_t kEntryNumbers = 5;
  for (auto& [has_state, entries] : catalogue) {
    has_state = in.number("whether a slice has state, in a catalogue of state,", 0, 1) != 0;
    entries.resize(in.count(kEntryNumbers * sizeof(int64_t)));
    for (auto& entry : entries) decode_entry(in, peer, entry);
  }
  in.end();
  return catalogue;
}

Entry entry_of(const StateValue& value, bool cut) {
  Entry entry{.name = value.name, .bytes = value.bytes, .sizes = {}};
  if (!value.tensor.defined()) return entry;
  entry.dtype = value.tensor.scalar_type();
  entry.sizes = value.tensor.sizes().vec();
  if (cut) {
    entry.form = Form::kCut;
  } else if (value.tensor.nbytes() <= kInlineBytes) {
    const auto tensor = value.tensor.detach().cpu().contiguous();
    entry.form = Form::kInline;
    entry.bytes.assign(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
  } else {
    entry.form = Form::kWhole;
  }
  return entry;
}

at::Tensor inline_tensor(const Entry& entry) {
  auto tensor = at::empty(entry.sizes, entry.dtype);
  std::copy(entry.bytes.begin(), entry.bytes.end(), static_cast<char*>(tensor.mutable_data_ptr()));
  return tensor;
}

// Room on the CPU for a whole state tensor, laid out as the parameter where shapes agree.
at::Tensor room_for(at::IntArrayRef sizes, at::ScalarType dtype, const at::Tensor& param) {
  const auto options = at::TensorOptions().dtype(dtype);
  return sizes == param.sizes() ? at::empty_strided(sizes, param.strides(), options)
                                : at::empty(sizes, options);
}

StateValue& value_named(ParamState& state, const std::string& name) {
  for (auto& value : state) {
    if (value.name == name) return value;
  }
  return state.emplace_back(StateValue{name, {}, {}});
}

using Slices = std::vector<const Slice*>;

// This rank's entries for each of its slices.
Catalogue catalogue_of(const Slices& slices, const EngineState& local, const Partition& partition) {
  Catalogue catalogue(slices.size());
  for (size_t i = 0; i < slices.size(); ++i) {
    const auto found = local.find(slices[i]->param);
    if (found == local.end()) continue;
    catalogue[i].has_state = true;
    for (const auto& value : found->second) {
      const bool cut =
          value.tensor.defined() &&
          detail::is_cut(value.tensor, slices[i]->elements, partition.sharding(slices[i]->param));
      catalogue[i].entries.push_back(entry_of(value, cut));
    }
  }
  return catalogue;
}

// Runs what may fail on one rank alone, and throws on every rank if it does. Collective.
void run_and_tell(const ShardEngine& engine, const std::function<void()>& body) {
  std::exception_ptr error;
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  detail::tell_every_rank(engine.control_group(), error);
}

// The text of every other rank's catalogue on `to`; nothing on other ranks. Collective.
Parts gather_catalogues(const ShardEngine& engine, const Catalogue& own, int to) {
  Exchange& exchange = engine.control();
  const auto& group = exchange.process_group();
  const auto device = detail::control_device(group);
  const auto text = encode(own);
  auto text_tensor = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::copy(text.begin(), text.end(), static_cast<char*>(text_tensor.mutable_data_ptr()));
  const auto size = at::full({1}, text_tensor.numel(), at::kLong).to(device);

  Parts sizes(group->getSize()), texts(group->getSize());
  for (auto& part : sizes) part = {at::empty_like(size)};
  exchange.gather({size}, sizes, to, ControlMessage::kStateSizes)->wait();
  run_and_tell(engine, [&] {
    for (int rank = 0; group->getRank() == to && rank < group->getSize(); ++rank) {
      if (rank == to) continue;
      constexpr int64_t kMostText = int64_t{1} << 36;
      const int64_t bytes = detail::PeerInput(group, rank)
                                .check("the size of a catalogue of state",
                                       sizes[rank][0].item<int64_t>(), 0, kMostText);
      texts[rank] = {at::empty({bytes}, at::TensorOptions(at::kByte).device(device))};
    }
  });
  exchange.gather({text_tensor.to(device)}, texts, to, ControlMessage::kStateCatalogues)->wait();
  return texts;
}

Catalogue decode(const at::Tensor& text, size_t slices, const detail::PeerInput& peer) {
  const auto bytes = text.cpu();
  const auto* data = static_cast<const char*>(bytes.const_data_ptr());
  return decode(std::string(data, data + bytes.numel()), slices, peer);
}

// This rank's tensors of a bucket in the order of its catalogue, 1-D and on the parameters' device.
std::vector<at::Tensor> outgoing(const std::vector<at::Tensor>& params, const Slices& slices,
                                 const Catalogue& catalogue, const EngineState& local,
                                 size_t bucket) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < slices.size(); ++i) {
    if (slices[i]->bucket != bucket) continue;
    const auto& param = params[slices[i]->param];
    for (size_t v = 0; v < catalogue[i].entries.size(); ++v) {
      const auto form = catalogue[i].entries[v].form;
      if (form != Form::kWhole && form != Form::kCut) continue;
      const auto& state = local.at(slices[i]->param)[v].tensor;
      const auto ordered = form == Form::kWhole && state.sizes() == param.sizes()
                               ? in_order_of(param, state)
                               : state.contiguous();
      tensors.push_back(flat_view(ordered).to(param.device()));
    }
  }
  return tensors;
}

// Where the same tensors belong in the whole state, in which memory for them is allocated. Values
// in the catalogue are stored right away.
std::vector<at::Tensor> places(const std::vector<at::Tensor>& params, const Slices& slices,
                               const Catalogue& catalogue, EngineState& whole, size_t bucket) {
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < slices.size(); ++i) {
    if (slices[i]->bucket != bucket) continue;
    const auto& [param_index, rank, elements, in_bucket, offset] = *slices[i];
    const auto& param = params[param_index];
    if (!catalogue[i].has_state) continue;
    auto& state = whole[param_index];
    for (const auto& entry : catalogue[i].entries) {
      auto& value = value_named(state, entry.name);
      if (entry.form == Form::kBytes) {
        value.bytes = entry.bytes;
      } else if (entry.form == Form::kInline) {
        value.tensor = room_for(entry.sizes, entry.dtype, param).copy_(inline_tensor(entry));
      } else {
        const bool cut = entry.form == Form::kCut;
        if (!value.tensor.defined()) {
          const at::IntArrayRef sizes = cut ? param.sizes() : at::IntArrayRef(entry.sizes);
          value.tensor = room_for(sizes, entry.dtype, param);
        }
        const auto flat = flat_view(value.tensor);
        tensors.push_back(cut ? flat.narrow(0, elements.begin, elements.size()) : flat);
      }
    }
  }
  return tensors;
}

// Tensors to receive into: the destinations themselves if messages can be received there.
std::vector<at::Tensor> landing(const std::vector<at::Tensor>& places, at::Device device) {
  if (device.is_cpu()) return places;
  std::vector<at::Tensor> tensors;
  for (const auto& place : places) {
    tensors.push_back(at::empty(place.sizes(), place.options().device(device)));
  }
  return tensors;
}

void copy_all(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
  for (size_t i = 0; i < from.size(); ++i) {
    if (!from[i].is_same(to[i])) to[i].copy_(from[i]);
  }
}

// A copy of the slice's part of a state tensor, or of all of it if it is not like the parameter.
at::Tensor cut_tensor(const ShardEngine& engine, const Slice& slice, const std::string& name,
                      const at::Tensor& whole) {
  const auto& param = engine.param(slice.param);
  if (!detail::like_param(name, whole.sizes(), param)) return whole.clone();
  auto ordered = in_order_of(param, whole);
  if (engine.sharding(slice.param) == Sharding::kElement) {
    ordered = flat_view(ordered).narrow(0, slice.elements.begin, slice.elements.size());
  }
  return ordered.to(ordered.options().device(param.device()), false, /*copy=*/true);
}

// What ranks that share a value must say alike.
std::string describe(const Entry& entry, const at::Tensor& param) {
  if (entry.form == Form::kBytes) return "no tensor";
  const bool cut = entry.form == Form::kCut;
  return c10::str(entry.dtype, ' ', cut ? param.sizes() : at::IntArrayRef(entry.sizes));
}

// Otherwise parts of it would be received into memory of another size.
void check_alike(const ShardEngine& engine, const std::vector<Slices>& slices,
                 const std::vector<Catalogue>& catalogues) {
  struct First {
    size_t rank;
    std::string description;
  };
  std::map<std::pair<int64_t, std::string>, First> known;
  for (size_t rank = 0; rank < catalogues.size(); ++rank) {
    for (size_t i = 0; i < slices[rank].size(); ++i) {
      const auto param = slices[rank][i]->param;
      for (const auto& entry : catalogues[rank][i].entries) {
        const auto description = describe(entry, engine.param(param));
        const auto [first, is_new] =
            known.try_emplace({param, entry.name}, First{rank, description});
        TORCH_CHECK_VALUE(is_new || first->second.description == description,
                          "shardstep: expected the state \"", entry.name, "\" of parameter ", param,
                          " to have one dtype and shape on all ranks, got ",
                          first->second.description, " on rank ", first->second.rank, " and ",
                          description, " on rank ", rank, detail::who(engine.process_group()));
      }
    }
  }
}

// By bucket: the places of what each rank sends. REQUIRES: the rank on which state is gathered.
std::vector<Parts> places_for_all(const ShardEngine& engine, const Catalogue& own,
                                  const Parts& texts, EngineState& whole) {
  std::vector<Slices> slices;
  std::vector<Catalogue> catalogues;
  for (int rank = 0; rank < engine.world_size(); ++rank) {
    slices.push_back(engine.partition().owned(rank));
    catalogues.push_back(rank == engine.rank()
                             ? own
                             : decode(texts[rank].front(), slices.back().size(),
                                      detail::PeerInput(engine.process_group(), rank)));
  }
  check_alike(engine, slices, catalogues);
  std::vector<Parts> targets(engine.buckets().size());
  for (size_t b = 0; b < targets.size(); ++b) {
    for (size_t rank = 0; rank < catalogues.size(); ++rank) {
      try {
        targets[b].push_back(places(engine.params(), slices[rank], catalogues[rank], whole, b));
      } catch (const c10::Error& error) {
        TORCH_CHECK(false, "shardstep: found no room for the state of rank ", rank,
                    " that its catalogue of state lists: ", error.what_without_backtrace(),
                    detail::who(engine.process_group()));
      }
    }
  }
  return targets;
}

// Throws on every rank unless all of them gather on the same one.
void check_target(const ShardEngine& engine, int to) {
  const auto targets = detail::all_gather_number(engine.control_group(), to);
  for (size_t rank = 0; rank < targets.size(); ++rank) {
    TORCH_CHECK_VALUE(0 <= targets[rank] && targets[rank] < engine.world_size(),
                      "shardstep: expected a rank from 0 to ", engine.world_size() - 1,
                      " to gather the state on, got ", targets[rank], " on rank ", rank,
                      detail::who(engine.process_group()));
    TORCH_CHECK_VALUE(targets[rank] == targets[0],
                      "shardstep: expected one rank to gather the state on, got ", targets[0],
                      " on rank 0 and ", targets[rank], " on rank ", rank,
                      detail::who(engine.process_group()));
  }
}

}  // namespace

EngineState gather_state(const ShardEngine& engine, const EngineState& local, int to) {
  check_target(engine, to);
  at::NoGradGuard no_grad;
  const auto own_slices = engine.partition().owned(engine.rank());
  const auto own = catalogue_of(own_slices, local, engine.partition());
  Exchange* const exchange = engine.exchange();
  const auto texts = exchange ? gather_catalogues(engine, own, to) : Parts();

  EngineState whole;
  // By bucket: where what each rank sends belongs. Made before anything is sent, so that nothing
  // fails in between.
  std::vector<Parts> targets(engine.buckets().size());
  run_and_tell(engine, [&] {
    if (engine.rank() == to) targets = places_for_all(engine, own, texts, whole);
  });

  for (size_t b = 0; b < engine.buckets().size(); ++b) {
    const auto sent = outgoing(engine.params(), own_slices, own, local, b);
    Parts received;
    for (const auto& target : targets[b]) {
      received.push_back(landing(target, engine.buckets()[b].params().front().device()));
    }
    if (exchange)
      exchange->gather(sent, received, to, {MessageKind::kState, static_cast<int64_t>(b)})->wait();
    for (size_t r = 0; r < targets[b].size(); ++r) {
      copy_all(static_cast<int>(r) == engine.rank() ? sent : received[r], targets[b][r]);
    }
  }
  return whole;
}

EngineState cut_state(const ShardEngine& engine, const EngineState& whole) {
  at::NoGradGuard no_grad;
  EngineState own;
  for (const auto* slice : engine.partition().owned(engine.rank())) {
    const auto found = whole.find(slice->param);
    if (found == whole.end()) continue;
    auto& state = own[slice->param];
    for (const auto& value : found->second) {
      StateValue cut{value.name, {}, value.bytes};
      if (value.tensor.defined()) {
        cut.tensor = cut_tensor(engine, *slice, value.name, value.tensor.detach());
      }
      state.push_back(std::move(cut));
    }
  }
  return own;
}

}  // namespace shardstep
