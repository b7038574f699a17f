#include "comm/native_exchange.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include "comm/gradient_blocks.h"
#include "comm/pending_works.h"
#include "comm/rank_order_sum.h"
#include "failure_points.h"
#include "launch/process_group_backends.h"
#include "torch_versions.h"

namespace shardstep::detail {
namespace {

// The tensor that the parts form, if they are of equal size, one per rank, and adjacent in memory.
std::optional<at::Tensor> joined(const Parts& parts) {
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].size() != 1) return std::nullopt;
    const auto& first = parts.front().front();
    const auto& part = parts[rank].front();
    if (part.numel() != first.numel() || !part.storage().is_alias_of(first.storage()) ||
        part.storage_offset() !=
            first.storage_offset() + static_cast<int64_t>(rank) * first.numel()) {
      return std::nullopt;
    }
  }
  const auto& first = parts.front().front();
  return first.as_strided({static_cast<int64_t>(parts.size()) * first.numel()}, {1},
                          first.storage_offset());
}

std::vector<int64_t> numel_by_rank(const Parts& parts) {
  std::vector<int64_t> numel;
  for (const auto& rank_parts : parts) {
    numel.push_back(0);
    for (const auto& part : rank_parts) numel.back() += part.numel();
  }
  return numel;
}

// Where each rank's elements are in a flat tensor. Ranges of equal size are moved by one
// collective, at the price of padding; others by a coalesced call of one operation per rank.
struct FlatLayout {
  FlatLayout(std::vector<int64_t> numel, bool coalesces) : numel(std::move(numel)) {
    const auto ranks = static_cast<int64_t>(this->numel.size());
    const int64_t largest = *std::max_element(this->numel.begin(), this->numel.end());
    int64_t total = 0;
    for (int64_t one : this->numel) total += one;
    equal = !coalesces || ranks * largest <= total + total / 4;
    for (int64_t one : this->numel) {
      begin.push_back(size);
      size += equal ? largest : one;
    }
    padded = equal ? largest : 0;
  }

  at::Tensor part(const at::Tensor& flat, size_t rank) const {
    return flat.narrow(0, begin[rank], numel[rank]);
  }

  std::vector<int64_t> numel;  // by rank
  std::vector<int64_t> begin;  // by rank
  int64_t size = 0;
  bool equal = false;
  int64_t padded = 0;  // size of a range, if they are equal
};

// The parts in the order of the layout, in one tensor and by one kernel.
at::Tensor flattened(const Parts& parts, const FlatLayout& layout,
                     const at::TensorOptions& options) {
  int64_t longest_gap = 0;
  for (int64_t numel : layout.numel) longest_gap = std::max(longest_gap, layout.padded - numel);
  const auto padding = at::empty({longest_gap}, options);
  std::vector<at::Tensor> pieces;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    pieces.insert(pieces.end(), parts[rank].begin(), parts[rank].end());
    const int64_t gap = layout.padded - layout.numel[rank];
    if (layout.equal && gap > 0) pieces.push_back(padding.narrow(0, 0, gap));
  }
  return pieces.empty() ? at::empty({0}, options) : at::cat(pieces);
}

// Copies between flat tensors and parts, by one kernel.
class Copies {
 public:
  // The parts are side by side in `flat`.
  void add(at::Tensor flat, const std::vector<at::Tensor>& parts) {
    int64_t offset = 0;
    for (const auto& part : parts) {
      from_.push_back(flat.narrow(0, offset, part.numel()));
      to_.push_back(part);
      offset += part.numel();
    }
  }
  void make() {
    if (!to_.empty()) at::_foreach_copy_(to_, from_);
  }

 private:
  std::vector<at::Tensor> from_, to_;
};

// Parts of one dtype and device each, in an order that is the same on all ranks.
std::vector<Parts> by_kind(const Parts& parts) {
  std::vector<std::pair<at::ScalarType, at::Device>> kinds;
  std::vector<Parts> result;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    for (const auto& part : parts[rank]) {
      const std::pair kind(part.scalar_type(), part.device());
      const auto found = std::find(kinds.begin(), kinds.end(), kind);
      const auto index = found - kinds.begin();
      if (found == kinds.end()) {
        kinds.push_back(kind);
        result.emplace_back(parts.size());
      }
      result[index][rank].push_back(part);
    }
  }
  return result;
}

