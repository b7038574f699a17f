#include "shard/sharded_gradients.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_map>

#include "comm/agreement.h"
#include "comm/peer_input.h"
#include "failure_points.h"
#include "launch/who.h"
#include "shard/bucket.h"

namespace shardstep {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// More backward passes than a rank can be behind another.
constexpr int64_t kMostRoundsAhead = int64_t{1} << 24;
// More changes than anyone makes to the gradients of one step.
constexpr int64_t kMostChanges = int64_t{1} << 24;

double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }
double smaller(double a, double b) { return std::isnan(a) || a < b ? a : b; }

// Merges the values of two disjoint parts of a tensor into that of the whole.
class Merging {
 public:
  Merging(GradientStatistic statistic, double norm_type)
      : statistic_(statistic), norm_type_(norm_type) {}

  double neutral() const {
    if (statistic_ == GradientStatistic::kLargest) return -kInfinity;
    return statistic_ == GradientStatistic::kSmallest ? kInfinity : 0;
  }

  // Of a part, as a tensor of one number on its device. REQUIRES: not empty.
  at::Tensor of(const at::Tensor& part) const {
    switch (statistic_) {
      case GradientStatistic::kNorm: {
        // A norm of narrow numbers may be too large for their type.
        const auto type = part.scalar_type();
        const bool narrow = type == at::kHalf || type == at::kBFloat16;
        const auto dtype = narrow ? std::optional(at::kFloat) : std::nullopt;
        return at::linalg_vector_norm(part, norm_type_, std::nullopt, false, dtype);
      }
      case GradientStatistic::kSum:
        return part.sum(at::kDouble);
      case GradientStatistic::kLargest:
        return part.max();
      case GradientStatistic::kSmallest:
        return part.min();
      case GradientStatistic::kNans:
        return part.isnan().sum();
      case GradientStatistic::kInfinities:
        return part.isinf().sum();
    }
    TORCH_INTERNAL_ASSERT(false, "shardstep: an unknown statistic");
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

// Tensors of one number each, for which the host waits once per device.
class NumbersToRead {
 public:
  void add(const at::Tensor& number, double& into) {
    auto& [numbers, targets] = by_device_[number.device()];
    numbers.push_back(number.to(at::kDouble));
    targets.push_back(&into);
  }
  void read() {
    for (auto& [device, waiting] : by_device_) {
      const auto numbers = at::stack(waiting.first).cpu();
      const auto* data = numbers.const_data_ptr<double>();
      for (size_t i = 0; i < waiting.second.size(); ++i) *waiting.second[i] = data[i];
    }
  }

 private:
  std::unordered_map<at::Device, std::pair<std::vector<at::Tensor>, std::vector<double*>>>
      by_device_;
};

// The first rank that runs the user's code; the number of ranks if all have joined.
template <class Message>
size_t leader_of(const std::vector<Message>& messages) {
  const auto found = std::find_if(messages.begin(), messages.end(),
                                  [](const Message& message) { return !message.has_joined; });
  return found - messages.begin();
}

// Whether a rank has of the gradients what the leader had before it went on: it has joined, and
// added nothing since the gradients were last summed.
template <class Message>
bool follows_leader(const std::vector<Message>& messages, size_t rank) {
  return leader_of(messages) < messages.size() && messages[rank].has_joined &&
         !messages[rank].has_contributed;
}

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

// All ranks have made the same rounds then, and none is left over.
void ShardedGradients::refuse_rounds(const std::vector<Message>& messages, int64_t rounds,
                                     const Posts& posts) {
  reducer_.catch_up(rounds, posts);
  drop_all();
  std::string got;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const auto& message = messages[rank];
    got += c10::str(rank == 0 ? "" : ", ", message.rounds, " on rank ", rank, " (",
                    message.forgotten_rounds, " forgotten",
                    message.met_forgotten ? ", of other parameters than those of others" : "",
                    message.looks_back ? ", asks about its last step)" : ")");
  }
  TORCH_CHECK(false,
              "shardstep: expected the same synchronized backward passes and zero_grad() on every "
              "rank when gradients are stepped with or looked at, got backward passes: ",
              got,
              "; the gradients are dropped: let every rank look at them, or none, use no_sync() "
              "for passes that are not to be added up, and let a rank without a batch step() with "
              "the others",
              detail::who(group_));
}

// Whether a rank has posted a bucket, other than in posts that it has forgotten, together with
// posts that another has: a group that was added, or a bucket that was frozen, took part in other
// rounds.
bool ShardedGradients::met_forgotten(const Posts& theirs, const Posts& all) {
  for (size_t b = 0; b < theirs.size(); ++b) {
    if (theirs[b].forgotten < all[b].forgotten && theirs[b].made > theirs[b].forgotten) return true;
  }
  return false;
}

// A rank that made fewer rounds had no batch then, and adds zeros. One that has added nothing also
// follows a zero_grad() of the others; else its gradients may have met those that were forgotten.
// What was forgotten of single parameters between rounds must be the same on all ranks by then.
// What changed before the missing rounds is repeated before they are added. `flags` by rank.
void ShardedGradients::line_up(std::vector<Message>& messages, const Posts& posts,
                               const std::vector<const uint8_t*>& flags) {
  int64_t rounds = 0, forgotten = 0;
  bool same = true, same_parts = true, refused = false;
  uint64_t changes = 0;
  for (const auto& message : messages) {
    rounds = std::max(rounds, message.rounds);
    same = same && message.rounds == messages[0].rounds;
    if (message.forgotten_rounds < forgotten) continue;
    forgotten = message.forgotten_rounds;
    changes = message.changes;
  }
  const auto parts_of = [&](const Message& message) {
    return message.rounds < rounds ? message.forgotten_parts_when_behind : message.forgotten_parts;
  };
  for (const auto& message : messages) {
    same_parts = same_parts && parts_of(message) == parts_of(messages[0]);
  }
  const auto own = static_cast<size_t>(group_->getRank());
  for (auto& message : messages) {
    const bool forgets = message.forgotten_rounds < forgotten;
    const bool mixed = forgets || message.met_forgotten;
    refused = refused || (mixed && message.has_contributed && !message.has_joined) ||
              (!same && (!same_parts || message.looks_back));
    if (!forgets) continue;
    message.changes = message.has_joined ? 0 : changes;
    message.change_count = 0;
    if (&message == &messages[own] && message.has_joined) forget_changes();
  }
  if (refused) refuse_rounds(messages, rounds, posts);
  reducer_.forget_up_to(forgotten, posts);
  const size_t leader = leader_of(messages);
  if (leader < messages.size()) follow_changes(messages, leader);
  if (messages[own].has_joined && leader < messages.size()) {
    reducer_.follow(flags[leader], follows_leader(messages, own));
  }
  reducer_.catch_up(rounds, posts);
}

// The changes of one rank, on every rank.
std::vector<GradientChange> ShardedGradients::log_of(const std::vector<Message>& messages,
                                                     size_t rank) {
  const bool mine = static_cast<int>(rank) == group_->getRank();
  auto log = mine ? changes_.log() : std::vector<GradientChange>(messages[rank].change_count);
  if (log.empty()) return log;
  const auto size = static_cast<int64_t>(log.size() * sizeof(GradientChange));
  const auto own = at::from_blob(log.data(), {size}, at::kByte);
  const auto all = detail::all_gather(control_, own, ControlMessage::kFollowedChanges);
  std::memcpy(log.data(), all[rank].const_data_ptr(), size);
  const detail::PeerInput peer(group_, static_cast<int>(rank));
  for (const auto& change : log) {
    peer.check("the kind of a change", change.kind, GradientChange::kScale, GradientChange::kZero);
    peer.check("the parameter of a change", change.param, 0,
               static_cast<int64_t>(params_.size()) - 1);
  }
  return log;
}

// Whether a rank that has joined can make these changes now, by its own unsettled rounds: it has at
// most the one of its step(), and what came before or after it can be set to zero apart.
bool ShardedGradients::can_repeat(const std::vector<GradientChange>& log, int64_t rounds) {
  return std::all_of(log.begin(), log.end(), [&](const GradientChange& change) {
    return change.kind != GradientChange::kZero || change.first == static_cast<double>(rounds) ||
           (change.first == 0 && rounds == 1);
  });
}

// A rank that has joined makes the changes of the leader that it lacks. If its own are not the
// first of them, the leader has forgotten gradients since; where it had only zeros itself, it
// starts again from zeros. Every rank decides the same.
void ShardedGradients::follow_changes(std::vector<Message>& messages, size_t leader) {
  const auto lags = [&](const Message& message) {
    return message.has_joined && message.changes != messages[leader].changes;
  };
  if (messages[leader].change_count < 0) return;
  if (std::none_of(messages.begin(), messages.end(), lags)) return;
  const auto log = log_of(messages, leader);
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    auto& message = messages[rank];
    if (!lags(message)) continue;
    const bool goes_on = GradientChanges::begins_with(log, message.change_count, message.changes);
    if (!goes_on && !message.has_only_zeros) continue;
    if (!can_repeat(log, message.rounds - reducer_.settled_rounds())) continue;
    message.changes = messages[leader].changes;
    if (static_cast<int>(rank) != group_->getRank()) continue;
    at::NoGradGuard no_grad;
    if (!goes_on) {
      for (size_t param = 0; param < params_.size(); ++param) reducer_.zero_sum(param);
      forget_changes();
    }
    for (size_t i = changes_.log().size(); i < log.size(); ++i) make(log[i]);
  }
}

