#include "shard/shard_engine.h"

#include <algorithm>
#include <cmath>

#include "comm/agreement.h"
#include "comm/who.h"

namespace shardstep {
namespace {

// Buckets count from 0, and state has the two highest tags.
constexpr int kPartialTag = 0x8000;
constexpr int kReduceTag = 0xc000;
constexpr int kMeetTag = 0xfffb;
constexpr int kLendTag = 0xfffc;

std::string describe(const at::Tensor& param) {
  return c10::str(c10::toString(param.scalar_type()), " ", param.sizes(), " strides ",
                  param.strides(), " on ", param.device().type(),
                  param.requires_grad() ? "" : ", frozen");
}

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

int64_t cap_bytes(const EngineOptions& options) {
  // Gradients of a bucket live until all of them are there.
  constexpr double kStage2 = 25;
  const double mb = options.bucket_cap_mb.value_or(options.stage == 2 ? kStage2 : 0);
  TORCH_CHECK_VALUE(mb >= 0 && std::isfinite(mb),
                    "shardstep: expected bucket_cap_mb of 0 or more, got ", mb);
  return static_cast<int64_t>(std::ceil(mb * 1024 * 1024));
}

}  // namespace

ShardEngine::ShardEngine(ProcessGroupPtr group, EngineOptions options)
    : group_(std::move(group)),
      options_(options),
      partition_(options.sharding, group_->getSize(), cap_bytes(options)) {
  check_options();
  if (options_.share_parameters) options_.storage = BucketStorage::kFlat;
}

void ShardEngine::check_options() const {
  const auto where = detail::who(group_);
  TORCH_CHECK_VALUE(options_.stage == 1 || options_.stage == 2,
                    "shardstep: expected stage 1 or 2, got ", options_.stage, where);
  TORCH_CHECK_VALUE(options_.stage == 1 || !options_.overlap,
                    "shardstep: expected stage 1 with overlap_with_ddp, got stage 2, which reduces "
                    "the gradients itself and needs no DDP",
                    where);
  const auto only_stage_2 = [&](bool given, const char* name) {
    TORCH_CHECK_VALUE(!given || options_.stage == 2, "shardstep: expected stage 2 with ", name,
                      ", got stage 1", where);
  };
  only_stage_2(options_.share_parameters, "share_parameters");
  only_stage_2(options_.overlap_forward, "overlap_forward");
  only_stage_2(options_.gradient_dtype.has_value(), "gradient_dtype");
  TORCH_CHECK_VALUE(!options_.gradient_dtype || *options_.gradient_dtype == at::kBFloat16 ||
                        *options_.gradient_dtype == at::kHalf,
                    "shardstep: expected gradient_dtype to be bfloat16 or float16, got ",
                    *options_.gradient_dtype, where);
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

void ShardEngine::add_groups(const std::vector<EngineGroup>& groups,
                             const std::exception_ptr& error) {
  auto failure = error;
  std::vector<at::Tensor> all = params_;
  std::vector<std::string> lines;
  if (!failure) {
    try {
      lines.push_back(c10::str(
          "sharding by ", options_.sharding == Sharding::kElement ? "element" : "parameter",
          ", flat ", options_.storage == BucketStorage::kFlat, ", exchange ",
          static_cast<int>(options_.exchange), ", bucket cap ", cap_bytes(options_),
          " bytes, overlap ", options_.overlap, ", stage ", options_.stage, ", shared parameters ",
          options_.share_parameters, ", overlap_forward ", options_.overlap_forward,
          ", gradient_dtype ",
          options_.gradient_dtype ? c10::toString(*options_.gradient_dtype) : "none"));
      for (size_t g = 0; g < groups.size(); ++g) {
        const size_t index = group_count() + g;
        lines.push_back(c10::str("group ", index, ": ", groups[g].description));
        for (size_t i = 0; i < groups[g].params.size(); ++i) {
          const auto& param = groups[g].params[i];
          check_param(param, all.size());
          lines.push_back(c10::str("parameter ", i, " of group ", index, ": ", describe(param)));
          all.push_back(param);
        }
      }
      TORCH_CHECK_VALUE(!all.empty(), "shardstep: expected parameters to optimize, got none");
      if (options_.sharding == Sharding::kParameter) check_one_dtype(all);
      check_no_overlap(all);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  wait();
  const int64_t channel = detail::agree(group_, lines, failure);
  if (!exchange_ && world_size() > 1) {
    exchange_ = make_exchange(
        group_, {.kind = options_.exchange, .device = all.front().device(), .channel = channel});
    if (options_.share_parameters && std::string(exchange_->name()) != "shared_memory") {
      const std::string name = exchange_->name();
      exchange_.reset();
      TORCH_CHECK_VALUE(false,
                        "shardstep: expected ranks that share memory with share_parameters, got "
                        "exchange \"",
                        name, "\"", detail::who(group_));
    }
  }

  std::vector<std::vector<ParamSpec>> specs;
  for (const auto& group : groups) {
    auto& spec = specs.emplace_back();
    for (const auto& param : group.params) {
      spec.push_back({param.numel(), param.element_size(), kind_of(param)});
      trainable_.push_back(param.requires_grad());
    }
  }
  const size_t known = params_.size();
  params_ = std::move(all);
  partition_.add_groups(specs);
  const size_t first = buckets_.size();
  if (options_.stage == 2 && exchange_) broadcast_params(known);
  build_new_buckets();
  if (options_.stage == 2 && exchange_) reduce_new_buckets(first);
  // Memory that is shared can be opened as long as who made it is there.
  if (options_.stage == 2) meet();
  for (size_t group = local_.size(); group < group_count(); ++group) add_local_params(group);
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
    if (options_.share_parameters && exchange_) {
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
  exchange_->all_gather(nothing, kMeetTag)->wait();
}

void ShardEngine::reduce_new_buckets(size_t first) {
  if (!reducer_) {
    // A rank that had not read a bucket yet would keep others from writing their gradients there.
    reducer_ =
        std::make_unique<GradientReducer>(*exchange_, rank(), world_size(), [this] { wait(); });
  }
  for (size_t b = first; b < buckets_.size(); ++b) {
    std::vector<ReducedParam> params;
    for (size_t slot = 0; slot < buckets_[b].params().size(); ++slot) {
      const int64_t index = buckets_[b].layout().slots[slot].param;
      params.push_back({index, params_[index], partition_.slices(index)});
    }
    const auto tensor = buckets_[b].params().front().options().requires_grad(false);
    const bool narrows = options_.gradient_dtype && tensor.dtype().itemsize() > 2 &&
                         buckets_[b].params().front().is_floating_point();
    reducer_->add_bucket(std::move(params),
                         {.numel = {},
                          .tensor = tensor,
                          .wire = narrows ? options_.gradient_dtype : std::nullopt,
                          .tag = static_cast<int>(b),
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
    TORCH_WARN(
        "shardstep: requires_grad of a parameter changed; the buckets are built again (rank ",
        rank(), " of ", world_size(), ")");
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
  if (reducer_) reducer_->follow_params();
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
                    gradient.layout(), "; sharding by parameter takes it (rank ", rank(), " of ",
                    world_size(), ")");
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

// Sums lie in the order of the bucket's slots.
bool ShardEngine::set_reduced_gradients() {
  const bool anew = reducer_->finish();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    int64_t offset = 0;
    for (const auto& slot : buckets_[b].layout().slots) {
      const auto place = local_places_[slot.param];
      if (!place) continue;
      auto& [index, elements, tensor] = local_[place->group][place->position];
      const auto& sum = reducer_->sum(b);
      if (sum.defined() && reducer_->used(index)) {
        tensor.mutable_grad() =
            sum.as_strided(tensor.sizes(), tensor.strides(), sum.storage_offset() + offset);
      }
      offset += elements.size();
    }
  }
  return anew;
}

void ShardEngine::set_sync(bool sync) {
  check_stage_2("no_sync");
  if (reducer_) reducer_->set_sync(sync);
}

void ShardEngine::drop_sums() {
  drop_gradients();
  if (reducer_) reducer_->reset();
}

std::vector<at::Tensor> ShardEngine::local_gradients() const {
  std::vector<at::Tensor> gradients;
  for (const auto& group : local_) {
    for (const auto& local : group) {
      if (local.tensor.grad().defined()) gradients.push_back(local.tensor.grad());
    }
  }
  return gradients;
}

// Over the ranks, by rank.
std::vector<double> ShardEngine::of_all_ranks(double value) const {
  if (!exchange_) return {value};
  std::vector<double> values;
  for (const auto& one : detail::all_gather(group_, at::full({1}, value, at::kDouble))) {
    values.push_back(one.item<double>());
  }
  return values;
}

void ShardEngine::lend_gradients(bool has_gradients) {
  if (!exchange_ || options_.stage != 1) return;
  const auto has = of_all_ranks(has_gradients ? 1 : 0);
  const auto lender = std::find(has.begin(), has.end(), 1) - has.begin();
  if (lender == world_size()) return;
  for (int borrower = 0; borrower < world_size(); ++borrower) {
    if (has[borrower] == 0) lend_gradients(static_cast<int>(lender), borrower);
  }
}

void ShardEngine::lend_gradients(int from, int to) {
  if (rank() != from && rank() != to) return;
  at::NoGradGuard no_grad;
  const auto slices = owned_slices(to);
  const auto device = detail::control_device(group_);
  auto given = at::zeros({static_cast<int64_t>(slices.size())}, at::kByte);
  for (size_t i = 0; i < slices.size(); ++i) {
    given[static_cast<int64_t>(i)] = params_[slices[i]->param].grad().defined();
  }
  given = given.to(device);
  exchange_->transfer({given}, from, to, kLendTag)->wait();
  given = given.cpu();
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < slices.size(); ++i) {
    const auto& param = params_[slices[i]->param];
    auto& gradient = param.mutable_grad();
    if (given[static_cast<int64_t>(i)].item<uint8_t>() == 0) {
      gradient.reset();
      continue;
    }
    TORCH_CHECK_VALUE(!gradient.defined() || gradient.layout() == at::kStrided,
                      "shardstep: expected dense gradients with Join, got ", gradient.layout(),
                      detail::who(group_));
    if (rank() == to && !gradient.defined()) gradient = at::zeros_like(param);
    gradient = in_order_of(param, gradient);
    parts.push_back(
        flat_view(gradient).narrow(0, slices[i]->elements.begin, slices[i]->elements.size()));
  }
  exchange_->transfer(parts, from, to, kLendTag)->wait();
}

double ShardEngine::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  check_stage_2("clip_grad_norm_");
  at::NoGradGuard no_grad;
  const bool largest = std::isinf(norm_type);
  const auto merge = [&](double a, double b) {
    return !largest ? a + b : std::isnan(a) || a > b ? a : b;
  };
  const bool anew = take_gradients();
  const auto gradients = local_gradients();
  std::optional<double> known;
  if (reducer_ && norm_type == 2) {
    if (anew) known = reducer_->squares();
    reducer_->want_squares();  // who asks once asks again
  }
  double own = known.value_or(0);
  for (const auto& gradient : gradients) {
    if (known || gradient.numel() == 0) continue;
    const auto norm = at::norm(gradient, norm_type).item<double>();
    own = merge(own, largest ? norm : std::pow(norm, norm_type));
  }
  double total = 0;
  for (double value : of_all_ranks(own)) total = merge(total, value);
  if (!largest) total = std::pow(total, 1 / norm_type);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total),
              "shardstep: expected gradients with a finite norm, got ", total, detail::who(group_));
  const double factor = max_norm / (total + 1e-6);
  if (!(factor >= 1)) {
    for (at::Tensor gradient : gradients) gradient.mul_(factor);
  }
  return total;
}

void ShardEngine::clip_grad_value(double clip_value) {
  check_stage_2("clip_grad_value_");
  at::NoGradGuard no_grad;
  take_gradients();
  for (at::Tensor gradient : local_gradients()) gradient.clamp_(-clip_value, clip_value);
}

void ShardEngine::check_stage_2(const char* what) const {
  TORCH_CHECK_VALUE(options_.stage == 2, "shardstep: expected stage 2 for ", what,
                    "; in stage 1 gradients are whole, use torch's own", detail::who(group_));
}

// As the reduction does where there are other ranks.
void ShardEngine::drop_param_gradients() {
  for (const auto& param : params_) param.mutable_grad().reset();
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
  return exchange_->reduce_scatter(parts, kReduceTag + tag, world_size());
}

bool ShardEngine::take_gradients() {
  follow_params();
  if (reducer_) return set_reduced_gradients();
  if (!aliased()) return false;
  for (auto& group : local_) {
    for (auto& local : group) set_gradient(local, params_[local.index].grad());
  }
  return false;
}

void ShardEngine::before_step() {
  wait();
  take_gradients();
  // Nobody may still look at parameters that change here.
  if (options_.share_parameters) meet();
}

void ShardEngine::after_step() {
  drop_sums();
  if (!exchange_) {
    if (options_.stage == 2) drop_param_gradients();
    return;
  }
  at::NoGradGuard no_grad;
  if (options_.share_parameters) {
    meet();
  } else if (options_.overlap_forward) {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      arriving_[b] = exchange_->all_gather(parts_[b], static_cast<int>(b));
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
  return exchange_->all_gather(parts, kPartialTag + tag);
}

}  // namespace shardstep