class NativeReduction;

class NativeExchange : public Exchange {
 public:
  using Exchange::Exchange;

  const char* name() const override { return "native"; }
  bool any_order() const override { return false; }

  std::unique_ptr<Pending> all_gather(const Parts& parts, MessageTag) override {
    auto pending = std::make_unique<PendingWorks>(group_);
    for (const auto& some : by_kind(parts)) start_gather(some, *pending);
    count_gather(parts);
    SHARDSTEP_FAILURE_POINT("native gather: started");
    return pending;
  }

  // Few at a time: each may have a flat copy of its bucket.
  void all_gather_and_wait(const std::vector<const Parts*>& buckets) override {
    constexpr size_t kAhead = 2;
    std::vector<std::unique_ptr<Pending>> pending;
    for (size_t b = 0; b < buckets.size(); ++b) {
      if (b >= kAhead) std::exchange(pending[b - kAhead], nullptr)->wait();
      pending.push_back(all_gather(*buckets[b], MessageTag::bucket(static_cast<int64_t>(b))));
    }
    for (auto& bucket : pending) {
      if (bucket) bucket->wait();
    }
  }

  std::unique_ptr<Pending> reduce_scatter(const Parts& parts, MessageTag, double divisor) override {
    auto pending = std::make_unique<PendingWorks>(group_);
    const auto kinds = by_kind(parts);
    TORCH_INTERNAL_ASSERT(kinds.size() <= 1, "shardstep: parts of several dtypes");
    count_sum(parts);
    if (kinds.empty()) return pending;
    const auto options = options_of(parts);
    const auto layout = layout_of(numel_by_rank(parts), options.device());
    const auto whole = joined(parts);
    auto flat = whole ? *whole : flattened(parts, layout, options);
    // What other ranks own stays as it is.
    if (whole && sums_whole(flat.device())) flat = flat.clone();
    // Into a tensor of its own: input and output may not overlap.
    const auto sum = start_sum(flat, layout, {}, *pending);
    pending->then([own = parts[rank()], sum, divisor] {
      if (divisor != 1) at::Tensor(sum).div_(divisor);
      Copies copies;
      copies.add(sum, own);
      copies.make();
    });
    SHARDSTEP_FAILURE_POINT("native sum: started");
    return pending;
  }

