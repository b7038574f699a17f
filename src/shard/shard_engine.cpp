#include "shard/shard_engine.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <utility>

#include "comm/agreement.h"
#include "comm/make_exchange.h"
#include "comm/pending_works.h"
#include "failure_points.h"
#include "launch/who.h"
#include "shard/param_checks.h"

namespace shardstep {
namespace {

at::Device first_device(const std::vector<EngineGroup>& groups) {
  for (const auto& group : groups) {
    if (!group.params.empty()) return group.params.front().device();
  }
  return at::kCPU;
}

// By parameter, in place and without float32 copies, any change of a parameter can be followed, as
// the plain optimizer would.
detail::FixedLayout fixed_layout(const EngineOptions& options, Sharding sharding) {
  const bool by_element = sharding == Sharding::kElement;
  const bool copied = options.master_dtype || options.rounding == Rounding::kStochastic;
  return {.dtype_and_shape =
              by_element || options.stage2 || copied || options.storage == BucketStorage::kFlat,
          .memory_order = by_element || copied};
}

}  // namespace

ShardEngine::ShardEngine(ProcessGroupPtr group, EngineOptions options)
    : group_(std::move(group)),
      options_(options),
      partition_(options.sharding, group_->getSize(),
                 detail::bucket_cap_bytes(options, group_->getSize())),
      agreement_(group_),
      outcome_(group_),
      wide_(options, [this](int64_t param) {
        const auto [group, position] = *local_places_[param];
        return local_view(param, local_[group][position].elements);
      }) {
  detail::check_options(options_, group_);
  if (share_parameters()) options_.storage = BucketStorage::kFlat;
}

int64_t ShardEngine::kind_of(const at::Tensor& param, Sharding sharding) {
  // Frozen parameters are kept apart, so that the trainable ones are cut evenly.
  const auto key = c10::str(param.scalar_type(), param.device(), param.requires_grad(),
                            sharding == Sharding::kElement);
  const auto found = std::find(kinds_.begin(), kinds_.end(), key);
  if (found == kinds_.end()) {
    kinds_.push_back(key);
    return static_cast<int64_t>(kinds_.size()) - 1;
  }
  return found - kinds_.begin();
}

// A text of what must be the same on all ranks about groups.
std::vector<std::string> ShardEngine::describe_groups(
    const std::vector<EngineGroup>& groups) const {
  std::vector<at::Tensor> all = params_;
  std::vector<std::string> lines{detail::describe(options_)};
  for (size_t g = 0; g < groups.size(); ++g) {
    const size_t index = group_count() + g;
    const bool by_element = groups[g].sharding.value_or(options_.sharding) == Sharding::kElement;
    lines.push_back(c10::str("group ", index, by_element ? " by element" : " by parameter",
                             ", pool ", groups[g].cost_pool, ": ", groups[g].description));
    for (size_t i = 0; i < groups[g].params.size(); ++i) {
      const auto& param = groups[g].params[i];
      detail::check_param(param, detail::param_label(all.size(), groups[g].name(i)));
      if (options_.stage2 && world_size() > 1) {
        check_not_under_ddp(param, static_cast<int64_t>(all.size()));
      }
      lines.push_back(c10::str("parameter ", detail::param_label(i, groups[g].name(i)),
                               " of group ", index, ": ", detail::describe_param(param),
                               detail::describe_cost(groups[g].cost(i), all.size(), group_)));
      all.push_back(param);
    }
  }
  detail::check_params(all, options_, group_);
  return lines;
}

void ShardEngine::add_groups(const std::vector<EngineGroup>& groups,
                             const std::exception_ptr& error, const std::function<void()>& use) {
  const c10::InferenceMode off(false);  // what is made here is changed outside it
  auto failure = error;
  std::vector<std::string> lines;
  try {
    if (!failure) lines = describe_groups(groups);
  } catch (...) {
    failure = std::current_exception();
  }
  wait();
  const auto control = control_group();  // as long as not all ranks have another
  const int64_t channel = detail::agree(control, lines, failure);
  const Partition before = partition_;
  try {
    adopt(groups, channel);
    if (use) use();
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    // Also because shared memory can be opened only while its creator exists.
    detail::tell_every_rank(control, failure);
  } catch (...) {
    forget_since(before);
    if (exchange_) exchange_->start_anew();
    detail::tell_every_rank(control, nullptr);  // that they may use the exchange again
    throw;
  }
}

void ShardEngine::adopt(const std::vector<EngineGroup>& groups, int64_t channel) {
  const size_t known = params_.size();
  if (known == 0) {
    partition_ = Partition(options_.sharding, world_size(),
                           detail::bucket_cap_bytes(options_, world_size(), first_device(groups)));
  }
  std::vector<std::vector<ParamSpec>> specs;
  for (const auto& group : groups) {
    auto& spec = specs.emplace_back();
    const auto sharding = group.sharding.value_or(options_.sharding);
    for (size_t i = 0; i < group.params.size(); ++i) {
      const auto& param = group.params[i];
      // In stage 1, by parameter, the partition is torch's.
      const bool apart = options_.stage2 && !param.requires_grad();
      spec.push_back({.numel = param.numel(),
                      .element_size = param.element_size(),
                      .kind = kind_of(param, sharding),
                      .pool = 2 * group.cost_pool + apart,
                      .cost = group.cost(i),
                      .sharding = sharding});
      params_.push_back(param);
      trainable_.push_back(param.requires_grad());
      agreement_.add(param, group.name(i), fixed_layout(options_, sharding));
    }
  }
  connect(channel);
  SHARDSTEP_FAILURE_POINT("construction: connected");
  partition_.add_groups(specs);
  const size_t first = buckets_.size();
  if (options_.stage2 && exchange_) broadcast_params(known);
  build_new_buckets();
  if (options_.stage2 && exchange_) reduce_new_buckets(first);
  for (size_t group = local_.size(); group < group_count(); ++group) add_local_params(group);
}

void ShardEngine::forget_since(const Partition& before) {
  const size_t params = before.param_count(), buckets = before.buckets().size();
  if (options_.storage == BucketStorage::kFlat) {
    for (size_t i = params; i < params_.size(); ++i) {
      params_[i].set_data(params_[i].detach().clone());
    }
  }
  if (reducer_) reducer_->forget_buckets_from(buckets);
  const auto shorten = [](auto& items, size_t size) {
    if (items.size() > size)
      items.erase(items.begin() + static_cast<std::ptrdiff_t>(size), items.end());
  };
  shorten(params_, params);
  shorten(trainable_, params);
  shorten(places_, params);
  shorten(local_places_, params);
  wide_.forget_from(static_cast<int64_t>(params));
  shorten(buckets_, buckets);
  shorten(active_, buckets);
  shorten(parts_, buckets);
  shorten(arriving_, buckets);
  shorten(local_, before.group_count());
  agreement_.forget_from(params);
  partition_ = before;
}

void ShardEngine::connect(int64_t channel) {
  if (exchange_ || world_size() == 1) return;
  auto exchange = make_exchange(group_, {.kind = options_.exchange,
                                         .device = params_.front().device(),
                                         .channel = channel,
                                         .share_tensors = share_parameters()});
  TORCH_CHECK_VALUE(!share_parameters() || exchange->shares_memory(),
                    "shardstep: expected ranks that share memory with share_parameters, got "
                    "exchange \"",
                    exchange->name(), "\"", detail::who(group_));
  if (!params_.front().is_cpu()) control_ = make_control_exchange(group_, channel);
  exchange_ = std::move(exchange);
}

void ShardEngine::build_new_buckets() {
  places_.resize(params_.size());
  for (size_t bucket = buckets_.size(); bucket < partition_.buckets().size(); ++bucket) {
    const auto& layout = partition_.buckets()[bucket];
    std::vector<at::Tensor> params;
    for (const auto& slot : layout.slots) {
      places_[slot.param] = {bucket, params.size()};
      params.push_back(params_[slot.param]);
    }
    // Every rank writes the same values into shared memory.
    at::Tensor shared;
    if (share_parameters() && exchange_) {
      shared =
          exchange_->make_shared(layout.numel(), params.front().options().requires_grad(false));
    }
    buckets_.emplace_back(layout, std::move(params), options_.storage, shared);
    active_.emplace_back();
    parts_.emplace_back();
    arriving_.emplace_back();
  }
}

// From here on parameters are the same on all ranks.
void ShardEngine::broadcast_params(size_t first) {
  for (size_t i = first; i < params_.size(); ++i) {
    std::vector<at::Tensor> whole{flat_view(params_[i])};
    if (whole.front().numel() == 0) continue;
    detail::PendingWorks pending(group_);
    pending.add(group_->broadcast(whole, {}), "waiting for", 0);
    pending.wait();
  }
}

void ShardEngine::reduce_new_buckets(size_t first) {
  if (!reducer_) {
    // A rank that has not read a bucket yet would keep others from publishing its next update.
    reducer_ = std::make_unique<GradientReducer>(*exchange_, rank(), world_size(), [this] {
      wait();
      if (announce_ && !exchange_->any_order()) announce_();
    });
    reducer_->set_phase_times(phase_times_.get());
    gradients_ =
        std::make_unique<ShardedGradients>(control(), *exchange_, *reducer_, agreement_, params_);
  }
  for (size_t b = first; b < buckets_.size(); ++b) {
    std::vector<ReducedParam> params;
    for (size_t slot = 0; slot < buckets_[b].params().size(); ++slot) {
      const int64_t index = buckets_[b].layout().slots[slot].param;
      params.push_back({index, params_[index], partition_.slices(index)});
    }
    const auto& first_param = buckets_[b].params().front();
    auto tensor = first_param.options().requires_grad(false);
    std::optional<at::ScalarType> posted;
    if (updates_copy(params.front().index)) {
      tensor = tensor.dtype(at::kFloat);
      posted = first_param.scalar_type();
    }
    reducer_->add_bucket(std::move(params),
                         {.numel = {},
                          .tensor = tensor,
                          .posted = posted,
                          .wire = detail::wire_of(first_param.scalar_type(), options_),
                          .tag = {MessageKind::kGradients, static_cast<int64_t>(b)},
                          .divisor = static_cast<double>(world_size())});
  }
}

at::Tensor ShardEngine::local_view(int64_t param, Range elements) const {
  if (sharding(param) == Sharding::kParameter) return params_[param].detach();
  const auto [bucket, slot] = places_[param];
  return buckets_[bucket].view(slot, elements);
}

void ShardEngine::add_local_params(size_t group) {
  auto& local = local_.emplace_back();
  local_places_.resize(params_.size());
  for (const auto& slice : partition_.owned(rank(), group)) {
    local_places_[slice.param] = {group, local.size()};
    local.push_back({slice.param, slice.elements, params_[slice.param]});
    auto& tensor = local.back().tensor;
    if (!aliased(slice.param)) continue;
    tensor = updates_copy(slice.param)
                 ? wide_.add(slice.param, params_[slice.param], slice.elements.begin)
                 : local_view(slice.param, slice.elements);
    tensor.set_requires_grad(params_[slice.param].requires_grad());
  }
}

void ShardEngine::load_masters(const std::map<int64_t, at::Tensor>& masters) {
  if (!wide_.load_masters(masters)) return;
  TORCH_WARN("shardstep: the loaded state has no float32 masters (", kMasterKey,
             "); they start from the parameters", detail::who(group_));
}

void ShardEngine::widen_own_params(const std::map<int64_t, at::Tensor>& masters) {
  for (const auto& group : local_) {
    for (const auto& [index, elements, tensor] : group) {
      const auto found = masters.find(index);
      if (found == masters.end() || !found->second.defined()) continue;
      if (!can_be_widened(params_[index])) continue;
      widen_from_master(local_view(index, elements), found->second);
    }
  }
  if (!exchange_) return;
  std::vector<Parts> parts;
  for (const auto& bucket : buckets_) {
    parts.push_back(bucket.parts(std::vector<bool>(bucket.params().size(), true)));
  }
  std::vector<const Parts*> buckets;
  for (const auto& bucket : parts) buckets.push_back(&bucket);
  if (!share_parameters()) return exchange_->all_gather_and_wait(buckets);
  exchange_->all_gather_between_hosts(buckets);
  detail::tell_every_rank(group_, nullptr);  // so that all have written
}

}  // namespace shardstep
