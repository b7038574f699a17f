#include "shard/sharded_gradients.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "comm/agreement.h"
#include "launch/who.h"
#include "shard/bucket.h"

namespace shardstep {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }
double smaller(double a, double b) { return std::isnan(a) || a < b ? a : b; }

// Values of two disjoint parts of a tensor make one of the whole.
class Merging {
 public:
  Merging(GradientStatistic statistic, double norm_type)
      : statistic_(statistic), norm_type_(norm_type) {}

  double neutral() const {
    if (statistic_ == GradientStatistic::kLargest) return -kInfinity;
    return statistic_ == GradientStatistic::kSmallest ? kInfinity : 0;
  }

  double of(const at::Tensor& part) const {
    if (part.numel() == 0) return neutral();
    switch (statistic_) {
      case GradientStatistic::kNorm: {
        // A norm of narrow numbers may be too large for their type.
        const auto type = part.scalar_type();
        const bool narrow = type == at::kHalf || type == at::kBFloat16;
        const auto dtype = narrow ? std::optional(at::kFloat) : std::nullopt;
        const auto norm = at::linalg_vector_norm(part, norm_type_, std::nullopt, false, dtype);
        return norm.item<double>();
      }
      case GradientStatistic::kSum:
        return part.sum(at::kDouble).item<double>();
      case GradientStatistic::kLargest:
        return part.max().item<double>();
      case GradientStatistic::kSmallest:
        return part.min().item<double>();
      case GradientStatistic::kNans:
        return part.isnan().sum().item<double>();
      case GradientStatistic::kInfinities:
        return part.isinf().sum().item<double>();
    }
    return 0;
  }

  double merge(double a, double b) const {
    switch (statistic_) {
      case GradientStatistic::kNorm:
        break;
      case GradientStatistic::kSum:
      case GradientStatistic::kNans:
      case GradientStatistic::kInfinities:
        return a + b;
      case GradientStatistic::kLargest:
        return larger(a, b);
      case GradientStatistic::kSmallest:
        return smaller(a, b);
    }
    if (std::isinf(norm_type_)) return larger(a, b);
    if (norm_type_ == 0 || norm_type_ == 1) return a + b;
    if (a == 0 || b == 0) return a + b;
    if (norm_type_ == 2) return std::sqrt(a * a + b * b);
    return std::pow(std::pow(a, norm_type_) + std::pow(b, norm_type_), 1 / norm_type_);
  }

 private:
  GradientStatistic statistic_;
  double norm_type_;
};

// FNV-1a.
uint64_t hash_on(uint64_t hash, const std::string& text) {
  for (unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

}  // namespace

ShardedGradients::ShardedGradients(const ProcessGroupPtr& group, Exchange& exchange,
                                   GradientReducer& reducer, detail::ParamAgreement& agreement,
                                   const std::vector<at::Tensor>& params)
    : group_(group),
      exchange_(exchange),
      reducer_(reducer),
      agreement_(agreement),
      params_(params) {}

// The tensor of every rank, by rank.
std::vector<at::Tensor> ShardedGradients::all_gather(const at::Tensor& own, MessageTag tag) const {
  const auto device = detail::control_device(group_);
  Parts parts(group_->getSize());
  for (int rank = 0; rank < group_->getSize(); ++rank) {
    parts[rank] = {rank == group_->getRank() ? own.to(device)
                                             : at::empty_like(own, own.options().device(device))};
  }
  exchange_.all_gather(parts, tag)->wait();
  std::vector<at::Tensor> tensors;
  for (const auto& part : parts) tensors.push_back(part.front().cpu());
  return tensors;
}

void ShardedGradients::check_rounds(const std::vector<Message>& messages) const {
  for (size_t rank = 1; rank < messages.size(); ++rank) {
    TORCH_CHECK(messages[rank].rounds == messages[0].rounds,
                "shardstep: expected equally many synchronized backward passes on every rank when "
                "gradients are stepped with or looked at, got ",
                messages[0].rounds, " on rank 0 and ", messages[rank].rounds, " on rank ", rank,
                "; let every rank look at them, or none, and use no_sync() for passes that are not "
                "to be added up",
                detail::who(group_));
  }
}

void ShardedGradients::check_same_changes(const std::vector<Message>& messages) const {
  for (size_t rank = 1; rank < messages.size(); ++rank) {
    TORCH_CHECK(messages[rank].changes == messages[0].changes,
                "shardstep: expected the same changes to the gradients on every rank before they "
                "are looked at or stepped with, got others on rank ",
                rank,
                " than on rank 0; scale and clip them on every rank by the same amount (a rank "
                "without a batch: by clip_grad_norm_() of the optimizer), and let one rank alone "
                "look at them before any rank changes them",
                detail::who(group_));
  }
}

void ShardedGradients::check_not_replaced(const std::vector<Message>& messages) const {
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    TORCH_CHECK(messages[rank].replaced < 0,
                "shardstep: expected `.grad` as the backward pass left it, changed in place or set "
                "to None, got another gradient for parameter ",
                messages[rank].replaced, " on rank ", rank, detail::who(group_));
  }
}

