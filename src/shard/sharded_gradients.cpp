#include "shard/sharded_gradients.h"

#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "comm/agreement.h"
#include "launch/who.h"
#include "shard/bucket.h"

namespace shardstep {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

}  // namespace

ShardedGradients::ShardedGradients(Exchange& control, Exchange& exchange, GradientReducer& reducer,
                                   detail::ParamAgreement& agreement,
                                   const std::vector<at::Tensor>& params)
    : group_(exchange.process_group()),
      control_(control),
      exchange_(exchange),
      reducer_(reducer),
      agreement_(agreement),
      params_(params) {}

void ShardedGradients::answer(const std::vector<Message>& messages) {
  check_not_foreign(messages);
  const auto& own_question = messages[group_->getRank()].question;
  std::vector<Question> asked;  // each once, in order of rank
  for (const auto& message : messages) {
    if (std::find(asked.begin(), asked.end(), message.question) == asked.end()) {
      asked.push_back(message.question);
    }
  }
  // What changed since has cleared what was known.
  const bool known = asked.size() == 1 && known_.contains(asked.front()) &&
                     std::all_of(messages.begin(), messages.end(),
                                 [](const Message& message) { return message.knows != 0; });
  if (known) return;
  for (const auto& question : asked) {
    if (question.kind == Kind::kWhole) {
      auto whole = gather_whole(question.which);
      if (question == own_question) whole_ = std::move(whole);
    } else if (question.kind == Kind::kStatistic || question.kind == Kind::kSquares) {
      const auto own = own_values(question);
      if (question.kind == Kind::kSquares) squares_of_ = present();
      known_.erase(question);
      const StatisticMerging merging(static_cast<GradientStatistic>(question.which),
                                     question.norm_type);
      auto& values = known_[question];
      for (const auto& tensor : detail::all_gather(control_, at::tensor(own, at::kDouble),
                                                   ControlMessage::kGradientValues)) {
        const auto* theirs = tensor.const_data_ptr<double>();
        if (values.empty()) values.assign(own.size(), merging.neutral());
        for (size_t i = 0; i < values.size(); ++i) values[i] = merging.merge(values[i], theirs[i]);
      }
    }
  }
}

std::vector<double> ShardedGradients::own_values(const Question& question) {
  at::NoGradGuard no_grad;
  const StatisticMerging merging(static_cast<GradientStatistic>(question.which),
                                 question.norm_type);
  const bool together = question.kind == Kind::kSquares;
  if (together) {
    const auto squares = changes_.digest() == 0 ? reducer_.squares() : std::nullopt;
    reducer_.want_squares();  // a program that asks once will ask again
    if (squares) return {std::sqrt(*squares)};
  }
  std::vector<double> values(params_.size(), merging.neutral());
  NumbersToRead numbers;
  for (size_t param = 0; param < values.size(); ++param) {
    const auto own = reducer_.own(static_cast<int64_t>(param));
    if (own.defined() && own.numel() > 0) numbers.add(merging.of(own), values[param]);
  }
  numbers.read();
  if (!together) return values;
  double total = merging.neutral();
  for (double value : values) total = merging.merge(total, value);
  return {total};
}

at::Tensor ShardedGradients::gather_whole(int64_t param) {
  at::NoGradGuard no_grad;
  if (!reducer_.has_gradient(param)) return {};
  const auto& [index, like, slices] = reducer_.reduced(param);
  auto whole = at::empty_like(like, like.options().requires_grad(false));
  const auto flat = flat_view(whole);
  Parts parts(group_->getSize());
  for (const auto& slice : slices) {
    if (slice.elements.empty()) continue;
    auto part = flat.narrow(0, slice.elements.begin, slice.elements.size());
    if (slice.rank == group_->getRank()) part.copy_(reducer_.own(param));
    parts[slice.rank].push_back(part);
  }
  exchange_.all_gather(parts, ControlMessage::kWholeGradient)->wait();
  return whole;
}

void ShardedGradients::ask(const Question& question) {
  if (!reducer_.made_round()) {
    // The others may already be in their next backward pass, and must be able to reach the meeting.
    // Where there is one order, they may have begun with their messages.
    const bool looks_back = reducer_.has_sums() && exchange_.any_order();
    looks_back ? reducer_.keep_sums() : reducer_.make_round();
  }
  answer(meet(question));
}

