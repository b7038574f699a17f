#include "shardstep/distributed_data_parallel.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/modules/embedding.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <atomic>
#include <cmath>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "comm/agreement.h"
#include "comm/collectives.h"
#include "comm/peer_input.h"
#include "launch/chosen_group.h"
#include "launch/who.h"
#include "torch_versions.h"

namespace shardstep {
namespace {

// What the collective of a pass in a Join does, in errors.
constexpr const char* kComparingPasses = "in a Join, comparing passes with";

using detail::who;

int64_t bucket_bytes(const DistributedDataParallelOptions& options) {
  return options.bucket_cap_mb() ? static_cast<int64_t>(*options.bucket_cap_mb() * 1024 * 1024)
                                 : c10d::kDefaultBucketBytesCap;
}

int64_t first_bucket_bytes(const DistributedDataParallelOptions& options) {
  return options.bucket_cap_mb() ? bucket_bytes(options) : c10d::kDefaultFirstBucketBytes;
}

std::string describe(const at::Tensor& tensor) {
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), " strides ", tensor.strides());
}

void check_device(const ProcessGroupPtr& group, const std::string& name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(detail::has_backend_for(*group, tensor.device().type()),
                    "shardstep: expected tensors on a device that the process group has a backend "
                    "for, got ",
                    name, " on ", tensor.device(), who(group));
}

// What must be the same on all ranks; throws if this rank's arguments are invalid.
std::vector<std::string> check_and_describe(const std::shared_ptr<torch::nn::Module>& module,
                                            const DistributedDataParallelOptions& options,
                                            const ProcessGroupPtr& group) {
  TORCH_CHECK_VALUE(module, "shardstep: expected a module, got an empty holder", who(group));
  if (const auto cap = options.bucket_cap_mb()) {
    TORCH_CHECK_VALUE(*cap > 0 && std::isfinite(*cap),
                      "shardstep: expected bucket_cap_mb above 0, got ", *cap, who(group));
  }
  std::vector<std::string> lines{
      c10::str("init_sync ", options.init_sync(), ", broadcast_buffers ",
               options.broadcast_buffers(), ", bucket_cap_mb ", bucket_bytes(options), " bytes"),
      c10::str("find_unused_parameters ", options.find_unused_parameters(),
               ", gradient_as_bucket_view ", options.gradient_as_bucket_view(), ", static_graph ",
               options.static_graph())};
  bool trainable = false;
  for (const auto& item : module->named_parameters()) {
    check_device(group, "parameter " + item.key(), item.value());
    TORCH_CHECK_VALUE(item->layout() == at::kStrided, "shardstep: expected dense parameters, got ",
                      item->layout(), " for ", item.key(), who(group));
    trainable = trainable || item->requires_grad();
    lines.push_back(c10::str("parameter ", item.key(), ": ", describe(item.value()),
                             item->requires_grad() ? "" : ", frozen"));
  }
  TORCH_CHECK_VALUE(trainable,
                    "shardstep: expected a module with a parameter that requires a gradient, got "
                    "none; use the module without DistributedDataParallel",
                    who(group));
  for (const auto& item : module->named_buffers()) {
    check_device(group, "buffer " + item.key(), item.value());
    lines.push_back(c10::str("buffer ", item.key(), ": ", describe(item.value())));
  }
  return lines;
}

// Parameters whose gradients are sparse.
std::unordered_set<const void*> sparse_parameters(torch::nn::Module& module) {
  std::unordered_set<const void*> found;
  for (const auto& part : module.modules()) {
    if (const auto* layer = dynamic_cast<torch::nn::EmbeddingImpl*>(part.get())) {
      if (layer->options.sparse()) found.insert(layer->weight.unsafeGetTensorImpl());
    } else if (const auto* bag = dynamic_cast<torch::nn::EmbeddingBagImpl*>(part.get())) {
      if (bag->options.sparse()) found.insert(bag->weight.unsafeGetTensorImpl());
    }
  }
  return found;
}

