#include "comm/pairwise_exchange.h"

#include <future>

#include "comm/gradient_blocks.h"
#include "comm/pending_works.h"
#include "comm/rank_order_sum.h"
#include "comm/scratch.h"
#include "comm/worker.h"
#include "failure_points.h"

namespace shardstep::detail {
namespace {

// One round of summing, from its messages on.
struct Round {
  std::shared_ptr<PendingWorks> pending;
  std::vector<at::Tensor> own;  // as one message if they travel in blocks, and so is each received
  Parts received;
  std::vector<at::Tensor> memory;
  int64_t bytes = 0;  // of what this rank has given

  double add_up(const std::vector<at::Tensor>& into, int self, const SumOptions& options) {
    pending->wait();
    SHARDSTEP_FAILURE_POINT("pairwise sum: arrived");
    if (memory.empty()) return 0;  // nothing to own
    if (is_in_blocks(options.rounded_to)) {
      return sum_blocks_in_rank_order(terms(0, self), into, options);
    }
    double squares = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      squares += sum_in_rank_order(terms(i, self), into[i], options);
    }
    return squares;
  }

  // Number `i` of each rank.
  std::vector<at::Tensor> terms(size_t i, int self) const {
    std::vector<at::Tensor> terms;
    for (int rank = 0; rank < static_cast<int>(received.size()); ++rank) {
      terms.push_back(rank == self ? own[i] : received[rank][i]);
    }
    return terms;
  }
};

// What is sent for parts: if they are rounded, copies in one memory.
std::vector<at::Tensor> rounded(const std::vector<at::Tensor>& parts,
                                std::optional<at::ScalarType> wire) {
  if (parts.empty() || !wire || parts.front().scalar_type() == *wire) return parts;
  if (is_in_blocks(wire)) return {to_blocks(parts)};
  const auto dtype = *wire;
  const auto options = parts.front().options().dtype(dtype);
  auto copies = side_by_side_for_messages(parts, at::empty({numel_of(parts)}, options));
  for (size_t i = 0; i < parts.size(); ++i) copies[i].copy_(parts[i]);
  return copies;
}

class PairwiseExchange : public Exchange {
 public:
  using Exchange::Exchange;

  const char* name() const override { return "pairwise"; }
  bool any_order() const override { return true; }

  std::unique_ptr<Pending> all_gather(const Parts& parts, MessageTag tag) override {
    auto pending = std::make_unique<PendingWorks>(group_, watch_);
    for (int distance = 1; distance < world_size(); ++distance) {
      const int source = (rank() - distance + world_size()) % world_size();
      messages_->add_received(receive(group_, *pending, parts[source], source, message_tag(tag)));
    }
    const auto messages = as_messages(parts[rank()]);
    SHARDSTEP_FAILURE_POINT("pairwise gather: receives");
    for (int distance = 1; distance < world_size(); ++distance) {
      const int target = (rank() + distance) % world_size();
      messages_->add_sent(send_messages(group_, *pending, messages, target, message_tag(tag)));
    }
    return pending;
  }

  // As one bucket, so that the small parts of all of them travel together.
  void all_gather_and_wait(const std::vector<const Parts*>& buckets) override {
    Parts all(world_size());
    for (const auto* parts : buckets) {
      for (int owner = 0; owner < world_size(); ++owner) {
        all[owner].insert(all[owner].end(), (*parts)[owner].begin(), (*parts)[owner].end());
      }
    }
    all_gather(all, MessageTag::bucket(0))->wait();
  }

  std::unique_ptr<Pending> reduce_scatter(const Parts& parts, MessageTag tag,
                                          double divisor) override {
    auto round = std::make_shared<Round>(start(parts, tag, std::nullopt));
    auto pending = std::make_unique<Waiting>();
    pending->wait_for = [round, divisor, self = rank(), scratch = scratch_] {
      round->add_up(round->own, self, {.divisor = divisor});
      scratch->give_back(round->memory);
    };
    return pending;
  }

  std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) override;

  // A round that receives what this rank will own, in parts like these. `options`: of what is
  // posted.
  Round expect(const std::vector<at::Tensor>& own, const at::TensorOptions& options, MessageTag tag,
               std::optional<at::ScalarType> wire) {
    Round round{std::make_shared<PendingWorks>(group_, watch_), {}, Parts(world_size()), {}};
    const int64_t numel = numel_of(own);
    for (int distance = 1; distance < world_size() && numel > 0; ++distance) {
      const int source = (rank() - distance + world_size()) % world_size();
      if (is_in_blocks(wire)) {
        const int64_t bytes = bytes_in_blocks(own);
        round.memory.push_back(scratch_->take(bytes, options.dtype(at::kByte)));
        round.received[source] = {round.memory.back().narrow(0, 0, bytes)};
      } else {
        round.memory.push_back(scratch_->take(numel, wire ? options.dtype(*wire) : options));
        round.received[source] = side_by_side_for_messages(own, round.memory.back());
      }
      messages_->add_received(
          receive(group_, *round.pending, round.received[source], source, message_tag(tag)));
    }
    SHARDSTEP_FAILURE_POINT("pairwise sum: receives");
    return round;
  }

