// The part of ShardedGradients in which the ranks meet: each says which rounds it has made,
// forgotten and changed; those that lack some catch up, or all refuse.

#include <algorithm>
#include <cstring>

#include "comm/agreement.h"
#include "comm/peer_input.h"
#include "failure_points.h"
#include "launch/who.h"
#include "shard/sharded_gradients.h"

namespace shardstep {
namespace {

// More backward passes than a rank can be behind another.
constexpr int64_t kMostRoundsAhead = int64_t{1} << 24;
// More changes than anyone makes to the gradients of one step.
constexpr int64_t kMostChanges = int64_t{1} << 24;

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
  const auto parts_of = [&](const Message& message) -> uint64_t {
    if (message.rounds <= forgotten) return 0;  // it has nothing left, or is about to forget it
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

// Whether a rank that has joined can make these changes now, by its own rounds since the sums were
// settled, and how many of them are forgotten: it has at most the one of its step() beside these,
// and what came before or after it can be set to zero apart.
bool ShardedGradients::can_repeat(const std::vector<GradientChange>& log, int64_t rounds,
                                  int64_t forgotten) {
  return std::all_of(log.begin(), log.end(), [&](const GradientChange& change) {
    return change.kind != GradientChange::kZero || change.first <= static_cast<double>(forgotten) ||
           change.first == static_cast<double>(rounds) || (change.first == 0 && rounds == 1);
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
  int64_t forgotten = 0;  // by all of them by now
  for (const auto& message : messages) forgotten = std::max(forgotten, message.forgotten_rounds);
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    auto& message = messages[rank];
    if (!lags(message)) continue;
    const bool goes_on = GradientChanges::begins_with(log, message.change_count, message.changes);
    if (!goes_on && !message.has_only_zeros) continue;
    const int64_t settled = reducer_.settled_rounds();
    if (!can_repeat(log, message.rounds - settled, forgotten - settled)) continue;
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
          .knows = knows(question),
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
    // What it used may be forgotten by others, unless it has forgotten all itself: then it is zero.
    const auto& message = messages[rank];
    if (message.forgotten_rounds < std::min(forgotten, message.rounds)) continue;
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

}  // namespace shardstep
