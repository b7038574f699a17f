#pragma once

// Stage 2: what can be asked of gradients that are divided among the ranks, and done to them.
// A question is collective, and all of a round are answered together: norms of all parameters take
// one exchange. Ranks need not ask the same: whoever is in before_step(), or asks something else,
// answers too. Changes are local, and must be the same on every rank: questions and before_step()
// check that.
// Thread safety: one thread at a time.

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/exchange.h"
#include "comm/message_tag.h"
#include "shard/gradient_reducer.h"
#include "shard/param_agreement.h"
#include "shardstep/export.h"

namespace shardstep {

enum class GradientStatistic : int64_t {
  kNorm,  // of a type
  kSum,
  kLargest,
  kSmallest,
  kNans,  // how many
  kInfinities,
};

class SHARDSTEP_API ShardedGradients {
 public:
  // REQUIRES: more than one rank; what is given outlives this.
  ShardedGradients(const ProcessGroupPtr& group, Exchange& exchange, GradientReducer& reducer,
                   detail::ParamAgreement& agreement, const std::vector<at::Tensor>& params);

  // Of each parameter's whole gradient, by index; of one that is not there, what changes nothing.
  // `norm_type` may be infinite, and counts for kNorm only. Collective.
  const std::vector<double>& statistic(GradientStatistic statistic, double norm_type = 0);
  // Of all gradients together. Collective.
  double total_norm(double norm_type);
  // By parameter. Collective.
  std::vector<bool> finite();
  // The gradient of a parameter, whole, in its shape and memory order; undefined if there is none.
  // Collective.
  at::Tensor whole(int64_t param);
  // Ends the rounds so far: all gradients are final then. Collective.
  void settle();

  // What this rank owns of a parameter's gradient, in memory order; undefined if it owns nothing or
  // there is no gradient. Who changes it calls changed().
  at::Tensor own(int64_t param);
  bool has_gradient(int64_t param);
  void changed(int64_t param, const std::string& how);
  void scale(const std::vector<int64_t>& params, double factor);
  void clamp(const std::vector<int64_t>& params, std::optional<double> min,
             std::optional<double> max);
  // The only one that needs no answer of the others.
  void zero(const std::vector<int64_t>& params);

  // The gradients are final, and the same was done to them everywhere; throws on every rank if not.
  // Collective.
  void before_step();

 private:
  enum class Kind : int64_t { kStep, kSettle, kStatistic, kSquares, kWhole };
  struct Question {
    Kind kind = Kind::kStep;
    int64_t which = 0;  // statistic or parameter
    double norm_type = 0;
    auto operator<=>(const Question&) const = default;
  };
  // What a rank brings to a meeting; the flags of used parameters follow it.
  struct Message {
    int64_t params = 0;  // a summary of the parameters
    int64_t rounds = 0;
    Question question;
    uint64_t changes = 0;
    int64_t replaced = -1;
  };

  void ask(const Question& question);
  std::vector<Message> meet(const Question& question);
  void answer(const std::vector<Message>& messages);
  void check_rounds(const std::vector<Message>& messages) const;
  void check_same_changes(const std::vector<Message>& messages) const;
  void check_not_replaced(const std::vector<Message>& messages) const;
  std::vector<double> own_values(const Question& question);
  at::Tensor gather_whole(int64_t param);
  std::vector<at::Tensor> all_gather(const at::Tensor& own, MessageTag tag) const;
  void note(int64_t param, const std::string& how);
  bool scale_known(int64_t param, double factor);

  ProcessGroupPtr group_;
  Exchange& exchange_;
  GradientReducer& reducer_;
  detail::ParamAgreement& agreement_;
  const std::vector<at::Tensor>& params_;
  std::map<Question, std::vector<double>> known_;  // of the gradients as they are
  std::optional<std::pair<int64_t, at::Tensor>> whole_;
  uint64_t changes_ = 0;  // since the round: a digest of what was done in which order
};

}  // namespace shardstep