  std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) override;

  FlatLayout layout_of(std::vector<int64_t> numel, at::Device device) const {
    return {std::move(numel), group_->getBackend(device.type())->supportsCoalescing()};
  }

  // Whether sums are taken of whole flat tensors, in place. Gloo's reduce_scatter does that too, in
  // a copy, but nobody can look after its work while it waits, when a rank is lost.
  bool sums_whole(at::Device device) const {
    return reduce_scatter_is_all_reduce(*group_->getBackend(device.type()));
  }

  // Starts summing a flat tensor. Returns what will be the sum of this rank's elements: `room`, if
  // the layout's ranges are equal and it is defined, or a tensor of its own, or a part of `flat`.
  at::Tensor start_sum(at::Tensor& flat, const FlatLayout& layout, const at::Tensor& room,
                       PendingWorks& pending) {
    pending.keep({flat});
    if (layout.size == 0) return layout.part(flat, rank());
    if (sums_whole(flat.device())) {
      std::vector<at::Tensor> one{flat};
      pending.add(group_->allreduce(one), "adding up with", kAllRanks);
      return layout.part(flat, rank());
    }
    if (layout.equal) {
      auto sum = room.defined() ? room : at::empty({layout.padded}, flat.options());
      pending.add(reduce_scatter_single(*group_, sum, flat), "adding up with", kAllRanks);
      pending.keep({sum});
      return sum.narrow(0, 0, layout.numel[rank()]);
    }
    coalesce(flat.device(), pending, "adding up with", [&] {
      for (int owner = 0; owner < world_size(); ++owner) {
        if (layout.numel[owner] == 0) continue;
        std::vector<at::Tensor> one{layout.part(flat, owner)};
        c10d::ReduceOptions options;
        options.rootRank = owner;
        group_->reduce(one, options);
      }
    });
    return layout.part(flat, rank());
  }

  // The backend would sum in the dtype that is sent, so the owner sums, in rank order.
  std::unique_ptr<Pending> reduce_rounded(const Parts& parts, at::ScalarType wire,
                                          const at::Tensor& into, double divisor) {
    auto pending = std::make_unique<PendingWorks>(group_);
    std::vector<at::Tensor> sent;
    std::vector<int64_t> sent_numel;
    for (const auto& rank_parts : parts) {
      const auto message = is_in_blocks(wire) ? std::vector{to_blocks(rank_parts)} : rank_parts;
      if (numel_of(message) > 0) sent.insert(sent.end(), message.begin(), message.end());
      sent_numel.push_back(numel_of(message));
    }
    if (sent.empty()) return pending;
    const auto own = side_by_side(parts[rank()], into);
    const int64_t numel = is_in_blocks(wire) ? bytes_in_blocks(own) : into.numel();
    std::vector<int64_t> received_numel(world_size(), numel);
    at::Tensor input = at::cat(sent);
    if (!is_in_blocks(wire)) input = input.to(wire);
    at::Tensor output = at::empty({numel * world_size()}, input.options());
    pending->add(all_to_all_single(*group_, output, input, received_numel, sent_numel),
                 "exchanging with", kAllRanks);
    pending->keep({input, output});
    pending->then([into, own, output, divisor, wire, numel, ranks = world_size()] {
      if (numel == 0) return;
      std::vector<at::Tensor> terms;
      for (int rank = 0; rank < ranks; ++rank) {
        terms.push_back(output.narrow(0, rank * numel, numel));
      }
      if (is_in_blocks(wire)) {
        sum_blocks_in_rank_order(terms, own, {.divisor = divisor});
      } else {
        sum_in_rank_order(terms, into, {.divisor = divisor});
      }
    });
    messages_->add_sent({.bytes = static_cast<int64_t>(input.nbytes())});
    messages_->add_received(static_cast<int64_t>(output.nbytes()));
    return pending;
  }

  // What a ring moves to bring every owner's parts to all ranks, or in the other direction to sum
  // them; the backend does not report what it really did.
  void count_gather(const Parts& parts) {
    const auto [outward, inward] = bytes_of_ring(parts);
    messages_->add_sent({.bytes = outward});
    messages_->add_received(inward);
  }
  void count_sum(const Parts& parts) {
    const auto [outward, inward] = bytes_of_ring(parts);
    messages_->add_sent({.bytes = inward});
    messages_->add_received(outward);
  }

  // The reduction whose flat tensor exists on a device.
  std::unordered_map<at::Device, NativeReduction*> summing;

 private:
  at::TensorOptions options_of(const Parts& parts) const {
    for (const auto& rank_parts : parts) {
      if (!rank_parts.empty()) return rank_parts.front().options();
    }
    return {};
  }

  // REQUIRES: parts of one dtype and device, and not all of them empty.
  void start_gather(const Parts& parts, PendingWorks& pending) {
    if (auto whole = joined(parts)) {
      at::Tensor own = parts[rank()].front();
      if (whole->numel() == 0) return;
      pending.add(all_gather_single(*group_, *whole, own), "gathering from", kAllRanks);
      pending.keep({*whole, own});
      return;
    }
    const auto options = options_of(parts);
    const auto layout = layout_of(numel_by_rank(parts), options.device());
    if (layout.size == 0) return;
    const bool in_place =
        !layout.equal &&
        std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.size() <= 1; });
    if (in_place) return broadcast_each(parts, options.device(), pending);

    auto flat = at::empty({layout.size}, options);
    auto own = layout.equal ? flat.narrow(0, layout.begin[rank()], layout.padded)
                            : layout.part(flat, rank());
    copy_into(parts[rank()], layout.part(flat, rank()));
    if (layout.equal) {
      pending.add(all_gather_single(*group_, flat, own), "gathering from", kAllRanks);
      pending.keep({flat});
    } else {
      Parts pieces;
      for (size_t owner = 0; owner < parts.size(); ++owner) {
        pieces.push_back({layout.part(flat, owner)});
      }
      broadcast_each(pieces, options.device(), pending);
    }
    pending.then([flat, layout, parts, self = rank()] {
      Copies copies;
      for (size_t owner = 0; owner < parts.size(); ++owner) {
        if (static_cast<int>(owner) != self) copies.add(layout.part(flat, owner), parts[owner]);
      }
      copies.make();
    });
  }

  static void copy_into(const std::vector<at::Tensor>& parts, at::Tensor into) {
    if (!parts.empty()) at::cat_out(into, parts);
  }

  // Every owner's part, at most one each, to all ranks.
  void broadcast_each(const Parts& parts, at::Device device, PendingWorks& pending) {
    coalesce(device, pending, "gathering from", [&] {
      for (int owner = 0; owner < world_size(); ++owner) {
        if (parts[owner].empty() || parts[owner].front().numel() == 0) continue;
        std::vector<at::Tensor> one{parts[owner].front()};
        c10d::BroadcastOptions options;
        options.rootRank = owner;
        group_->broadcast(one, options);
        pending.keep(one);
      }
    });
  }

  // Makes the calls of `body` one call.
  template <class Body>
  void coalesce(at::Device device, PendingWorks& pending, const char* verb, Body body) {
    group_->startCoalescing(device.type());
    try {
      body();
    } catch (...) {
      group_->endCoalescing(device.type());
      throw;
    }
    pending.add(group_->endCoalescing(device.type()), verb, kAllRanks);
  }

  // Bytes of this rank's own parts to the others, and of theirs.
  std::pair<int64_t, int64_t> bytes_of_ring(const Parts& parts) const {
    int64_t outward = 0, inward = 0;
    for (int rank = 0; rank < world_size(); ++rank) {
      const int64_t bytes = bytes_of(parts[rank]);
      if (rank == this->rank()) {
        outward += bytes * (world_size() - 1);
      } else {
        inward += bytes;
      }
    }
    return {outward, inward};
  }
};