// Joins the graphs of all outputs, so that those left out of the loss pass on "no gradient" and
// every parameter's hook runs.
struct Sink : torch::autograd::Node {
  explicit Sink(const torch::autograd::variable_list& outputs)
      : Node(torch::autograd::collect_next_edges(outputs)) {}
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
};

class HookOfUser : public c10d::CommHookInterface {
 public:
  explicit HookOfUser(CommHook hook) : hook_(std::move(hook)) {}
  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    auto future = hook_(bucket);
    TORCH_CHECK_VALUE(future, "shardstep: expected a future from the communication hook, got null");
    return future;
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    if (result.isTensor()) return result.toTensor();
    TORCH_CHECK_TYPE(result.isTensorList() && result.toTensorList().size() == 1,
                     "shardstep: expected the future of a tensor from the communication hook, got ",
                     result.tagKind());
    return result.toTensorList().get(0);
  }

 private:
  CommHook hook_;
};

// The reducer creates its views of buckets under this guard, so that autograd does not treat them
// as views. Otherwise libtorch's zero_grad, which detaches gradients in place, would throw with
// gradient_as_bucket_view.
using PlainViews = at::AutoDispatchBelowADInplaceOrView;

// The part of a flat bucket that holds the gradient of `param`, in its memory order.
at::Tensor gradient_in(const at::Tensor& flat, const at::Tensor& param, int64_t offset) {
  return param.is_non_overlapping_and_dense()
             ? flat.as_strided(param.sizes(), param.strides(), flat.storage_offset() + offset)
             : flat.narrow(0, offset, param.numel()).view(param.sizes());
}

void set_gradient(at::Tensor param, const at::Tensor& value) {
  auto& gradient = param.mutable_grad();
  if (gradient.defined()) {
    gradient.copy_(value);
  } else {
    gradient = at::empty_like(param.detach()).copy_(value);
  }
}

// What a forward is about to do, for the ranks that shadow it. Reduced by maximum.
enum Plan { kRebuild, kBuffers, kGradients, kUnprepared, kSource, kPlanSize };

}  // namespace

struct DistributedDataParallelBase::Impl {
  // c10d's, with access to its protected state.
  class Reducer : public c10d::Reducer {
   public:
    using c10d::Reducer::Reducer;

    // For a static graph: which parameters take part on any rank.
    const at::Tensor& used_map() const { return local_used_map_; }
    // It learns a static graph from the hooks of all backward passes up to the first synchronised
    // one, and would wait for as many hooks in every later pass.
    void forget_hooks_without_sync() {
      for (auto& [index, hooks] : numGradHooksTriggeredMap_) hooks = 0;
    }
  };

  Impl(std::shared_ptr<torch::nn::Module> module_in, const DistributedDataParallelOptions& given);
  ~Impl() {
    for (const auto& [param, hook] : copies) params[param].remove_hook(hook);
  }

  void make_reducer();
  std::vector<at::Tensor> tensors(bool parameters, bool buffers) const;
  void broadcast(std::vector<at::Tensor> tensors, int source);
  bool sends_buffers() const {
    return options.broadcast_buffers() && buffers_due && !module->buffers().empty();
  }
  // For a static graph: no backward pass, from which the reducer learns the graph, has run yet.
  bool graph_unknown() const { return options.static_graph() && !*graph_known; }

  void rebuild_buckets() {
    PlainViews plain_views;
    rebuilt = reducer->rebuild_buckets() || rebuilt;
  }
  void watch_first_backward(const std::vector<at::Tensor*>& outputs);
  void sink(const std::vector<at::Tensor*>& outputs);
  at::Tensor start_plan(bool gradients, c10::intrusive_ptr<c10d::Work>& work) const;
  // Sent so that the maximum over the ranks is that of the first rank. Zero: none.
  int64_t as_source(int rank) const { return group->getSize() - rank; }
  int source_in(const at::Tensor& sent) const {
    const int64_t number = detail::PeerInput(group).check(
        "the rank to broadcast from", sent.item<int64_t>(), 1, group->getSize());
    return group->getSize() - static_cast<int>(number);
  }

  void shadow();
  void shadow_gradients();
  void follow_last_joiner(bool is_last_joiner);

