#include "shard/shard_engine.h"

#include <algorithm>
#include <utility>

#include "comm/agreement.h"
#include "comm/make_exchange.h"
#include "launch/who.h"

namespace shardstep {
namespace {

void check_param(const at::Tensor& param, size_t index) {
  TORCH_CHECK_VALUE(param.defined(), "shardstep: expected parameter ", index,
                    " to be a tensor, got an undefined one");
  TORCH_CHECK_VALUE(param.layout() == at::kStrided, "shardstep: expected parameter ", index,
                    " to be dense, got layout ", param.layout());
  TORCH_CHECK_VALUE(is_dense(param), "shardstep: expected parameter ", index,
                    " to lie in memory without gaps or overlap, got sizes ", param.sizes(),
                    " and strides ", param.strides());
}

// Two tensors over the same memory would be updated twice and torn apart by flat storage.
void check_no_overlap(const std::vector<at::Tensor>& params) {
  struct Extent {
    const char* begin;
    const char* end;
    size_t index;
  };
  std::vector<Extent> extents;
  for (size_t i = 0; i < params.size(); ++i) {
    const auto* begin = static_cast<const char*>(params[i].const_data_ptr());
    if (params[i].numel() > 0) extents.push_back({begin, begin + params[i].nbytes(), i});
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1; i < extents.size(); ++i) {
    TORCH_CHECK_VALUE(!params[extents[i - 1].index].is_same(params[extents[i].index]),
                      "shardstep: expected every parameter once, got one as parameters ",
                      extents[i - 1].index, " and ", extents[i].index);
    TORCH_CHECK_VALUE(extents[i - 1].end <= extents[i].begin || extents[i].begin == nullptr,
                      "shardstep: expected parameters with memory of their own, got parameters ",
                      extents[i - 1].index, " and ", extents[i].index,
                      " that share some; to tie weights, use one tensor in both places");
  }
}

void check_one_dtype(const std::vector<at::Tensor>& params) {
  for (const auto& param : params) {
    TORCH_CHECK_VALUE(
        param.scalar_type() == params.front().scalar_type(),
        "shardstep: expected parameters of one dtype when sharding by parameter, got ",
        params.front().scalar_type(), " and ", param.scalar_type(),
        "; sharding by element takes any mix");
  }
}

// By parameter, in place, the plain optimizer would follow whatever becomes of a parameter.
detail::FixedLayout fixed_layout(const EngineOptions& options) {
  const bool by_element = options.sharding == Sharding::kElement;
  return {
      .dtype_and_shape = by_element || options.stage2 || options.storage == BucketStorage::kFlat,
      .memory_order = by_element};
}

}  // namespace

ShardEngine::ShardEngine(ProcessGroupPtr group, EngineOptions options)
    : group_(std::move(group)),
      options_(options),
      partition_(options.sharding, group_->getSize(), detail::bucket_cap_bytes(options)),
      agreement_(group_, fixed_layout(options)) {
  detail::check_options(options_, group_);
  if (share_parameters()) options_.storage = BucketStorage::kFlat;
}

int64_t ShardEngine::kind_of(const at::Tensor& param) {
  // Frozen parameters keep to themselves, so that the trainable ones are cut evenly.
  const auto key = c10::str(param.scalar_type(), param.device(), param.requires_grad());
  const auto found = std::find(kinds_.begin(), kinds_.end(), key);
  if (found == kinds_.end()) {
    kinds_.push_back(key);
    return static_cast<int64_t>(kinds_.size()) - 1;
  }
  return found - kinds_.begin();
}

// What the ranks must agree on about groups, in words.
std::vector<std::string> ShardEngine::describe_groups(
    const std::vector<EngineGroup>& groups) const {
  std::vector<at::Tensor> all = params_;
  std::vector<std::string> lines{detail::describe(options_)};
  for (size_t g = 0; g < groups.size(); ++g) {
    const size_t index = group_count() + g;
    lines.push_back(c10::str("group ", index, ": ", groups[g].description));
    for (size_t i = 0; i < groups[g].params.size(); ++i) {
      const auto& param = groups[g].params[i];
      check_param(param, all.size());
      if (options_.stage2 && world_size() > 1) {
        check_not_under_ddp(param, static_cast<int64_t>(all.size()));
      }
      lines.push_back(
          c10::str("parameter ", i, " of group ", index, ": ", detail::describe_param(param)));
      all.push_back(param);
    }
  }
  TORCH_CHECK_VALUE(!all.empty(), "shardstep: expected parameters to optimize, got none");
  if (options_.sharding == Sharding::kParameter) check_one_dtype(all);
  check_no_overlap(all);
  return lines;
}

void ShardEngine::add_groups(const std::vector<EngineGroup>& groups,
                             const std::exception_ptr& error) {
  auto failure = error;
  std::vector<std::string> lines;
  try {
    if (!failure) lines = describe_groups(groups);
  } catch (...) {
    failure = std::current_exception();
  }
  wait();
  const int64_t channel = detail::agree(group_, lines, failure);
  const Partition before = partition_;
  try {
    adopt(groups, channel);
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    // Also because memory that is shared can be opened only while whoever made it is there.
    detail::tell_every_rank(group_, failure);
  } catch (...) {
    forget_since(before);
    throw;
  }
}

void ShardEngine::adopt(const std::vector<EngineGroup>& groups, int64_t channel) {
  const size_t known = params_.size();
  std::vector<std::vector<ParamSpec>> specs;
  for (const auto& group : groups) {
    auto& spec = specs.emplace_back();
    for (const auto& param : group.params) {
      // In stage 1, by parameter, the division is torch's.
      const bool apart = options_.stage2 && !param.requires_grad();
      spec.push_back({param.numel(), param.element_size(), kind_of(param), apart});
      params_.push_back(param);
      trainable_.push_back(param.requires_grad());
      agreement_.add(param);
    }
  }
  connect(channel);
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
  auto exchange = make_exchange(
      group_, {.kind = options_.exchange, .device = params_.front().device(), .channel = channel});
  TORCH_CHECK_VALUE(!share_parameters() || exchange->shares_memory(),
                    "shardstep: expected ranks that share memory with share_parameters, got "
                    "exchange \"",
                    exchange->name(), "\"", detail::who(group_));
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
    if (whole.front().numel() > 0) group_->broadcast(whole, {})->wait();
  }
}