  Round start(const Parts& parts, MessageTag tag, std::optional<at::ScalarType> wire) {
    const auto& own = parts[rank()];
    const auto options = own.empty() ? at::TensorOptions() : own.front().options();
    return start(expect(own, options, tag, wire), parts, tag, wire);
  }
  Round start(Round round, const Parts& parts, MessageTag tag, std::optional<at::ScalarType> wire) {
    round.own = parts[rank()];
    for (const auto& part : parts) round.bytes += bytes_of(part);
    for (int distance = 1; distance < world_size(); ++distance) {
      const int target = (rank() + distance) % world_size();
      messages_->add_sent(
          send(group_, *round.pending, rounded(parts[target], wire), target, message_tag(tag)));
    }
    if (is_in_blocks(wire)) round.own = rounded(round.own, wire);
    return round;
  }

  // Whether a round of this size waits for add_up_held(): waking another thread takes longer than
  // adding up so few bytes. All such rounds together hold little memory.
  bool holds(int64_t bytes) {
    constexpr int64_t kMost = 4 << 20;
    if (held_ + bytes > kMost) return false;
    held_ += bytes;
    return true;
  }
  // Waits for the messages, and sums.
  double add_up_held(Round& round, const std::vector<at::Tensor>& into, const SumOptions& options) {
    held_ -= round.bytes;
    const double squares = round.add_up(into, rank(), options);
    scratch_->give_back(std::move(round.memory));
    return squares;
  }

  // Sums in the background, and releases there what the round holds.
  std::future<double> add_up_later(Round round, std::vector<at::Tensor> into,
                                   const SumOptions& options) {
    if (!worker_) worker_ = std::make_unique<Worker>();
    auto shared = std::make_shared<Round>(std::move(round));
    const auto pending = shared->pending;
    return worker_->run(
        [round = std::move(shared), into = std::move(into), options, self = rank(),
         scratch = scratch_] {
          const double squares = round->add_up(into, self, options);
          scratch->give_back(std::move(round->memory));
          return squares;
        },
        {pending});
  }

 private:
  struct Waiting : Pending {
    std::function<void()> wait_for;
    void wait() override { wait_for(); }
  };

  std::shared_ptr<Scratch> scratch_ = std::make_shared<Scratch>();
  std::unique_ptr<Worker> worker_;
  int64_t held_ = 0;  // bytes in rounds that finish() adds up
};

class PairwiseReduction : public Reduction {
 public:
  PairwiseReduction(PairwiseExchange& exchange, int rank, const ReductionOptions& options)
      : exchange_(exchange),
        tag_(options.tag),
        options_{.divisor = options.divisor, .rounded_to = options.wire},
        rank_(rank) {
    sum_ = at::empty({options.numel[rank]}, options.tensor);
  }

  void expect(const Parts& like) override {
    const auto& own = like[rank_];
    if (own.empty()) return;
    expected_ =
        exchange_.expect(own, sum_.options().dtype(own.front().dtype()), tag_, options_.rounded_to);
  }

  void post(Parts parts, bool squares) override {
    into_ = side_by_side(parts[rank_], sum_);
    options_.squares = squares;
    auto expected = std::exchange(expected_, std::nullopt);
    auto round = expected ? exchange_.start(std::move(*expected), parts, tag_, options_.rounded_to)
                          : exchange_.start(parts, tag_, options_.rounded_to);
    if (exchange_.holds(round.bytes)) {
      small_round_ = std::make_unique<Round>(std::move(round));
    } else {
      added_up_ = exchange_.add_up_later(std::move(round), std::move(into_), options_);
    }
  }

  bool ready(std::chrono::milliseconds patience) override {
    return !small_round_ && added_up_.wait_for(patience) == std::future_status::ready;
  }

  at::Tensor finish() override {
    if (const auto round = std::move(small_round_)) {
      squares_ = exchange_.add_up_held(*round, into_, options_);
    } else {
      squares_ = added_up_.get();
    }
    return sum_;
  }

  std::optional<double> squares() const override {
    return options_.squares ? std::optional(squares_) : std::nullopt;
  }

 private:
  PairwiseExchange& exchange_;
  MessageTag tag_;
  SumOptions options_;
  int rank_;
  at::Tensor sum_;
  double squares_ = 0;
  std::vector<at::Tensor> into_;
  std::optional<Round> expected_;       // the next
  std::unique_ptr<Round> small_round_;  // that is added up in finish()
  std::future<double> added_up_;
};

std::unique_ptr<Reduction> PairwiseExchange::make_reduction(const ReductionOptions& options) {
  return std::make_unique<PairwiseReduction>(*this, rank(), options);
}

}  // namespace

std::unique_ptr<Exchange> make_pairwise_exchange(const ProcessGroupPtr& group, int64_t channel) {
  return std::make_unique<PairwiseExchange>(group, channel);
}

}  // namespace shardstep::detail