  std::shared_ptr<torch::nn::Module> module;
  DistributedDataParallelOptions options;
  ProcessGroupPtr group;
  std::vector<at::Tensor> params;
  std::vector<bool> sparse;
  // Hooks on sparse parameters, by position.
  std::vector<std::pair<size_t, unsigned>> copies;
  std::shared_ptr<Reducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
  std::vector<std::function<void()>> forward_pre_hooks;
  std::shared_ptr<std::atomic<bool>> graph_known = std::make_shared<std::atomic<bool>>(false);
  bool sync_gradients = true;
  bool buffers_due = true;
  bool forward_ran = false;
  bool has_comm_hook = false;
  bool rebuilt = false;
  bool divides_by_announcement = false;
  bool divide_by_initial_world_size = true;
};

DistributedDataParallelBase::Impl::Impl(std::shared_ptr<torch::nn::Module> module_in,
                                        const DistributedDataParallelOptions& given)
    : module(std::move(module_in)),
      options(given),
      group(detail::chosen_group(given.process_group())) {
  std::vector<std::string> lines;
  std::exception_ptr error;
  try {
    lines = check_and_describe(module, options, group);
  } catch (...) {
    error = std::current_exception();
  }
  detail::agree(group, lines, error);
  if (options.init_sync()) broadcast(tensors(true, true), 0);
  make_reducer();
}

void DistributedDataParallelBase::Impl::make_reducer() {
  const auto sparse_ones = sparse_parameters(*module);
  std::unordered_set<const void*> seen;
  std::unordered_map<size_t, std::string> names;
  for (const auto& item : module->named_parameters()) {
    // libtorch lists a tied weight under each of its names.
    if (!item->requires_grad() || !seen.insert(item->unsafeGetTensorImpl()).second) continue;
    names.emplace(params.size(), item.key());
    sparse.push_back(sparse_ones.count(item->unsafeGetTensorImpl()) > 0);
    params.push_back(item.value());
    if (sparse.back()) {
      // The reducer divides a sparse gradient in place, and its values may be memory that the rest
      // of the backward pass still reads.
      copies.emplace_back(params.size() - 1, item->register_hook([](at::Tensor gradient) {
        return gradient.clone();
      }));
    }
  }
  // The order of gradients is not known before the first backward pass, so there is one bucket
  // until then, unless buckets will not be rebuilt.
  std::vector<size_t> limits{std::numeric_limits<int64_t>::max()};
  if (options.find_unused_parameters() && !options.static_graph()) {
    limits = {static_cast<size_t>(first_bucket_bytes(options)),
              static_cast<size_t>(bucket_bytes(options))};
  }
  auto indices = std::get<0>(c10d::compute_bucket_assignment_by_size(params, limits, sparse));
  std::reverse(indices.begin(), indices.end());
  PlainViews plain_views;
  reducer = std::make_shared<Reducer>(
      params, std::move(indices), group, sparse, bucket_bytes(options),
      options.find_unused_parameters(), options.gradient_as_bucket_view(), std::move(names),
      first_bucket_bytes(options), /*skip_all_reduce_unused_params=*/false,
      /*use_python_reducer=*/false, /*bucket_bytes_cap_list=*/std::vector<int64_t>{});
  // The reducer expects one when it searches for unused parameters.
  logger = std::make_shared<c10d::Logger>(reducer);
  reducer->set_logger(logger);
  if (options.static_graph()) reducer->set_static_graph();
}

std::vector<at::Tensor> DistributedDataParallelBase::Impl::tensors(bool parameters,
                                                                   bool buffers) const {
  std::vector<at::Tensor> all;
  std::unordered_set<const void*> seen;
  const auto add = [&](const std::vector<at::Tensor>& some) {
    for (const auto& tensor : some) {
      if (tensor.numel() > 0 && seen.insert(tensor.unsafeGetTensorImpl()).second) {
        all.push_back(tensor.detach());
      }
    }
  };
  if (parameters) add(module->parameters());
  if (buffers) add(module->buffers());
  return all;
}

