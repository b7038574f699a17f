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

// Whether the ranks cannot come to the same sums: gradients of a rank may have met those that
// others have forgotten, or what was forgotten of single parameters between rounds is not the same
// on all ranks by the time that some catch up.
bool ShardedGradients::are_at_odds(const Heard& heard, int64_t rounds) {
  const auto& messages = heard.messages;
  const auto parts_of = [&](const Message& message) -> uint64_t {
    if (message.rounds <= heard.forgotten_rounds) return 0;  // it is forgotten, or will be
    return message.rounds < rounds ? message.forgotten_parts_when_behind : message.forgotten_parts;
  };
  bool same = true, same_parts = true;
  for (const auto& message : messages) {
    same = same && message.rounds == rounds;
    same_parts = same_parts && parts_of(message) == parts_of(messages[0]);
  }
  return std::any_of(messages.begin(), messages.end(), [&](const Message& message) {
    const bool mixed = message.forgotten_rounds < heard.forgotten_rounds || message.met_forgotten;
    return (mixed && message.has_contributed && !message.has_joined) ||
           (!same && (!same_parts || message.looks_back));
  });
}

// A rank that made fewer rounds had no batch then, and adds zeros. One that has added nothing also
// follows a zero_grad() of the others. What changed before the missing rounds is repeated before
// they are added.
void ShardedGradients::line_up(Heard& heard) {
  auto& messages = heard.messages;
  int64_t rounds = 0;
  uint64_t changes = 0;  // of a rank that has forgotten the most
  for (const auto& message : messages) {
    rounds = std::max(rounds, message.rounds);
    if (message.forgotten_rounds == heard.forgotten_rounds) changes = message.changes;
  }
  const auto own = static_cast<size_t>(group_->getRank());
  for (auto& message : messages) {
    if (message.forgotten_rounds == heard.forgotten_rounds) continue;
    message.changes = message.has_joined ? 0 : changes;
    message.change_count = 0;
    if (&message == &messages[own] && message.has_joined) forget_changes();
  }
  if (are_at_odds(heard, rounds)) refuse_rounds(messages, rounds, heard.posts);
  reducer_.forget_up_to(heard.forgotten_rounds, heard.posts);
  const size_t leader = leader_of(messages);
  if (leader < messages.size()) {
    follow_changes(heard, leader);
    if (messages[own].has_joined) {
      reducer_.follow(heard.flags[leader].data(), follows_leader(messages, own));
    }
  }
  reducer_.catch_up(rounds, heard.posts);
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
void ShardedGradients::follow_changes(Heard& heard, size_t leader) {
  auto& messages = heard.messages;
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
    const int64_t settled = reducer_.settled_rounds();
    // All ranks have forgotten as many rounds by now.
    if (!can_repeat(log, message.rounds - settled, heard.forgotten_rounds - settled)) continue;
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

void ShardedGradients::check_not_foreign(const std::vector<Message>& messages) const {
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const auto& question = messages[rank].question;
    TORCH_CHECK_VALUE(question.kind != Kind::kWhole || question.which != kForeign,
                      "shardstep: expected a parameter of this optimizer in full_gradient(), got "
                      "another tensor on rank ",
                      rank, detail::who(group_));
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
  const bool is_whole = kind == Kind::kWhole;
  peer.check("the subject of a question", which, is_whole ? kForeign : 0,
             is_whole ? params - 1 : last);
}

// Sends this rank's part of a meeting, and checks what the others have sent.
ShardedGradients::Heard ShardedGradients::hear(const Question& question) {
  const auto own = message(question);
  const auto own_posts = reducer_.posts();
  const auto own_flags = reducer_.flags();
  const auto posts_size = own_posts.size() * sizeof(BucketPosts);
  const auto size = sizeof(own) + posts_size + own_flags.size();
  auto bytes = at::empty({static_cast<int64_t>(size)}, at::kByte);
  auto* const data = bytes.mutable_data_ptr<uint8_t>();
  std::memcpy(data, &own, sizeof(own));
  if (!own_posts.empty()) std::memcpy(data + sizeof(own), own_posts.data(), posts_size);
  std::copy(own_flags.begin(), own_flags.end(), data + sizeof(own) + posts_size);

  Heard heard;
  heard.received = detail::all_gather(control_, bytes, ControlMessage::kGradientMeeting);
  SHARDSTEP_FAILURE_POINT("meeting: heard");
  std::vector<int64_t> summaries;
  for (const auto& tensor : heard.received) {
    auto& message = heard.messages.emplace_back();
    std::memcpy(&message, tensor.const_data_ptr(), sizeof(message));
    check_message(message, static_cast<int>(heard.messages.size()) - 1);
    summaries.push_back(message.params);
    heard.forgotten_rounds = std::max(heard.forgotten_rounds, message.forgotten_rounds);
    const auto* const theirs = tensor.const_data_ptr<uint8_t>() + sizeof(message);
    heard.flags.emplace_back(theirs + posts_size, own_flags.size());
  }
  agreement_.check(control_, params_, summaries);
  compare_posts(heard, own_posts);
  return heard;
}

// A rank's posts by bucket stand between its message and its flags.
void ShardedGradients::compare_posts(Heard& heard, const Posts& own) const {
  heard.posts = own;
  std::vector<Posts> by_rank;
  for (size_t rank = 0; rank < heard.received.size(); ++rank) {
    const auto* theirs = heard.received[rank].const_data_ptr<uint8_t>() + sizeof(Message);
    const detail::PeerInput peer(group_, static_cast<int>(rank));
    auto& posts = by_rank.emplace_back(own.size());
    for (size_t b = 0; b < posts.size(); ++b) {
      std::memcpy(&posts[b], theirs + b * sizeof(posts[b]), sizeof(posts[b]));
      const auto& [made, forgotten] = posts[b];
      peer.check("the posts of a bucket", made, 0, own[b].made + kMostRoundsAhead);
      peer.check("the forgotten posts of a bucket", forgotten, 0, made);
      heard.posts[b].made = std::max(heard.posts[b].made, made);
      heard.posts[b].forgotten = std::max(heard.posts[b].forgotten, forgotten);
    }
  }
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    heard.messages[rank].met_forgotten = met_forgotten(by_rank[rank], heard.posts);
  }
}

// By parameter: the flags of all ranks. What a rank used may be forgotten by others, unless it has
// forgotten all itself: then it is zero.
std::vector<uint8_t> ShardedGradients::used(const Heard& heard) {
  const auto& messages = heard.messages;
  const size_t leader = leader_of(messages);
  std::vector<uint8_t> used(heard.flags[0].size());
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    const auto& message = messages[rank];
    if (message.forgotten_rounds < std::min(heard.forgotten_rounds, message.rounds)) continue;
    const bool follows = follows_leader(messages, rank);
    GradientReducer::merge_flags(used, heard.flags[rank].data(),
                                 follows ? heard.flags[leader].data() : nullptr);
  }
  return used;
}

