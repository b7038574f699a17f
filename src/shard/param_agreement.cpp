#include "shard/param_agreement.h"

#include <algorithm>
#include <utility>

#include "comm/agreement.h"
#include "launch/who.h"
#include "shard/bucket.h"

namespace shardstep::detail {
namespace {

// Values of a status or summary that are not hashes, whose lowest bit is 0.
constexpr int64_t kChanged = 1;
constexpr int64_t kFailed = 3;

// FNV-1a over numbers: the same on every machine.
class Hash {
 public:
  void add(int64_t number) { value_ = (value_ ^ static_cast<uint64_t>(number)) * 0x100000001b3u; }
  void add(at::IntArrayRef numbers) {
    add(static_cast<int64_t>(numbers.size()));
    for (int64_t number : numbers) add(number);
  }
  int64_t value() const { return static_cast<int64_t>(value_ & ~uint64_t{1}); }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

// Every rank's numbers, by rank.
std::vector<std::vector<int64_t>> all_gather_numbers(Exchange& exchange,
                                                     const std::vector<int64_t>& own) {
  std::vector<std::vector<int64_t>> numbers;
  for (const auto& theirs :
       all_gather(exchange, at::tensor(own, at::kLong), ControlMessage::kParamStatus)) {
    const auto* data = theirs.const_data_ptr<int64_t>();
    numbers.emplace_back(data, data + own.size());
  }
  return numbers;
}

}  // namespace

std::string param_label(size_t index, const std::string& name) {
  return name.empty() ? std::to_string(index) : c10::str(index, " (", name, ")");
}

std::string describe_param(const at::Tensor& param) {
  return c10::str(c10::toString(param.scalar_type()), " ", param.sizes(), " strides ",
                  param.strides(), " on ", param.device().type(),
                  param.requires_grad() ? "" : ", frozen");
}

ParamAgreement::ParamAgreement(ProcessGroupPtr group) : group_(std::move(group)) {}

void ParamAgreement::add(const at::Tensor& param, const std::string& name, FixedLayout fixed) {
  added_.push_back({param.scalar_type(), param.device(), param.sizes().vec(), param.strides().vec(),
                    describe_param(param), name, fixed});
}

void ParamAgreement::forget_from(size_t count) {
  added_.erase(added_.begin() + static_cast<std::ptrdiff_t>(count), added_.end());
}

bool ParamAgreement::has_changed(size_t index, const at::Tensor& param) const {
  const auto& added = added_[index];
  if (!is_dense(param) || param.numel() != c10::multiply_integers(added.sizes)) return true;
  if (added.fixed.dtype_and_shape &&
      (param.scalar_type() != added.dtype || param.device() != added.device ||
       param.sizes() != added.sizes)) {
    return true;
  }
  if (!added.fixed.memory_order) return false;
  // Strides of axes with one element do not matter.
  for (int64_t axis = 0; axis < param.dim(); ++axis) {
    if (param.size(axis) > 1 && param.stride(axis) != added.strides[axis]) return true;
  }
  return false;
}

int64_t ParamAgreement::status_of(size_t index, const at::Tensor& param) const {
  if (has_changed(index, param)) return kChanged;
  Hash hash;
  hash.add(static_cast<int64_t>(param.scalar_type()));
  hash.add(static_cast<int64_t>(param.device().type()));
  hash.add(param.sizes());
  for (int64_t axis = 0; axis < param.dim(); ++axis) {
    hash.add(param.size(axis) > 1 ? param.stride(axis) : 0);
  }
  hash.add(param.requires_grad());
  // A frozen parameter that still has a gradient is updated, as in any optimizer.
  hash.add(!param.requires_grad() && param.grad().defined());
  return hash.value();
}

std::vector<int64_t> ParamAgreement::statuses_of(const std::vector<at::Tensor>& params) const {
  std::vector<int64_t> statuses;
  for (size_t i = 0; i < params.size(); ++i) statuses.push_back(status_of(i, params[i]));
  return statuses;
}

int64_t ParamAgreement::summary(const std::vector<at::Tensor>& params) const {
  if (failure_) return kFailed;
  Hash hash;
  for (int64_t status : statuses_of(params)) {
    if (status == kChanged) return kChanged;
    hash.add(status);
  }
  return hash.value();
}

void ParamAgreement::check(Exchange& control, const std::vector<at::Tensor>& params,
                           const std::vector<int64_t>& summaries) {
  if (std::find(summaries.begin(), summaries.end(), kFailed) != summaries.end()) {
    tell_every_rank(control.process_group(), std::exchange(failure_, nullptr));
  }
  for (int64_t summary : summaries) {
    if (summary == kChanged || summary != summaries[0]) refuse(control, params);
  }
}

void ParamAgreement::compare(Exchange& control, const std::vector<at::Tensor>& params) {
  std::vector<int64_t> summaries;
  for (const auto& theirs : all_gather_numbers(control, {summary(params)})) {
    summaries.push_back(theirs[0]);
  }
  check(control, params, summaries);
}

void ParamAgreement::refuse(Exchange& control, const std::vector<at::Tensor>& params) const {
  const auto statuses = statuses_of(params);
  const auto all = all_gather_numbers(control, statuses);
  for (size_t i = 0; i < params.size(); ++i) {
    for (size_t rank = 0; rank < all.size(); ++rank) {
      const int64_t theirs = all[rank][i];
      if (theirs == statuses[i] && theirs != kChanged) continue;
      if (statuses[i] == kChanged) refuse_changed(i, params[i]);
      TORCH_CHECK_VALUE(theirs != kChanged, "shardstep: expected parameter ", label(i), " to stay ",
                        added_[i].description, ", got a change on rank ", rank,
                        "; create a new optimizer after changing the model", who(group_));
      const bool has_gradient = !params[i].requires_grad() && params[i].grad().defined();
      TORCH_CHECK_VALUE(false, "shardstep: expected parameter ", label(i),
                        " to be the same on every rank, got ", describe_param(params[i]),
                        has_gradient ? " with a gradient" : "", " here and something else on rank ",
                        rank, "; change, freeze and unfreeze the same parameters on all ranks",
                        who(group_));
    }
  }
  TORCH_INTERNAL_ASSERT(false, "shardstep: ranks do not agree on their parameters");
}

void ParamAgreement::refuse_changed(size_t index, const at::Tensor& param) const {
  TORCH_CHECK_VALUE(false, "shardstep: expected parameter ", label(index), " to stay ",
                    added_[index].description, ", got ", describe_param(param),
                    "; create a new optimizer after changing the model", who(group_));
}

void ParamAgreement::check_here(const std::vector<at::Tensor>& params) const {
  for (size_t i = 0; i < params.size(); ++i) {
    if (has_changed(i, params[i])) refuse_changed(i, params[i]);
  }
}

}  // namespace shardstep::detail