void DistributedDataParallelBase::Impl::broadcast(std::vector<at::Tensor> tensors, int source) {
  if (group->getSize() == 1 || tensors.empty()) return;
  at::NoGradGuard no_grad;
  // Graphs of earlier forwards may have saved a buffer; for them it must not appear changed.
  std::vector<int64_t> versions;
  for (const auto& tensor : tensors) versions.push_back(tensor._version());
  detail::broadcast(group, tensors, source);
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto counter = tensors[i].unsafeGetTensorImpl()->version_counter();
    counter.set_version(versions[i]);
  }
}

// The first backward pass of a static graph reduces everything at its end.
void DistributedDataParallelBase::Impl::watch_first_backward(
    const std::vector<at::Tensor*>& outputs) {
  for (const auto* output : outputs) {
    if (!output->defined() || !output->grad_fn()) continue;
    output->register_hook([reducer = std::weak_ptr(reducer), known = graph_known](at::Tensor) {
      if (known->exchange(true)) return;
      torch::autograd::Engine::get_default_engine().queue_callback([reducer] {
        if (const auto alive = reducer.lock()) alive->delay_all_reduce();
      });
    });
  }
}

void DistributedDataParallelBase::Impl::sink(const std::vector<at::Tensor*>& outputs) {
  std::vector<at::Tensor*> places;
  torch::autograd::variable_list with_graph;
  for (auto* output : outputs) {
    if (!output->defined() || !output->grad_fn()) continue;
    places.push_back(output);
    with_graph.push_back(*output);
  }
  if (places.empty()) return;
  const auto node = detail::make_node<Sink>(with_graph);
  for (auto* place : places) {
    // The same memory and version, so that the caller may change it in place as without DDP.
    *place = place->detach();
    torch::autograd::create_gradient_edge(*place, node);
  }
}

// Ranks that have joined learn what this one is about to do; it learns whose buffers to use.
at::Tensor DistributedDataParallelBase::Impl::start_plan(
    bool gradients, c10::intrusive_ptr<c10d::Work>& work) const {
  auto plan = at::zeros({kPlanSize}, at::kLong);
  plan[kRebuild] = static_cast<int64_t>(at::GradMode::is_enabled());
  plan[kBuffers] = static_cast<int64_t>(sends_buffers());
  plan[kGradients] = static_cast<int64_t>(gradients);
  plan[kSource] = as_source(group->getRank());
  std::vector<at::Tensor> message{plan.to(params[0].device())};
  work = group->allreduce(message, {.reduceOp = c10d::ReduceOp::MAX});
  return message[0];
}

// The collectives of a forward and its backward pass, contributing nothing.
void DistributedDataParallelBase::Impl::shadow() {
  for (const auto& hook : forward_pre_hooks) hook();
  auto own = at::zeros({kPlanSize}, at::kLong);
  own[kUnprepared] = static_cast<int64_t>(graph_unknown());
  std::vector<at::Tensor> message{own.to(params[0].device())};
  const auto work = group->allreduce(message, {.reduceOp = c10d::ReduceOp::MAX});
  detail::wait_for_all_ranks(group, work, kComparingPasses);
  const auto plan = message[0].cpu();
  const auto says = [&](Plan what) { return plan[what].item<int64_t>() != 0; };
  TORCH_CHECK(!says(kGradients) || !graph_unknown(),
              "shardstep: expected an input on every rank in the first iteration of a static graph",
              who(group));
  if (says(kRebuild)) rebuild_buckets();
  if (says(kBuffers)) broadcast(tensors(false, true), source_in(plan[kSource]));
  buffers_due = says(kGradients);
  if (!says(kGradients)) return;
  shadow_gradients();
}