// A round copies the parts into one flat tensor and releases them. On a device, where the memory of
// gradients is counted, only one such tensor exists at a time: the next round waits for it, as the
// device's streams do, not the host.
class NativeReduction : public Reduction {
 public:
  NativeReduction(NativeExchange& exchange, int rank, const ReductionOptions& options)
      : exchange_(exchange),
        options_(options),
        layout_(exchange.layout_of(options.numel, options.tensor.device())),
        rank_(rank) {
    wire_ = options.wire ? options.wire : options.posted;
    const bool in_place = layout_.equal && !wire_ && !exchange.sums_whole(options.tensor.device());
    room_ = at::empty({in_place ? layout_.padded : options.numel[rank]}, options.tensor);
    sum_ = room_.narrow(0, 0, options.numel[rank]);
  }
  ~NativeReduction() override {
    std::erase_if(exchange_.summing, [this](const auto& entry) { return entry.second == this; });
  }

  void post(Parts parts, bool) override {
    if (!sum_.is_cpu()) {
      if (auto* const last = std::exchange(exchange_.summing[sum_.device()], this))
        last->complete();
    }
    if (wire_) {
      pending_ = exchange_.reduce_rounded(parts, *wire_, sum_, options_.divisor);
      return;
    }
    exchange_.count_sum(parts);
    auto flat = flattened(parts, layout_, options_.tensor);
    parts.clear();
    auto pending = std::make_unique<PendingWorks>(exchange_.process_group());
    const auto own = exchange_.start_sum(flat, layout_, room_, *pending);
    pending->then([this, own] {
      if (!own.is_alias_of(sum_)) sum_.copy_(own);
      if (options_.divisor != 1) sum_.div_(options_.divisor);
    });
    pending_ = std::move(pending);
  }

  // The backend does not report it.
  bool ready(std::chrono::milliseconds) override { return false; }

  at::Tensor finish() override {
    complete();
    return sum_;
  }

 private:
  void complete() {
    at::NoGradGuard no_grad;
    if (const auto pending = std::move(pending_)) pending->wait();
    auto& summing = exchange_.summing[sum_.device()];
    if (summing == this) summing = nullptr;
  }

  NativeExchange& exchange_;
  ReductionOptions options_;
  FlatLayout layout_;
  int rank_;
  std::optional<at::ScalarType> wire_;  // unset: the sum's, and the backend sums
  at::Tensor room_;                     // with padding
  at::Tensor sum_;
  std::unique_ptr<Pending> pending_;
};

std::unique_ptr<Reduction> NativeExchange::make_reduction(const ReductionOptions& options) {
  return std::make_unique<NativeReduction>(*this, rank(), options);
}

}  // namespace

std::unique_ptr<Exchange> make_native_exchange(const ProcessGroupPtr& group, int64_t channel) {
  return std::make_unique<NativeExchange>(group, channel);
}

}  // namespace shardstep::detail