void ShardedGradients::check_not_changed(const std::vector<uint8_t>& used) const {
  const int64_t changed = GradientReducer::first_changed(used);
  TORCH_CHECK(changed < 0, "shardstep: expected gradients of passes without synchronization to be ",
              "left alone while those of the last step are kept beside them, got a change to that "
              "of parameter ",
              agreement_.label(changed),
              "; call zero_grad() after step(), or change gradients after a synchronized pass",
              detail::who(group_));
}

void ShardedGradients::check_fit(const std::vector<uint8_t>& used) const {
  const int64_t unfit = GradientReducer::first_unfit(used);
  TORCH_CHECK_VALUE(unfit < 0, "shardstep: expected the gradient of parameter ",
                    agreement_.label(unfit),
                    " to have the dtype, device and size of the parameter that the optimizer was "
                    "given, got a different one in a backward pass; create a new optimizer after "
                    "changing the model",
                    detail::who(group_));
}

// Every rank brings what it wants to know; a rank in before_step() wants nothing.
std::vector<ShardedGradients::Message> ShardedGradients::meet(const Question& question) {
  reducer_.end_round();
  auto heard = hear(question);
  auto used = this->used(heard);
  line_up(heard);
  check_not_changed(used);
  check_same_changes(heard.messages);
  const bool same_forgotten = std::all_of(
      heard.messages.begin(), heard.messages.end(),
      [&](const Message& message) { return message.forgotten_rounds == heard.forgotten_rounds; });
  if (!reducer_.settled() || !same_forgotten) {
    check_fit(used);
    reducer_.settle(std::move(used));
    forget_changes();
  }
  met_ = true;
  return std::move(heard.messages);
}

}  // namespace shardstep