void DistributedDataParallelBase::Impl::shadow_gradients() {
  at::NoGradGuard no_grad;
  auto buckets = reducer->get_grad_buckets(/*return_zero_tensors=*/true);
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
  for (auto& bucket : buckets) futures.push_back(reducer->run_comm_hook(bucket));
  auto used = at::ones({static_cast<int64_t>(params.size())}, at::kInt);
  if (options.static_graph()) {
    used = reducer->used_map();
  } else if (options.find_unused_parameters()) {
    std::vector<at::Tensor> message{at::zeros_like(used, params[0].device())};
    detail::wait_for_all_ranks(group, group->allreduce(message),
                               "in a Join, comparing used parameters with");
    used = message[0].cpu();
  }
  std::unordered_map<const void*, int64_t> index;
  for (size_t i = 0; i < params.size(); ++i) index.emplace(params[i].unsafeGetTensorImpl(), i);
  HookOfUser parser{nullptr};
  for (size_t b = 0; b < buckets.size(); ++b) {
    futures[b]->wait();
    const auto flat = parser.parseHookResult(futures[b]->value());
    int64_t offset = 0;
    for (const auto& param : buckets[b].getParameters()) {
      if (used[index.at(param.unsafeGetTensorImpl())].item<int>() != 0) {
        set_gradient(param, gradient_in(flat, param, offset));
      } else {
        // The other ranks, which call zero_grad, have none either.
        at::Tensor(param).mutable_grad().reset();
      }
      offset += param.numel();
    }
  }
  reducer->push_rebuilt_params_for_all_indices();
}

void DistributedDataParallelBase::Impl::follow_last_joiner(bool is_last_joiner) {
  for (const auto& hook : forward_pre_hooks) hook();
  auto candidate = at::full({1}, is_last_joiner ? as_source(group->getRank()) : 0,
                            at::TensorOptions().dtype(at::kLong).device(params[0].device()));
  std::vector<at::Tensor> message{candidate};
  const auto work = group->allreduce(message, {.reduceOp = c10d::ReduceOp::MAX});
  detail::wait_for_all_ranks(group, work, "in a Join, choosing the last joiner with");
  broadcast(tensors(true, options.broadcast_buffers()), source_in(message[0]));
}

DistributedDataParallelBase::DistributedDataParallelBase(
    std::shared_ptr<torch::nn::Module> module, const DistributedDataParallelOptions& options)
    : impl_(std::make_unique<Impl>(std::move(module), options)) {}

DistributedDataParallelBase::~DistributedDataParallelBase() = default;

void DistributedDataParallelBase::before_forward() {
  auto& impl = *impl_;
  for (const auto& hook : impl.forward_pre_hooks) hook();
  const bool gradients = at::GradMode::is_enabled() && impl.sync_gradients;
  if (gradients) impl.reducer->prepare_for_forward();
  impl.forward_ran = impl.forward_ran || gradients;

  int source = 0;
  const auto announcement = Join::notify_join_context(*this);
  if (announcement || impl.divides_by_announcement) {
    impl.divides_by_announcement = announcement != nullptr;
    impl.reducer->set_forward_pass_work_handle(announcement, impl.divide_by_initial_world_size);
  }
  if (announcement) {
    c10::intrusive_ptr<c10d::Work> work;
    auto plan = impl.start_plan(gradients, work);
    if (impl.sends_buffers() || (gradients && impl.graph_unknown())) {
      detail::wait_for_all_ranks(impl.group, work, kComparingPasses);
      plan = plan.cpu();
      source = impl.source_in(plan[kSource]);
      TORCH_CHECK(
          !(gradients && impl.graph_unknown() && plan[kUnprepared].item<int64_t>() != 0),
          "shardstep: expected an input on every rank in the first iteration of a static graph",
          who(impl.group));
    }
  }
  if (at::GradMode::is_enabled()) impl.rebuild_buckets();
  if (impl.sends_buffers()) impl.broadcast(impl.tensors(false, true), source);
}

void DistributedDataParallelBase::after_forward(const std::vector<at::Tensor*>& outputs,
                                                bool complete) {
  auto& impl = *impl_;
  const bool gradients = at::GradMode::is_enabled() && impl.sync_gradients;
  impl.buffers_due = gradients;
  if (!gradients) return;
  const bool search = impl.options.find_unused_parameters() && !impl.options.static_graph();
  TORCH_CHECK_TYPE(
      complete || !(search || impl.graph_unknown()),
      "shardstep: expected an output whose tensors tensor_visitor.h can find, got another "
      "type; find_unused_parameters and static_graph need a visit_tensors for it",
      who(impl.group));
  std::vector<at::Tensor> roots;
  if (search) {
    for (const auto* output : outputs) {
      if (output->defined()) roots.push_back(*output);
    }
  }
  if (impl.graph_unknown()) impl.reducer->forget_hooks_without_sync();
  impl.reducer->prepare_for_backward(roots);
  if (impl.graph_unknown()) impl.watch_first_backward(outputs);
  if (search) impl.sink(outputs);
}

