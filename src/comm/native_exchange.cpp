#include "comm/native_exchange.h"

#include <optional>

#include "comm/pending_works.h"
#include "comm/rank_order_sum.h"

namespace shardstep::detail {
namespace {

// Parts that lie side by side in one storage, one of equal size per rank: the tensor they make up.
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

class NativeExchange : public Exchange {
 public:
  using Exchange::Exchange;

  const char* name() const override { return "native"; }
  bool any_order() const override { return false; }

  std::unique_ptr<Pending> all_gather(const Parts& parts, MessageTag) override {
    auto pending = std::make_unique<PendingWorks>(group_);
    if (auto whole = joined(parts)) {
      at::Tensor own = parts[rank()].front();
      pending->add(group_->all_gather_single(*whole, own), "gathering from all, with", rank());
      pending->keep({*whole, own});
    } else {
      for (int owner = 0; owner < world_size(); ++owner) {
        for (const auto& part : parts[owner]) {
          std::vector<at::Tensor> one{part};
          c10d::BroadcastOptions options;
          options.rootRank = owner;
          pending->add(group_->broadcast(one, options), "waiting for", owner);
          pending->keep(one);
        }
      }
    }
    count(parts, traffic_.bytes_sent, traffic_.bytes_received);
    return pending;
  }

  std::unique_ptr<Pending> reduce_scatter(const Parts& parts, MessageTag, double divisor) override {
    auto pending = std::make_unique<PendingWorks>(group_);
    if (auto whole = joined(parts)) {
      // Into a tensor of its own: input and output may not overlap.
      at::Tensor sum = at::empty_like(parts[rank()].front());
      pending->add(group_->reduce_scatter_single(sum, *whole), "adding up with all, as", rank());
      pending->keep({*whole, sum});
      pending->then([own = parts[rank()].front(), sum, divisor]() mutable {
        if (divisor != 1) sum.div_(divisor);
        own.copy_(sum);
      });
    } else {
      for (int owner = 0; owner < world_size(); ++owner) {
        for (const auto& part : parts[owner]) {
          std::vector<at::Tensor> one{owner == rank() ? part : part.clone()};
          c10d::ReduceOptions options;
          options.rootRank = owner;
          pending->add(group_->reduce(one, options), "adding up on", owner);
          pending->keep(one);
        }
      }
      if (divisor != 1) {
        pending->then([own = parts[rank()], divisor] {
          for (at::Tensor part : own) part.div_(divisor);
        });
      }
    }
    count(parts, traffic_.bytes_received, traffic_.bytes_sent);
    return pending;
  }

  std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) override;

  // The backend would add up in the dtype that travels; so the owner does, in rank order.
  std::unique_ptr<Pending> reduce_rounded(const Parts& parts, at::ScalarType wire, double divisor) {
    std::vector<at::Tensor> sent;
    std::vector<int64_t> sent_numel, received_numel;
    int64_t own_numel = 0;
    for (const auto& part : parts[rank()]) own_numel += part.numel();
    for (const auto& rank_parts : parts) {
      sent_numel.push_back(0);
      received_numel.push_back(own_numel);
      for (const auto& part : rank_parts) {
        sent.push_back(part.to(wire));
        sent_numel.back() += part.numel();
      }
    }
    auto pending = std::make_unique<PendingWorks>(group_);
    if (sent.empty()) return pending;
    at::Tensor input = at::cat(sent);
    at::Tensor output = at::empty({own_numel * world_size()}, input.options());
    pending->add(group_->all_to_all_single(output, input, received_numel, sent_numel),
                 "exchanging with all, as", rank());
    pending->keep({input, output});
    pending->then([own = parts[rank()], output, own_numel, divisor, ranks = world_size()] {
      int64_t offset = 0;
      for (const auto& part : own) {
        std::vector<at::Tensor> terms;
        for (int rank = 0; rank < ranks; ++rank) {
          terms.push_back(output.narrow(0, rank * own_numel + offset, part.numel()));
        }
        sum_in_rank_order(terms, part, {.divisor = divisor});
        offset += part.numel();
      }
    });
    traffic_.bytes_sent += static_cast<int64_t>(input.nbytes());
    traffic_.bytes_received += static_cast<int64_t>(output.nbytes());
    return pending;
  }

 private:
  // What a ring moves to bring every owner's parts to all, and the other way round to add them up;
  // the backend does not tell what it really did.
  void count(const Parts& parts, int64_t& outward, int64_t& inward) {
    for (int rank = 0; rank < world_size(); ++rank) {
      const int64_t bytes = bytes_of(parts[rank]);
      if (rank == this->rank()) {
        outward += bytes * (world_size() - 1);
      } else {
        inward += bytes;
      }
    }
  }
};

class NativeReduction : public Reduction {
 public:
  NativeReduction(NativeExchange& exchange, int rank, const ReductionOptions& options)
      : exchange_(exchange), options_(options), rank_(rank) {
    sum_ = at::empty({options.numel[rank]}, options.tensor);
  }

  void post(Parts parts, bool) override {
    own_ = parts[rank_];
    pending_ = options_.wire ? exchange_.reduce_rounded(parts, *options_.wire, options_.divisor)
                             : exchange_.reduce_scatter(parts, options_.tag, options_.divisor);
  }

  // The backend does not say.
  bool ready(std::chrono::milliseconds) override { return false; }

  at::Tensor finish() override {
    pending_->wait();
    pending_.reset();
    if (!own_.empty()) at::cat_out(sum_, own_);
    own_.clear();
    return sum_;
  }

  void release() override {}

 private:
  NativeExchange& exchange_;
  ReductionOptions options_;
  int rank_;
  std::vector<at::Tensor> own_;
  std::unique_ptr<Pending> pending_;
  at::Tensor sum_;
};

std::unique_ptr<Reduction> NativeExchange::make_reduction(const ReductionOptions& options) {
  return std::make_unique<NativeReduction>(*this, rank(), options);
}

}  // namespace

std::unique_ptr<Exchange> make_native_exchange(const ProcessGroupPtr& group, int64_t channel) {
  return std::make_unique<NativeExchange>(group, channel);
}

}  // namespace shardstep::detail