// Every rank comes here with what it wants to know; a rank that steps wants nothing more.
std::vector<ShardedGradients::Message> ShardedGradients::meet(const Question& question) {
  reducer_.end_round();
  const auto& used_here = reducer_.used_here();
  const auto size = static_cast<int64_t>(sizeof(Message) + used_here.size());
  const Message own{.params = agreement_.summary(params_),
                    .rounds = reducer_.rounds(),
                    .question = question,
                    .changes = changes_,
                    .replaced = reducer_.replaced()};
  auto bytes = at::empty({size}, at::kByte);
  std::memcpy(bytes.data_ptr(), &own, sizeof(own));
  std::copy(used_here.begin(), used_here.end(), bytes.data_ptr<uint8_t>() + sizeof(own));

  std::vector<Message> messages;
  std::vector<uint8_t> used(used_here.size());
  for (const auto& tensor : all_gather(bytes, ControlMessage::kGradientMeeting)) {
    std::memcpy(&messages.emplace_back(), tensor.const_data_ptr(), sizeof(Message));
    const auto* flags = tensor.const_data_ptr<uint8_t>() + sizeof(Message);
    for (size_t i = 0; i < used.size(); ++i) used[i] |= flags[i];
  }
  std::vector<int64_t> summaries;
  for (const auto& message : messages) summaries.push_back(message.params);
  agreement_.check(exchange_, params_, summaries);
  check_rounds(messages);
  if (!reducer_.settled()) {
    reducer_.settle(std::move(used));
    known_.clear();
    changes_ = 0;
    for (auto& message : messages) message.changes = 0;
  }
  return messages;
}

void ShardedGradients::answer(const std::vector<Message>& messages) {
  check_same_changes(messages);
  std::vector<Question> asked;  // each once, in order of rank
  for (const auto& message : messages) {
    if (std::find(asked.begin(), asked.end(), message.question) == asked.end()) {
      asked.push_back(message.question);
    }
  }
  for (const auto& question : asked) {
    if (question.kind == Kind::kWhole) {
      whole_ = {question.which, gather_whole(question.which)};
    } else if (question.kind == Kind::kStatistic || question.kind == Kind::kSquares) {
      const auto own = own_values(question);
      const Merging merging(static_cast<GradientStatistic>(question.which), question.norm_type);
      auto& values = known_[question];
      for (const auto& tensor :
           all_gather(at::tensor(own, at::kDouble), ControlMessage::kGradientValues)) {
        const auto* theirs = tensor.const_data_ptr<double>();
        if (values.empty()) values.assign(own.size(), merging.neutral());
        for (size_t i = 0; i < values.size(); ++i) values[i] = merging.merge(values[i], theirs[i]);
      }
    }
  }
}

std::vector<double> ShardedGradients::own_values(const Question& question) {
  at::NoGradGuard no_grad;
  const Merging merging(static_cast<GradientStatistic>(question.which), question.norm_type);
  const bool together = question.kind == Kind::kSquares;
  if (together) {
    const auto squares = changes_ == 0 ? reducer_.squares() : std::nullopt;
    reducer_.want_squares();  // who asks once asks again
    if (squares) return {std::sqrt(*squares)};
  }
  std::vector<double> values;
  double total = merging.neutral();
  for (int64_t param = 0; param < static_cast<int64_t>(reducer_.used_here().size()); ++param) {
    const auto own = reducer_.own(param);
    values.push_back(own.defined() ? merging.of(own) : merging.neutral());
    total = merging.merge(total, values.back());
  }
  return together ? std::vector<double>{total} : values;
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
    // Others may be in their next backward pass already, and must get to where they hear of this.
    reducer_.has_sums() ? reducer_.give_back_sums() : reducer_.make_round();
  }
  answer(meet(question));
}

void ShardedGradients::settle() {
  if (!reducer_.settled()) ask({.kind = Kind::kSettle});
}

const std::vector<double>& ShardedGradients::statistic(GradientStatistic statistic,
                                                       double norm_type) {
  TORCH_CHECK_VALUE(norm_type >= 0, "shardstep: expected a norm type of 0 or more, got ", norm_type,
                    detail::who(group_));
  const Question question{Kind::kStatistic, static_cast<int64_t>(statistic), norm_type};
  if (!reducer_.settled() || !known_.contains(question)) ask(question);
  return known_.at(question);
}