// Returns when all ranks are here.
void ShardEngine::meet() {
  if (!exchange_) return;
  Parts nothing(world_size());
  for (auto& part : nothing) part = {at::zeros({1}, at::kByte)};
  exchange_->all_gather(nothing, ControlMessage::kMeet)->wait();
}

void ShardEngine::reduce_new_buckets(size_t first) {
  if (!reducer_) {
    // A rank that had not read a bucket yet would keep others from showing the next update of it.
    reducer_ =
        std::make_unique<GradientReducer>(*exchange_, rank(), world_size(), [this] { wait(); });
    gradients_ =
        std::make_unique<ShardedGradients>(group_, *exchange_, *reducer_, agreement_, params_);
  }
  for (size_t b = first; b < buckets_.size(); ++b) {
    std::vector<ReducedParam> params;
    for (size_t slot = 0; slot < buckets_[b].params().size(); ++slot) {
      const int64_t index = buckets_[b].layout().slots[slot].param;
      params.push_back({index, params_[index], partition_.slices(index)});
    }
    const auto tensor = buckets_[b].params().front().options().requires_grad(false);
    const auto& gradient_dtype = options_.stage2->gradient_dtype;
    const bool narrows = gradient_dtype && tensor.dtype().itemsize() > 2 &&
                         buckets_[b].params().front().is_floating_point();
    reducer_->add_bucket(std::move(params), {.numel = {},
                                             .tensor = tensor,
                                             .wire = narrows ? gradient_dtype : std::nullopt,
                                             .tag = MessageTag::bucket(static_cast<int64_t>(b)),
                                             .divisor = static_cast<double>(world_size())});
  }
}

