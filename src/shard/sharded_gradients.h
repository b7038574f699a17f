#pragma once

// Stage 2: queries and changes of gradients that are divided among the ranks.
// A question is collective and answered for all parameters together: norms of all parameters take
// one exchange. Ranks need not ask the same: a rank that is in before_step(), or asks something
// else, answers too. Changes are local and must be the same on every rank, which questions and
// before_step() check; a rank that has joined makes those that the others made.
// Thread safety: one thread at a time.

#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/exchange.h"
#include "comm/message_tag.h"
#include "shard/gradient_changes.h"
#include "shard/gradient_reducer.h"
#include "shard/gradient_statistics.h"
#include "shard/param_agreement.h"
#include "shardstep/export.h"

namespace shardstep {

class SHARDSTEP_API ShardedGradients {
 public:
  // REQUIRES: more than one rank; the arguments outlive this.
  // `control` moves what the host reads, `exchange` gradients.
  ShardedGradients(Exchange& control, Exchange& exchange, GradientReducer& reducer,
                   detail::ParamAgreement& agreement, const std::vector<at::Tensor>& params);

  // The statistic of each parameter's whole gradient, by index; a neutral value if there is none.
  // `norm_type` may be infinite, and is used for kNorm only. Collective.
  const std::vector<double>& statistic(GradientStatistic statistic, double norm_type = 0);
  // Of all gradients together. Collective: every rank calls it, so it asks even if this one has
  // heard of nothing new. Another may have made a pass, and forgotten it.
  double total_norm(double norm_type);
  // By parameter. Collective.
  std::vector<bool> finite();
  // The gradient of a parameter, whole, in its shape and memory order; undefined if there is none.
  // nullopt stands for a tensor that is no parameter, and is an error on every rank. Collective.
  at::Tensor whole(std::optional<int64_t> param);
  // Ends the rounds so far, so that all gradients are final. Collective.
  void settle();
  // The same where every rank calls it, even if this one has heard of nothing new.
  void settle_together();

  // What this rank owns of a parameter's gradient, in memory order; undefined if it owns nothing or
  // there is no gradient. Call changed() after changing it.
  at::Tensor own(int64_t param);
  bool has_gradient(int64_t param);
  void changed(int64_t param, const std::string& how);
  void scale(const std::vector<int64_t>& params, double factor);
  void clamp(const std::vector<int64_t>& params, std::optional<double> min,
             std::optional<double> max);
  // These need no answer of the others.
  void zero(int64_t param);
  void zero_all();
  void drop_all();  // there are none then

  // A rank that has joined runs no code of the user's: it forgets, drops and changes gradients as
  // the first rank with inputs did.
  void set_joined(bool joined) { joined_ = joined; }
  // At the end of a Join: what the last joiner has done to the gradients since the last step, the
  // others do now, since it will not be done before their next one. Collective.
  void end_join(bool is_last_joiner);

  // Makes the gradients final; throws on every rank unless all ranks made the same changes to them.
  // Collective.
  void before_step();
  void after_step();

 private:
  enum class Kind : int64_t { kStep, kSettle, kStatistic, kSquares, kWhole };
  static constexpr int64_t kForeign = -1;  // a tensor that is no parameter
  struct Question {
    Kind kind = Kind::kStep;
    int64_t which = 0;  // statistic, or parameter or kForeign
    double norm_type = 0;
    auto operator<=>(const Question&) const = default;
  };
  // What a rank brings to a meeting; its posts by bucket and the flags of used parameters follow.
  struct Message {
    int64_t params = 0;  // a summary of the parameters
    int64_t rounds = 0;
    int64_t forgotten_rounds = 0;
    uint64_t forgotten_parts = 0, forgotten_parts_when_behind = 0;  // of GradientReducer
    // Not bool, of which a damaged rank could send one that is neither.
    uint8_t has_contributed = 0;
    uint8_t looks_back = 0;  // at the gradients of the last step
    uint8_t has_joined = 0;
    uint8_t has_only_zeros = 0;
    uint8_t met_forgotten = 0;  // set where it is received
    uint8_t knows = 0;          // the answer to its question, unless another has changed something
    Question question;
    uint64_t changes = 0;  // their digest
    int64_t change_count = 0;
    int64_t replaced = -1;
  };

  using Posts = std::vector<BucketPosts>;  // by bucket
  // What the ranks have brought to a meeting.
  struct Heard {
    std::vector<at::Tensor> received;             // by rank
    std::vector<Message> messages;                // the first part of each
    std::vector<std::span<const uint8_t>> flags;  // the last part of each
    Posts posts;                                  // of each bucket, the most of any rank
    int64_t forgotten_rounds = 0;                 // the most of any rank
  };

  // Whether no rank can have another gradient than when the ranks last met.
  bool is_current() const { return reducer_.settled() && met_; }
  int64_t unsettled_rounds() const { return reducer_.rounds() - reducer_.settled_rounds(); }
  bool knows(const Question& question) const;
  void check_norm_type(double norm_type) const;
  void ask(const Question& question);
  std::vector<Message> meet(const Question& question);
  void answer(const std::vector<Message>& messages);
  Message message(const Question& question);
  Heard hear(const Question& question);
  void compare_posts(Heard& heard, const Posts& own) const;
  static bool met_forgotten(const Posts& theirs, const Posts& all);
  static std::vector<uint8_t> used(const Heard& heard);
  static bool are_at_odds(const Heard& heard, int64_t rounds);
  void line_up(Heard& heard);
  [[noreturn]] void refuse_rounds(const std::vector<Message>& messages, int64_t rounds,
                                  const Posts& posts);
  void check_message(const Message& message, int from) const;
  void follow_changes(Heard& heard, size_t leader);
  static bool can_repeat(const std::vector<GradientChange>& log, int64_t rounds, int64_t forgotten);
  std::vector<GradientChange> log_of(const std::vector<Message>& messages, size_t rank);
  void check_same_changes(const std::vector<Message>& messages) const;
  void check_not_changed(const std::vector<uint8_t>& used) const;
  void check_fit(const std::vector<uint8_t>& used) const;
  void check_not_replaced(const std::vector<Message>& messages) const;
  void check_not_foreign(const std::vector<Message>& messages) const;
  std::vector<double> own_values(const Question& question);
  std::vector<bool> present() const;  // by parameter: whether it has a gradient now
  at::Tensor gather_whole(int64_t param);
  void zero_rounds(int64_t param, double rounds);
  void make(const GradientChange& change);
  void forget_changes();
  bool scale_known(int64_t param, double factor);

  ProcessGroupPtr group_;
  Exchange& control_;
  Exchange& exchange_;
  GradientReducer& reducer_;
  detail::ParamAgreement& agreement_;
  const std::vector<at::Tensor>& params_;
  std::map<Question, std::vector<double>> known_;  // answers for the current gradients
  std::vector<bool> squares_of_;  // what was present when the norm of all was asked for
  at::Tensor whole_;              // gradient, that this rank has asked for
  GradientChanges changes_;
  bool met_ = false;  // since the last step: others may have had a batch then
  bool joined_ = false;
};

}  // namespace shardstep