DistributedDataParallelBase::NoSync::NoSync(DistributedDataParallelBase& ddp)
    : ddp_(ddp), before_(std::exchange(ddp.impl_->sync_gradients, false)) {}

DistributedDataParallelBase::NoSync::~NoSync() { ddp_.impl_->sync_gradients = before_; }

void DistributedDataParallelBase::register_comm_hook(CommHook hook) {
  TORCH_CHECK_TYPE(hook, "shardstep: expected a communication hook, got an empty function",
                   who(impl_->group));
  TORCH_CHECK(!impl_->has_comm_hook, "shardstep: expected one communication hook, got a second",
              who(impl_->group));
  TORCH_CHECK(!impl_->forward_ran,
              "shardstep: expected a communication hook before the first forward, got one after it",
              who(impl_->group));
  impl_->reducer->register_comm_hook(std::make_unique<HookOfUser>(std::move(hook)));
  impl_->has_comm_hook = true;
}

void DistributedDataParallelBase::register_forward_pre_hook(std::function<void()> hook) {
  impl_->forward_pre_hooks.push_back(std::move(hook));
}

std::vector<at::Tensor> DistributedDataParallelBase::parameters() const {
  return impl_->module->parameters();
}

torch::OrderedDict<std::string, at::Tensor> DistributedDataParallelBase::named_parameters() const {
  return impl_->module->named_parameters();
}

const std::vector<at::Tensor>& DistributedDataParallelBase::trainable_parameters() const {
  return impl_->params;
}

void DistributedDataParallelBase::train(bool on) { impl_->module->train(on); }

void DistributedDataParallelBase::zero_grad(bool set_to_none) {
  impl_->module->zero_grad(set_to_none);
}

const ProcessGroupPtr& DistributedDataParallelBase::process_group() const { return impl_->group; }

const DistributedDataParallelOptions& DistributedDataParallelBase::options() const {
  return impl_->options;
}

std::vector<std::vector<at::Tensor>> DistributedDataParallelBase::buckets() const {
  std::vector<std::vector<at::Tensor>> buckets;
  for (const auto& bucket : impl_->reducer->get_grad_buckets(/*return_zero_tensors=*/false)) {
    buckets.push_back(bucket.getParameters());
  }
  return buckets;
}

bool DistributedDataParallelBase::has_rebuilt_buckets() const { return impl_->rebuilt; }

namespace {

class ShadowHook : public JoinHook {
 public:
  ShadowHook(std::function<void()> shadow, std::function<void(bool)> end)
      : shadow_(std::move(shadow)), end_(std::move(end)) {}
  void main_hook() override { shadow_(); }
  void post_hook(bool is_last_joiner) override { end_(is_last_joiner); }

 private:
  std::function<void()> shadow_;
  std::function<void(bool)> end_;
};

}  // namespace

std::unique_ptr<JoinHook> DistributedDataParallelBase::join_hook(const JoinOptions& options) {
  for (size_t i = 0; i < impl_->params.size(); ++i) {
    TORCH_CHECK_VALUE(!impl_->sparse[i] && !impl_->params[i].is_complex(),
                      "shardstep: expected dense, real gradients inside a Join, got others for "
                      "parameter ",
                      i, who(impl_->group));
  }
  impl_->divide_by_initial_world_size = options.divide_by_initial_world_size();
  return std::make_unique<ShadowHook>(
      [this] { impl_->shadow(); },
      [this](bool is_last_joiner) { impl_->follow_last_joiner(is_last_joiner); });
}

at::Device DistributedDataParallelBase::join_device() const { return impl_->params[0].device(); }

ProcessGroupPtr DistributedDataParallelBase::join_process_group() const { return impl_->group; }

}  // namespace shardstep