at::Tensor ShardEngine::local_view(int64_t param, Range elements) const {
  if (options_.sharding == Sharding::kParameter) return params_[param].detach();
  const auto [bucket, slot] = places_[param];
  return buckets_[bucket].view(slot, elements);
}

void ShardEngine::add_local_params(size_t group) {
  auto& local = local_.emplace_back();
  local_places_.resize(params_.size());
  for (const auto& slice : partition_.owned(rank(), group)) {
    const auto& param = params_[slice.param];
    const auto tensor =
        aliased() ? local_view(slice.param, slice.elements).set_requires_grad(param.requires_grad())
                  : param;
    local_places_[slice.param] = {group, local.size()};
    local.push_back({slice.param, slice.elements, tensor});
  }
}

// Parameters may have been given other memory, been frozen or unfrozen since the last step.
void ShardEngine::follow_params() {
  bool flipped = false;
  for (size_t i = 0; i < params_.size(); ++i) {
    flipped = flipped || trainable_[i] != params_[i].requires_grad();
    trainable_[i] = params_[i].requires_grad();
  }
  if (flipped) {
    TORCH_WARN("shardstep: requires_grad of a parameter changed; the buckets are built again",
               detail::who(group_));
  }
  std::vector<bool> moved;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    moved.push_back(buckets_[b].refresh());
    std::vector<bool> active;
    for (const auto& param : buckets_[b].params()) {
      // A frozen parameter that still has a gradient is updated, as by any optimizer.
      active.push_back(param.requires_grad() || param.grad().defined());
    }
    if (moved[b] || active != active_[b]) {
      parts_[b] = buckets_[b].parts(active);
      active_[b] = std::move(active);
    }
  }
  if (!aliased()) return;
  for (auto& group : local_) {
    for (auto& local : group) {
      if (moved[places_[local.index].bucket]) {
        local.tensor.set_data(local_view(local.index, local.elements));
      }
      if (flipped) local.tensor.set_requires_grad(trainable_[local.index]);
    }
  }
}

void ShardEngine::set_gradient(LocalParam& local, const at::Tensor& gradient) {
  if (!gradient.defined() || options_.sharding == Sharding::kParameter) {
    local.tensor.mutable_grad() = gradient;
    return;
  }
  TORCH_CHECK_VALUE(gradient.layout() == at::kStrided,
                    "shardstep: expected a dense gradient for parameter ", local.index, ", got ",
                    gradient.layout(), "; sharding by parameter takes it", detail::who(group_));
  local.tensor.mutable_grad() = flat_view(in_order_of(params_[local.index], gradient))
                                    .narrow(0, local.elements.begin, local.elements.size());
}

// Else zero_grad would not free them.
void ShardEngine::drop_gradients() {
  if (!aliased()) return;
  for (auto& group : local_) {
    for (auto& local : group) local.tensor.mutable_grad().reset();
  }
}

// The sums lie in memory as the parameters do.
void ShardEngine::set_reduced_gradients() {
  for (auto& group : local_) {
    for (auto& [index, elements, tensor] : group) {
      const auto own = reducer_->own(index);
      tensor.mutable_grad() =
          own.defined() ? own.as_strided(tensor.sizes(), tensor.strides()) : at::Tensor();
    }
  }
}

void ShardEngine::set_sync(bool sync) {
  check_stage_2("no_sync");
  if (reducer_) reducer_->set_sync(sync);
}

void ShardEngine::drop_sums() {
  drop_gradients();
  if (reducer_) reducer_->reset();
}

void ShardEngine::check_stage_2(const char* what) const {
  TORCH_CHECK_VALUE(options_.stage2, "shardstep: expected stage 2 for ", what,
                    "; in stage 1 gradients are whole, use torch's own", detail::who(group_));
}

std::vector<at::Tensor> ShardEngine::owned_gradients() {
  take_gradients();
  std::vector<at::Tensor> owned;
  for (const auto& group : local_) {
    for (const auto& local : group) {
      if (local.tensor.grad().defined()) owned.push_back(local.tensor.grad());
    }
  }
  return owned;
}