void ShardedGradients::settle() {
  if (!is_current()) ask({.kind = Kind::kSettle});
}

void ShardedGradients::settle_together() { ask({.kind = Kind::kSettle}); }

bool ShardedGradients::knows(const Question& question) const {
  return is_current() && known_.contains(question) &&
         (question.kind != Kind::kSquares || squares_of_ == present());
}

void ShardedGradients::check_norm_type(double norm_type) const {
  TORCH_CHECK_VALUE(norm_type >= 0, "shardstep: expected a norm type of 0 or more, got ", norm_type,
                    detail::who(group_));
}

const std::vector<double>& ShardedGradients::statistic(GradientStatistic statistic,
                                                       double norm_type) {
  check_norm_type(norm_type);
  const Question question{Kind::kStatistic, static_cast<int64_t>(statistic), norm_type};
  if (!knows(question)) ask(question);
  return known_.at(question);
}

double ShardedGradients::total_norm(double norm_type) {
  check_norm_type(norm_type);
  const Question each{Kind::kStatistic, static_cast<int64_t>(GradientStatistic::kNorm), norm_type};
  const Question together{Kind::kSquares, static_cast<int64_t>(GradientStatistic::kNorm), 2};
  if (norm_type == 2 && !knows(each)) {
    ask(together);
    return known_.at(together).front();
  }
  ask(each);
  const StatisticMerging merging(GradientStatistic::kNorm, norm_type);
  double total = merging.neutral();
  const auto& norms = known_.at(each);
  for (size_t param = 0; param < norms.size(); ++param) {
    // It may have been dropped since the question was asked.
    if (!reducer_.has_gradient(static_cast<int64_t>(param))) continue;
    total = merging.merge(total, norms[param]);
  }
  return total;
}

std::vector<bool> ShardedGradients::present() const {
  std::vector<bool> present(params_.size());
  for (size_t param = 0; param < present.size(); ++param) {
    present[param] = reducer_.has_gradient(static_cast<int64_t>(param));
  }
  return present;
}

// Clipping will ask for the 2-norm next, and it costs no more than another. If it is not finite,
// the squares may have overflowed.
std::vector<bool> ShardedGradients::finite() {
  std::vector<bool> result;
  for (double norm : statistic(GradientStatistic::kNorm, 2)) result.push_back(std::isfinite(norm));
  if (std::all_of(result.begin(), result.end(), [](bool finite) { return finite; })) return result;
  const auto& largest = statistic(GradientStatistic::kNorm, kInfinity);
  for (size_t i = 0; i < result.size(); ++i) result[i] = std::isfinite(largest[i]);
  return result;
}

at::Tensor ShardedGradients::whole(std::optional<int64_t> param) {
  ask({.kind = Kind::kWhole, .which = param.value_or(kForeign)});
  return std::exchange(whole_, {});
}

void ShardedGradients::end_join(bool is_last_joiner) {
  // Passes that wait for a step are no affair of this meeting: ranks that have joined made none.
  const int64_t rounds = reducer_.made_round() ? -1 : reducer_.rounds();
  const auto all = detail::all_gather_number(control_.process_group(), static_cast<double>(rounds));
  const bool all_stepped = rounds >= 0 && std::all_of(all.begin(), all.end(), [&](double other) {
                             return other == static_cast<double>(rounds);
                           });
  if (!all_stepped) return;
  if (reducer_.has_sums()) reducer_.keep_sums();
  set_joined(!is_last_joiner);
  const auto after = c10::make_scope_exit([this] { set_joined(false); });
  meet({.kind = Kind::kSettle});
}

at::Tensor ShardedGradients::own(int64_t param) {
  settle();
  return reducer_.own(param);
}

bool ShardedGradients::has_gradient(int64_t param) {
  settle();
  return reducer_.has_gradient(param);
}

// A rank without a batch shows more stand-ins than there are gradients, until it has met the
// others: what it changes of the rest is nothing.
void ShardedGradients::changed(int64_t param, const std::string& how) {
  if (!has_gradient(param)) return;
  changes_.add(param, how);
  known_.clear();
}

