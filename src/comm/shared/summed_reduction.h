#pragma once

// Reduction and Pending on top of sums that are taken in memory shared by ranks: PieceSums or
// HostSums, attended.

#include <ATen/ATen.h>

#include <functional>
#include <memory>

#include "comm/exchange.h"
#include "comm/pending_works.h"
#include "comm/rank_order_sum.h"

namespace shardstep::detail {

// A sum that is under way in `sums`.
template <class Sums, class Sum>
class PendingSum : public Pending {
 public:
  PendingSum(Sums& sums, std::shared_ptr<Sum> sum) : sums_(sums), sum_(std::move(sum)) {}
  void wait() override { sums_.finish(*sum_); }

 private:
  Sums& sums_;
  std::shared_ptr<Sum> sum_;
};

template <class Sums, class Sum>
class SummedReduction : public Reduction {
 public:
  // `start` starts to sum parts in `into`, which has a tensor for each of this rank's own.
  using Start = std::function<std::shared_ptr<Sum>(
      const Parts& parts, const std::vector<at::Tensor>& into, const SumOptions& options)>;

  // `expect` prepares for that, with the same arguments (Reduction::expect).
  using Expect = std::function<void(const Parts& like, const std::vector<at::Tensor>& into,
                                    const SumOptions& options)>;

  SummedReduction(Sums& sums, int rank, const ReductionOptions& options, Start start,
                  Expect expect = {})
      : sums_(sums),
        start_(std::move(start)),
        expect_(std::move(expect)),
        options_{.divisor = options.divisor, .rounded_to = options.wire},
        rank_(rank),
        total_(at::empty({options.numel[rank]}, options.tensor)) {}

  void expect(const Parts& like) override {
    if (expect_) expect_(like, side_by_side(like[rank_], total_), options_);
  }

  void post(Parts parts, bool squares) override {
    options_.squares = squares;
    sum_ = start_(parts, side_by_side(parts[rank_], total_), options_);
  }

  bool ready(std::chrono::milliseconds patience) override {
    return sums_.done_by(*sum_, std::chrono::steady_clock::now() + patience);
  }

  at::Tensor finish() override {
    sums_.finish(*sum_);
    return total_;
  }

  std::optional<double> squares() const override {
    return options_.squares ? std::optional(sum_->squares()) : std::nullopt;
  }

 private:
  Sums& sums_;
  Start start_;
  Expect expect_;
  SumOptions options_;
  int rank_;
  at::Tensor total_;
  std::shared_ptr<Sum> sum_;
};

}  // namespace shardstep::detail