void ShardEngine::show_gradients() {
  if (!reducer_ || reducer_->rounds() == 0) return;
  if (!reducer_->made_round() && !reducer_->has_sums()) reducer_->show_stand_ins();
}

void ShardEngine::append_parts(int64_t param, const at::Tensor& tensor, Parts& parts) const {
  const auto flat = flat_view(tensor);
  for (const auto& slice : partition_.slices(param)) {
    if (slice.elements.empty()) continue;
    parts[slice.rank].push_back(flat.narrow(0, slice.elements.begin, slice.elements.size()));
  }
}

std::unique_ptr<Pending> ShardEngine::reduce_to_owners(const std::vector<ParamGradient>& gradients,
                                                       int tag) {
  if (!exchange_) return nullptr;
  at::NoGradGuard no_grad;
  Parts parts(world_size());
  for (const auto& [index, gradient] : gradients) {
    TORCH_INTERNAL_ASSERT(in_order_of(params_[index], gradient).is_same(gradient));
    append_parts(index, gradient, parts);
  }
  return exchange_->reduce_scatter(parts, {MessageKind::kReduceToOwners, tag}, world_size());
}

void ShardEngine::take_gradients() {
  wait();
  if (gradients_) {
    gradients_->before_step();
  } else if (exchange_) {
    agreement_.compare(*exchange_, params_);
  } else {
    agreement_.check_here(params_);
  }
  follow_params();
  if (reducer_) {
    set_reduced_gradients();
  } else if (aliased()) {
    for (auto& group : local_) {
      for (auto& local : group) set_gradient(local, params_[local.index].grad());
    }
  }
}

void ShardEngine::before_step() {
  phase_ = Phase::kComparing;
  take_gradients();
  // Nobody may still look at parameters that change here.
  if (share_parameters()) meet();
  phase_ = Phase::kUpdating;
}

void ShardEngine::fail_step(const std::exception_ptr& error) {
  const auto phase = std::exchange(phase_, Phase::kOutside);
  // Whatever before_step throws, it throws on every rank.
  if (!exchange_ || phase == Phase::kComparing) return;
  agreement_.fail(error);
  try {
    if (phase == Phase::kUpdating) {
      after_step();
    } else {
      take_gradients();
    }
  } catch (const std::exception&) {
    // The caller throws what came first.
  }
}

void ShardEngine::after_step() {
  phase_ = Phase::kOutside;
  drop_gradients();
  if (reducer_) reducer_->next_step();
  if (!exchange_) return;
  at::NoGradGuard no_grad;
  if (share_parameters()) {
    meet();
  } else if (options_.stage2 && options_.stage2->overlap_forward) {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      arriving_[b] =
          exchange_->all_gather(parts_[b], {MessageKind::kArriving, static_cast<int64_t>(b)});
    }
  } else {
    exchange_->all_gather_and_wait(parts_);
  }
}

void ShardEngine::wait(const std::vector<int64_t>& params) {
  for (int64_t param : params) {
    if (const auto pending = std::move(arriving_[places_[param].bucket])) pending->wait();
  }
}

void ShardEngine::wait() {
  for (auto& bucket : arriving_) {
    if (const auto pending = std::move(bucket)) pending->wait();
  }
}

void ShardEngine::before_partial_step(const std::vector<ParamGradient>& gradients) {
  TORCH_INTERNAL_ASSERT(options_.overlap);
  agreement_.check_here(params_);
  follow_params();
  for (const auto& [index, gradient] : gradients) {
    if (const auto place = local_places_[index]) {
      set_gradient(local_[place->group][place->position], gradient);
    }
  }
}

std::unique_ptr<Pending> ShardEngine::after_partial_step(
    const std::vector<ParamGradient>& gradients, int tag) {
  drop_gradients();
  if (!exchange_) return nullptr;
  at::NoGradGuard no_grad;
  Parts parts(world_size());
  for (const auto& [index, gradient] : gradients) append_parts(index, params_[index], parts);
  return exchange_->all_gather(parts, {MessageKind::kPartialStep, tag});
}

}  // namespace shardstep