// What came of the first rounds since settle().
void ShardedGradients::zero_rounds(int64_t param, double rounds) {
  const int64_t forgotten = reducer_.forgotten_rounds() - reducer_.settled_rounds();
  const bool nothing_left = forgotten > 0 && rounds <= static_cast<double>(forgotten);
  if (nothing_left) return;
  rounds < static_cast<double>(unsettled_rounds()) ? reducer_.zero_sum(param)
                                                   : reducer_.zero(param);
}

// On this rank alone.
void ShardedGradients::make(const GradientChange& change) {
  const auto& [kind, param, first, second] = change;
  auto own = kind == GradientChange::kZero ? at::Tensor() : reducer_.own(param);
  if (kind == GradientChange::kZero) {
    zero_rounds(param, first);
  } else if (own.defined() && kind == GradientChange::kScale) {
    own.mul_(first);
  } else if (own.defined()) {
    const auto limit = [](double value) {
      return std::isinf(value) ? std::nullopt : std::optional<at::Scalar>(value);
    };
    own.clamp_(limit(first), limit(second));
  }
  if (kind != GradientChange::kScale || !scale_known(param, first)) known_.clear();
  changes_.add(change);
}

// Whether the known answers for a gradient could be scaled along.
bool ShardedGradients::scale_known(int64_t param, double factor) {
  const auto type = reducer_.sum_dtype(param);
  if ((type != at::kFloat && type != at::kDouble) || !std::isfinite(factor)) return false;
  for (auto& [question, values] : known_) {
    if (question.kind != Kind::kStatistic) return false;
    const auto statistic = static_cast<GradientStatistic>(question.which);
    if (statistic == GradientStatistic::kNorm && question.norm_type == 0) return false;
    if (statistic >= GradientStatistic::kNans) return false;
    if (statistic != GradientStatistic::kNorm && factor < 0) return false;
    auto& value = values[param];
    // Too small, so that numbers may have become zero, or so large that they overflow.
    const double scaled =
        value * (statistic == GradientStatistic::kNorm ? std::abs(factor) : factor);
    if (!(value == 0) && !(std::abs(scaled) > 1e-20 && std::abs(scaled) < 1e20)) return false;
    value = scaled;
  }
  return true;
}

// A rank without a batch shows more stand-ins than there are gradients, until it has met the
// others.
void ShardedGradients::scale(const std::vector<int64_t>& params, double factor) {
  at::NoGradGuard no_grad;
  settle();
  if (factor == 1) return;
  known_.erase({Kind::kSquares, static_cast<int64_t>(GradientStatistic::kNorm), 2});
  for (int64_t param : params) {
    if (reducer_.has_gradient(param)) make({GradientChange::kScale, param, factor, 0});
  }
}

void ShardedGradients::clamp(const std::vector<int64_t>& params, std::optional<double> min,
                             std::optional<double> max) {
  at::NoGradGuard no_grad;
  settle();
  const double low = min.value_or(-kInfinity), high = max.value_or(kInfinity);
  for (int64_t param : params) {
    if (reducer_.has_gradient(param)) make({GradientChange::kClamp, param, low, high});
  }
}

void ShardedGradients::zero(int64_t param) {
  make({GradientChange::kZero, param, static_cast<double>(unsettled_rounds())});
}

void ShardedGradients::zero_all() {
  reducer_.zero_all();
  forget_changes();
}

void ShardedGradients::drop_all() {
  reducer_.reset();
  forget_changes();
}

void ShardedGradients::forget_changes() {
  known_.clear();
  changes_.clear();
}

void ShardedGradients::before_step() {
  if (!reducer_.made_round()) reducer_.make_round();
  for (;;) {
    const auto messages = meet({.kind = Kind::kStep});
    const bool all_step = std::all_of(messages.begin(), messages.end(), [](const Message& message) {
      return message.question.kind == Kind::kStep;
    });
    if (all_step) return check_not_replaced(messages);
    answer(messages);
  }
}

void ShardedGradients::after_step() {
  reducer_.next_step();
  met_ = false;
}

}  // namespace shardstep