void ShardedGradients::check_same_changes(const std::vector<Message>& messages) const {
  for (size_t rank = 1; rank < messages.size(); ++rank) {
    TORCH_CHECK(messages[rank].changes == messages[0].changes,
                "shardstep: expected the same changes to the gradients on every rank before they "
                "are read or used in step(), got other changes on rank ",
                rank,
                " than on rank 0; scale and clip them by the same amount on every rank (on a rank "
                "without a batch, with the optimizer's clip_grad_norm_()), and read them on one "
                "rank alone only before any rank changes them",
                detail::who(group_));
  }
}

void ShardedGradients::check_not_replaced(const std::vector<Message>& messages) const {
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    TORCH_CHECK(messages[rank].replaced < 0,
                "shardstep: expected `.grad` as the backward pass left it, changed in place or set "
                "to None, got another gradient for parameter ",
                agreement_.label(messages[rank].replaced), " on rank ", rank, detail::who(group_));
  }
}

ShardedGradients::Message ShardedGradients::message(const Question& question) {
  return {.params = agreement_.summary(params_),
          .rounds = reducer_.rounds(),
          .forgotten_rounds = reducer_.forgotten_rounds(),
          .forgotten_parts = reducer_.forgotten_parts(),
          .forgotten_parts_when_behind = reducer_.forgotten_parts_when_behind(),
          .has_contributed = reducer_.has_contributed(),
          .looks_back = !reducer_.made_round(),
          .has_joined = joined_,
          .has_only_zeros = reducer_.has_only_zeros(),
          .question = question,
          .changes = changes_.digest(),
          .change_count = changes_.count(),
          .replaced = reducer_.replaced()};
}