double ShardedGradients::total_norm(double norm_type) {
  const Merging merging(GradientStatistic::kNorm, norm_type);
  const Question each{Kind::kStatistic, static_cast<int64_t>(GradientStatistic::kNorm), norm_type};
  const Question together{Kind::kSquares, static_cast<int64_t>(GradientStatistic::kNorm), 2};
  const bool is_known = reducer_.settled() && known_.contains(each);
  if (norm_type == 2 && !is_known) {
    if (!reducer_.settled() || !known_.contains(together)) ask(together);
    return known_.at(together).front();
  }
  double total = merging.neutral();
  for (double norm : statistic(GradientStatistic::kNorm, norm_type)) {
    total = merging.merge(total, norm);
  }
  return total;
}

// A norm of type 2 is wanted by clipping next, and costs as much as another. If it is not finite,
// the squares may have been too large.
std::vector<bool> ShardedGradients::finite() {
  std::vector<bool> result;
  for (double norm : statistic(GradientStatistic::kNorm, 2)) result.push_back(std::isfinite(norm));
  if (std::all_of(result.begin(), result.end(), [](bool finite) { return finite; })) return result;
  const auto& largest = statistic(GradientStatistic::kNorm, kInfinity);
  for (size_t i = 0; i < result.size(); ++i) result[i] = std::isfinite(largest[i]);
  return result;
}

at::Tensor ShardedGradients::whole(int64_t param) {
  ask({.kind = Kind::kWhole, .which = param});
  return std::exchange(whole_, std::nullopt)->second;
}

at::Tensor ShardedGradients::own(int64_t param) {
  settle();
  return reducer_.own(param);
}

bool ShardedGradients::has_gradient(int64_t param) {
  settle();
  return reducer_.has_gradient(param);
}

void ShardedGradients::note(int64_t param, const std::string& how) {
  changes_ = hash_on(changes_ == 0 ? 0xcbf29ce484222325u : changes_, c10::str(param, ' ', how));
}

void ShardedGradients::changed(int64_t param, const std::string& how) {
  note(param, how);
  known_.clear();
}

// Whether what is known of a gradient could be made to fit.
bool ShardedGradients::scale_known(int64_t param, double factor) {
  const auto type = reducer_.reduced(param).param.scalar_type();
  if ((type != at::kFloat && type != at::kDouble) || !std::isfinite(factor)) return false;
  for (auto& [question, values] : known_) {
    if (question.kind != Kind::kStatistic) return false;
    const auto statistic = static_cast<GradientStatistic>(question.which);
    if (statistic == GradientStatistic::kNorm && question.norm_type == 0) return false;
    if (statistic >= GradientStatistic::kNans) return false;
    if (statistic != GradientStatistic::kNorm && factor < 0) return false;
    auto& value = values[param];
    // So small that numbers may have become zero, or so large that they overflow.
    const double scaled =
        value * (statistic == GradientStatistic::kNorm ? std::abs(factor) : factor);
    if (!(value == 0) && !(std::abs(scaled) > 1e-20 && std::abs(scaled) < 1e20)) return false;
    value = scaled;
  }
  return true;
}

void ShardedGradients::scale(const std::vector<int64_t>& params, double factor) {
  at::NoGradGuard no_grad;
  settle();
  if (factor == 1) return;
  // What float32 has of it is the same on every rank.
  const auto how = c10::str("scale ", static_cast<float>(factor));
  known_.erase({Kind::kSquares, static_cast<int64_t>(GradientStatistic::kNorm), 2});
  for (int64_t param : params) {
    auto own = reducer_.own(param);
    if (own.defined()) own.mul_(factor);
    if (!scale_known(param, factor)) known_.clear();
    note(param, how);
  }
}

void ShardedGradients::clamp(const std::vector<int64_t>& params, std::optional<double> min,
                             std::optional<double> max) {
  at::NoGradGuard no_grad;
  settle();
  const auto limit = [](std::optional<double> value) {
    return value ? std::optional<at::Scalar>(*value) : std::nullopt;
  };
  for (int64_t param : params) {
    auto own = reducer_.own(param);
    if (own.defined()) own.clamp_(limit(min), limit(max));
    changed(param, c10::str("clamp ", min.value_or(-kInfinity), " ", max.value_or(kInfinity)));
  }
}

void ShardedGradients::zero(const std::vector<int64_t>& params) {
  for (int64_t param : params) {
    reducer_.zero(param);
    changed(param, "zero");
  }
}

void ShardedGradients::before_step() {
  if (!reducer_.made_round()) reducer_.make_round();
  for (;;) {
    const auto messages = meet({.kind = Kind::kStep});
    const bool all_step = std::all_of(messages.begin(), messages.end(), [](const Message& message) {
      return message.question.kind == Kind::kStep;
    });
    if (all_step) {
      check_same_changes(messages);
      return check_not_replaced(messages);
    }
    answer(messages);
  }
}

}  // namespace shardstep