void ShardedGradients::check_message(const Message& message, int from) const {
  const detail::PeerInput peer(group_, from);
  const auto params = static_cast<int64_t>(params_.size());
  peer.check("the backward passes", message.rounds, 0, reducer_.rounds() + kMostRoundsAhead);
  peer.check("the forgotten backward passes", message.forgotten_rounds, 0, message.rounds);
  peer.check("the replaced gradient", message.replaced, -1, params - 1);
  peer.check("the changes to the gradients", message.change_count, -1, kMostChanges);
  const auto& [kind, which, norm_type] = message.question;
  peer.check("the kind of a question", static_cast<int64_t>(kind), 0,
             static_cast<int64_t>(Kind::kWhole));
  const auto last = static_cast<int64_t>(GradientStatistic::kInfinities);
  peer.check("the subject of a question", which, 0, kind == Kind::kWhole ? params - 1 : last);
}

// Every rank brings what it wants to know; a rank in before_step() wants nothing.
std::vector<ShardedGradients::Message> ShardedGradients::meet(const Question& question) {
  reducer_.end_round();
  const auto own_flags = reducer_.flags();
  auto posts = reducer_.posts();
  const auto own_posts = posts;
  const auto posts_size = posts.size() * sizeof(posts[0]);
  const auto own = message(question);
  auto bytes =
      at::empty({static_cast<int64_t>(sizeof(own) + posts_size + own_flags.size())}, at::kByte);
  auto* const data = bytes.mutable_data_ptr<uint8_t>();
  std::memcpy(data, &own, sizeof(own));
  if (!posts.empty()) std::memcpy(data + sizeof(own), posts.data(), posts_size);
  std::copy(own_flags.begin(), own_flags.end(), data + sizeof(own) + posts_size);

  std::vector<Message> messages;
  const auto received = detail::all_gather(control_, bytes, ControlMessage::kGradientMeeting);
  SHARDSTEP_FAILURE_POINT("meeting: heard");
  std::vector<int64_t> summaries;
  int64_t forgotten = 0;
  for (const auto& tensor : received) {
    std::memcpy(&messages.emplace_back(), tensor.const_data_ptr(), sizeof(Message));
    check_message(messages.back(), static_cast<int>(messages.size()) - 1);
    summaries.push_back(messages.back().params);
    forgotten = std::max(forgotten, messages.back().forgotten_rounds);
  }
  agreement_.check(control_, params_, summaries);
  std::vector<uint8_t> used(own_flags.size());
  std::vector<const uint8_t*> flags;  // by rank
  std::vector<Posts> posts_by_rank;
  bool same_forgotten = true;
  for (size_t rank = 0; rank < received.size(); ++rank) {
    const auto* theirs = received[rank].const_data_ptr<uint8_t>() + sizeof(Message);
    auto& own_of_rank = posts_by_rank.emplace_back(posts.size());
    for (size_t b = 0; b < posts.size(); ++b) {
      auto& made = own_of_rank[b];
      std::memcpy(&made, theirs + b * sizeof(made), sizeof(made));
      const detail::PeerInput peer(group_, static_cast<int>(rank));
      peer.check("the posts of a bucket", made.made, 0, own_posts[b].made + kMostRoundsAhead);
      peer.check("the forgotten posts of a bucket", made.forgotten, 0, made.made);
      posts[b].made = std::max(posts[b].made, made.made);
      posts[b].forgotten = std::max(posts[b].forgotten, made.forgotten);
    }
    flags.push_back(theirs + posts_size);
    same_forgotten = same_forgotten && messages[rank].forgotten_rounds == forgotten;
  }
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    messages[rank].met_forgotten = met_forgotten(posts_by_rank[rank], posts);
  }
  const size_t leader = leader_of(messages);
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    if (messages[rank].forgotten_rounds < forgotten) continue;
    GradientReducer::merge_flags(used, flags[rank],
                                 follows_leader(messages, rank) ? flags[leader] : nullptr);
  }
  line_up(messages, posts, flags);
  const int64_t changed = GradientReducer::first_changed(used);
  TORCH_CHECK(changed < 0, "shardstep: expected gradients of passes without synchronization to be ",
              "left alone while those of the last step are kept beside them, got a change to that "
              "of parameter ",
              agreement_.label(changed),
              "; call zero_grad() after step(), or change gradients after a synchronized pass",
              detail::who(group_));
  check_same_changes(messages);
  if (!reducer_.settled() || !same_forgotten) {
    const int64_t unfit = GradientReducer::first_unfit(used);
    TORCH_CHECK_VALUE(unfit < 0, "shardstep: expected the gradient of parameter ",
                      agreement_.label(unfit),
                      " to have the dtype, device and size of the parameter that the optimizer was "
                      "given, got a different one in a backward pass; create a new optimizer after "
                      "changing the model",
                      detail::who(group_));
    reducer_.settle(std::move(used));
    forget_changes();
  }
  met_ = true;
  return messages;
}

void ShardedGradients::answer(const std::vector<Message>& messages) {
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
      if (question.kind == Kind::kSquares) squares_of_ = present();
      known_.erase(question);
      const Merging merging(static_cast<GradientStatistic>(question.which), question.norm_type);
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
  const Merging merging(static_cast<GradientStatistic>(question.which), question.norm_type);
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

const std::vector<double>& ShardedGradients::statistic(GradientStatistic statistic,
                                                       double norm_type) {
  TORCH_CHECK_VALUE(norm_type >= 0, "shardstep: expected a norm type of 0 or more, got ", norm_type,
                    detail::who(group_));
  const Question question{Kind::kStatistic, static_cast<int64_t>(statistic), norm_type};
  if (!knows(question)) ask(question);
  return known_.at(question);
}

double ShardedGradients::total_norm(double norm_type) {
  const Merging merging(GradientStatistic::kNorm, norm_type);
  const Question each{Kind::kStatistic, static_cast<int64_t>(GradientStatistic::kNorm), norm_type};
  const Question together{Kind::kSquares, static_cast<int64_t>(GradientStatistic::kNorm), 2};
  if (norm_type == 2 && !knows(each)) {
    if (!knows(together) || squares_of_ != present()) ask(together);
    return known_.at(together).front();
  }
  double total = merging.neutral();
  const auto& norms = statistic(GradientStatistic::kNorm, norm_type);
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

void ShardedGradients::changed(int64_t param, const std::string& how) {
  changes_.add(param, how);
  known_.clear();
}

// On this rank alone.
void ShardedGradients::make(const GradientChange& change) {
  const auto& [kind, param, first, second] = change;
  auto own = kind == GradientChange::kZero ? at::Tensor() : reducer_.own(param);
  if (kind == GradientChange::kZero) {
    first < static_cast<double>(unsettled_rounds()) ? reducer_.zero_sum(param)
                                                    : reducer_.zero(param);
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

void ShardedGradients::scale(const std::vector<int64_t>& params, double factor) {
  at::NoGradGuard no_grad;
  settle();
  if (factor == 1) return;
  known_.erase({Kind::kSquares, static_cast<int64_t>(GradientStatistic::kNorm), 2});
  for (int64_t param : params) make({GradientChange::kScale, param, factor, 0});
}

void ShardedGradients::clamp(const std::vector<int64_t>& params, std::optional<double> min,
                             std::optional<double> max) {
  at::NoGradGuard no_grad;
  settle();
  for (int64_t param : params) {
    make({GradientChange::kClamp, param, min.value_or(-kInfinity), max.value_or(kInfinity)});
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
