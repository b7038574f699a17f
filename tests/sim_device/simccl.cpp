#include "simccl.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "device.h"
#include "kernels.h"
#include "launch/process_group_backends.h"
#include "memory.h"
#include "sim_device.h"

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using Bytes = std::vector<uint8_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr size_t kMessageBytes = 4096;  // a call's description, and its data if there is room

uint8_t* host_bytes(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : host_alias(tensor.data_ptr());
}

void append(Bytes& bytes, const void* data, size_t count) {
  const auto* begin = static_cast<const uint8_t*>(data);
  bytes.insert(bytes.end(), begin, begin + count);
}

Bytes contents(const Tensors& tensors) {
  Bytes bytes;
  for (const auto& tensor : tensors) {
    if (tensor.numel() > 0) append(bytes, host_bytes(tensor), tensor.nbytes());
  }
  return bytes;
}

int64_t bytes_of(const Tensors& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  return bytes;
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const auto *begin = host_bytes(a), *other = host_bytes(b);
  return begin < other + b.nbytes() && other < begin + a.nbytes();
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.numel() > 0 && a.nbytes() == b.nbytes() && host_bytes(a) == host_bytes(b);
}

// One operation as a rank sees it. Every rank contributes some bytes and makes its outputs from all
// ranks' contributions.
struct Operation {
  std::string name;
  std::string description;  // must be the same on every rank
  Tensors inputs = {};
  Tensors outputs = {};
  Bytes prefix = {};  // sent before the inputs
  std::function<void(const std::vector<const uint8_t*>&)> complete = {};
};

// A call: operations that are started together.
struct Call {
  std::vector<Operation> operations;
  uint64_t number = 0;
  Bytes sent;
  std::vector<Bytes> received;
  bool done = false;
  std::exception_ptr error;

  std::string description() const {
    std::string text;
    for (const auto& one : operations) text += (text.empty() ? "" : "; ") + one.description;
    return text;
  }
};

// Runs calls in a thread, in order. The thread may outlive the backend, until its timeout.
class Channel {
 public:
  Channel(c10::intrusive_ptr<c10d::Backend> gloo, std::chrono::milliseconds timeout)
      : gloo_(std::move(gloo)), timeout_(timeout) {}

  void submit(const std::shared_ptr<Call>& call) {
    std::lock_guard lock(mutex_);
    call->number = next_++;
    calls_.push_back(call);
    changed_.notify_all();
  }

  void wait(const Call& call) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return call.done; });  // the thread's own waits are limited
    if (call.error) std::rethrow_exception(call.error);
  }

  bool done(const Call& call) {
    std::lock_guard lock(mutex_);
    return call.done;
  }

  void stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
    changed_.notify_all();
  }

  // Whether the thread will end without waiting for another rank.
  bool idle() {
    std::lock_guard lock(mutex_);
    return calls_.empty();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopped_ || !calls_.empty(); });
      if (calls_.empty()) return;
      const auto call = calls_.front();
      lock.unlock();
      try {
        if (failure_) std::rethrow_exception(failure_);
        exchange(*call);
      } catch (...) {
        failure_ = std::current_exception();
      }
      lock.lock();
      call->error = failure_;
      call->done = true;
      calls_.pop_front();
      changed_.notify_all();
    }
  }

  c10d::Backend& gloo() { return *gloo_; }

 private:
  struct Header {
    uint64_t number, data_bytes, text_bytes;
  };

  std::vector<Bytes> all_gather(const Bytes& own) {
    std::vector<Bytes> received(gloo_->getSize(), Bytes(own.size()));
    std::vector<Tensors> outputs(1);
    for (auto& bytes : received) {
      outputs[0].push_back(
          at::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, at::kByte));
    }
    Tensors inputs{at::from_blob(const_cast<uint8_t*>(own.data()),
                                 {static_cast<int64_t>(own.size())}, at::kByte)};
    gloo_->allgather(outputs, inputs)->wait();
    return received;
  }

  void exchange(Call& call) {
    const auto text = call.description();
    const size_t room = kMessageBytes - sizeof(Header);
    TORCH_CHECK(text.size() < room / 2, "simccl: too many operations in one call");
    Bytes message;
    const Header own{call.number, call.sent.size(), text.size()};
    append(message, &own, sizeof(own));
    append(message, text.data(), text.size());
    const auto fits = [&](size_t bytes) { return bytes <= room - text.size(); };
    if (fits(call.sent.size())) append(message, call.sent.data(), call.sent.size());
    message.resize(kMessageBytes);

    std::vector<Bytes> messages;
    try {
      messages = all_gather(message);
    } catch (const std::exception& error) {
      TORCH_CHECK(false, "simccl: call ", call.number, " (", text, ") did not complete within ",
                  timeout_.count(), " ms or a rank died: ", error.what(), who());
    }
    size_t longest = 0;
    for (int rank = 0; rank < gloo_->getSize(); ++rank) {
      Header header;
      std::memcpy(&header, messages[rank].data(), sizeof(header));
      const std::string theirs(messages[rank].begin() + sizeof(header),
                               messages[rank].begin() + sizeof(header) + header.text_bytes);
      TORCH_CHECK(theirs == text && header.number == call.number,
                  "simccl: expected the same calls in the same order on every rank, got call ",
                  call.number, " (", text, ") here and call ", header.number, " (", theirs,
                  ") on rank ", rank, who());
      longest = std::max<size_t>(longest, header.data_bytes);
    }
    if (fits(longest)) {
      for (auto& bytes : messages) {
        bytes.erase(bytes.begin(),
                    bytes.begin() + static_cast<int64_t>(sizeof(Header) + text.size()));
      }
      call.received = std::move(messages);
    } else {
      call.sent.resize(longest);
      call.received = all_gather(call.sent);
    }
    call.sent = {};
  }

  std::string who() const {
    return c10::str(" (rank ", gloo_->getRank(), " of ", gloo_->getSize(), ")");
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Call>> calls_;
  uint64_t next_ = 0;
  bool stopped_ = false;
  std::exception_ptr failure_;
};

// Remembers what inputs and outputs hold while a call is under way.
class Watched {
 public:
  void watch(const Operation& operation) {
    for (const auto& input : operation.inputs) images_.push_back({input, {}});
    for (const auto& output : operation.outputs) {
      // In place, as all-gather may be: this part is an input.
      const bool kept =
          std::any_of(operation.inputs.begin(), operation.inputs.end(), [&](const auto& input) {
            return operation.name == "all_gather" && same_memory(input, output);
          });
      if (!kept) poisoned_.push_back(output);
    }
  }
  void poison() {
    for (const auto& tensor : poisoned_) {
      if (tensor.numel() > 0) std::memset(host_bytes(tensor), kPoison, tensor.nbytes());
    }
    for (auto& [tensor, image] : images_) image = contents({tensor});
    for (const auto& tensor : poisoned_) images_.push_back({tensor, contents({tensor})});
  }
  bool touches(const Tensors& tensors) const {
    for (const auto& [tensor, image] : images_) {
      for (const auto& other : tensors) {
        if (overlap(tensor, other)) return true;
      }
    }
    return false;
  }
  void check(const std::string& call) const {
    for (const auto& [tensor, image] : images_) {
      TORCH_CHECK(contents({tensor}) == image, "simccl: a tensor of ", call,
                  " was changed between the call and wait(): sizes ", tensor.sizes());
    }
  }

 private:
  std::vector<std::pair<at::Tensor, Bytes>> images_;
  Tensors poisoned_;
};

// A call that is under way, until someone waits for it.
class CallArrival : public Arrival {
 public:
  CallArrival(std::shared_ptr<Channel> channel, std::vector<Operation> operations)
      : channel_(std::move(channel)), call_(std::make_shared<Call>()) {
    call_->operations = std::move(operations);
    for (const auto& operation : call_->operations) {
      append(call_->sent, operation.prefix.data(), operation.prefix.size());
      const auto data = contents(operation.inputs);
      append(call_->sent, data.data(), data.size());
      watched_.watch(operation);
    }
    watched_.poison();
    channel_->submit(call_);
  }

  void arrive() override {
    std::lock_guard lock(mutex_);
    if (arrived_) return;
    channel_->wait(*call_);
    watched_.check(c10::str("call ", call_->number, " (", call_->description(), ")"));
    std::vector<const uint8_t*> contributions;
    for (const auto& bytes : call_->received) contributions.push_back(bytes.data());
    for (const auto& operation : call_->operations) {
      operation.complete(contributions);
      const size_t bytes = operation.prefix.size() + bytes_of(operation.inputs);
      for (auto& contribution : contributions) contribution += bytes;
    }
    arrived_ = true;
    call_->operations.clear();
    call_->received.clear();
    watched_ = {};
  }

  bool under_way() override {
    std::lock_guard lock(mutex_);
    return !arrived_;
  }
  bool transported() { return channel_->done(*call_); }
  bool touches(const Tensors& tensors) {
    std::lock_guard lock(mutex_);
    return !arrived_ && watched_.touches(tensors);
  }
  uint64_t number() const { return call_->number; }

 private:
  std::mutex mutex_;
  std::shared_ptr<Channel> channel_;
  std::shared_ptr<Call> call_;
  Watched watched_;
  bool arrived_ = false;
};

class SimWork : public c10d::Work {
 public:
  SimWork(int rank, c10d::OpType type, std::shared_ptr<Arrival> arrival, Tensors outputs,
          int device)
      : c10d::Work(rank, type),
        arrival_(std::move(arrival)),
        outputs_(std::move(outputs)),
        device_(device) {
    // As NCCL's: complete at once, and whoever uses its value waits for an event.
    const auto stream = stream_of(arrival_, device);
    const c10::DeviceGuard device_guard(stream.device());
    const c10::StreamGuard stream_guard(stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{stream.device()});
    future_->markCompleted(outputs_);
  }

  // As NCCL's: the current stream waits.
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
    wait_on_stream(arrival_, guard.getStream(sim::device(device_)));
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::shared_ptr<Arrival> arrival_;
  Tensors outputs_;
  int device_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

at::Tensor tensor_over(const uint8_t* data, const at::Tensor& like, int64_t numel) {
  return at::from_blob(const_cast<uint8_t*>(data), {numel}, like.options().device(at::kCPU));
}

// Combines numel elements of every rank, in rank order, into `output`.
void combine(const std::vector<const uint8_t*>& terms, const c10d::ReduceOp& how,
             const at::Tensor& output) {
  if (output.numel() == 0) return;
  auto sum = tensor_over(terms[0], output, output.numel()).clone();
  for (size_t rank = 1; rank < terms.size(); ++rank) {
    const auto term = tensor_over(terms[rank], output, output.numel());
    switch (how.op_) {
      case c10d::ReduceOp::SUM:
      case c10d::ReduceOp::AVG:
        sum.scalar_type() == at::kBool ? sum.logical_or_(term) : sum.add_(term);
        break;
      case c10d::ReduceOp::PRODUCT:
        sum.mul_(term);
        break;
      case c10d::ReduceOp::MIN:
        sum = at::minimum(sum, term);
        break;
      case c10d::ReduceOp::MAX:
        sum = at::maximum(sum, term);
        break;
      default:  // NCCL has no bitwise ones
        TORCH_CHECK(false, "simccl: expected SUM, AVG, PRODUCT, MIN or MAX");
    }
  }
  if (how.op_ == c10d::ReduceOp::AVG) sum.div_(static_cast<double>(terms.size()));
  std::memcpy(host_bytes(output), sum.const_data_ptr(), sum.nbytes());
}

std::string text_of(const c10d::ReduceOp& how) {
  switch (how.op_) {
    case c10d::ReduceOp::SUM:
      return "sum";
    case c10d::ReduceOp::AVG:
      return "avg";
    case c10d::ReduceOp::PRODUCT:
      return "product";
    case c10d::ReduceOp::MIN:
      return "min";
    case c10d::ReduceOp::MAX:
      return "max";
    default:
      return "unsupported";
  }
}

std::string text_of(const at::Tensor& tensor) {
  return c10::str(tensor.numel(), " x ", tensor.scalar_type());
}

class Simccl : public c10d::Backend {
 public:
  Simccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
         std::chrono::milliseconds timeout, const std::vector<uint64_t>& global_ranks)
      : c10d::Backend(rank, size),
        options_(c10::make_intrusive<Options>("simccl", timeout)),
        channel_(std::make_shared<Channel>(
            shardstep::detail::make_gloo_backend(store, rank, size, timeout), timeout)),
        thread_([channel = channel_] { channel->run(); }) {
    options_->global_ranks_in_group = global_ranks;
  }

  ~Simccl() override {
    channel_->stop();
    if (channel_->idle()) {
      thread_.join();
    } else {
      thread_.detach();  // waits for a rank that will not come
    }
  }

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  // torch 2.14 has these no longer.
  void setSequenceNumberForGroup() {}
  uint64_t getSequenceNumberForGroup() { return number_; }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    std::vector<Operation> operations;
    for (const auto& tensor : tensors) {
      check({tensor});
      operations.push_back({.name = "all_reduce",
                            .description = c10::str("all_reduce(", text_of(options.reduceOp),
                                                    ") of ", text_of(tensor)),
                            .inputs = {tensor},
                            .outputs = {tensor},
                            .complete = [tensor, how = options.reduceOp](const auto& terms) {
                              combine(terms, how, tensor);
                            }});
    }
    return start(std::move(operations), c10d::OpType::ALLREDUCE, tensors);
  }

  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const auto tensor = only(tensors);
    check({tensor});
    Operation operation{.name = "reduce",
                        .description = c10::str("reduce(", text_of(options.reduceOp), ") to rank ",
                                                options.rootRank, " of ", text_of(tensor)),
                        .inputs = {tensor}};
    if (options.rootRank == rank_) operation.outputs = {tensor};
    operation.complete = [tensor, how = options.reduceOp,
                          root = options.rootRank == rank_](const auto& terms) {
      if (root) combine(terms, how, tensor);
    };
    return start({std::move(operation)}, c10d::OpType::REDUCE, tensors);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    std::vector<Operation> operations;
    for (const auto& tensor : tensors) {
      check({tensor});
      auto& operation = operations.emplace_back();
      operation.name = "broadcast";
      operation.description =
          c10::str("broadcast from rank ", options.rootRank, " of ", text_of(tensor));
      if (options.rootRank == rank_) {
        operation.inputs = {tensor};
      } else {
        operation.outputs = {tensor};
        operation.prefix.resize(tensor.nbytes());  // every rank sends as much
      }
      operation.complete = [tensor, root = options.rootRank, rank = rank_](const auto& terms) {
        if (root != rank && tensor.numel() > 0) {
          std::memcpy(host_bytes(tensor), terms[root], tensor.nbytes());
        }
      };
    }
    return start(std::move(operations), c10d::OpType::BROADCAST, tensors);
  }

  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions&) override {
    TORCH_CHECK(outputs.size() == 1, "simccl: expected one list of outputs");
    return start({gathering(only(inputs), outputs[0])}, c10d::OpType::ALLGATHER, outputs[0]);
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    return start({gathering(input, parts(output, input))}, c10d::OpType::_ALLGATHER_BASE, {output});
  }

  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions&) override {
    std::vector<Operation> operations;
    for (size_t i = 0; i < inputs.size(); ++i) {
      operations.push_back(gathering(inputs[i], parts(outputs[i], inputs[i])));
    }
    return start(std::move(operations), c10d::OpType::COALESCED, outputs);
  }

  WorkPtr gather(std::vector<Tensors>& outputs, Tensors& inputs,
                 const c10d::GatherOptions& options) override {
    const auto input = only(inputs);
    const Tensors own = options.rootRank == rank_ ? outputs.at(0) : Tensors{};
    check({input});
    check(own);
    Operation operation{
        .name = "gather",
        .description = c10::str("gather to rank ", options.rootRank, " of ", text_of(input)),
        .inputs = {input},
        .outputs = own};
    operation.complete = [own](const auto& terms) { copy_out(terms, own); };
    return start({std::move(operation)}, c10d::OpType::GATHER, own.empty() ? inputs : own);
  }

  WorkPtr scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                  const c10d::ScatterOptions& options) override {
    const auto output = only(outputs);
    check({output});
    Operation operation{
        .name = "scatter",
        .description = c10::str("scatter from rank ", options.rootRank, " of ", text_of(output)),
        .outputs = {output}};
    if (options.rootRank == rank_) {
      operation.inputs = inputs.at(0);
      check(operation.inputs);
    } else {
      operation.prefix.resize(output.nbytes() * size_);
    }
    operation.complete = [output, root = options.rootRank, rank = rank_](const auto& terms) {
      if (output.numel() > 0) {
        std::memcpy(host_bytes(output), terms[root] + rank * output.nbytes(), output.nbytes());
      }
    };
    return start({std::move(operation)}, c10d::OpType::SCATTER, outputs);
  }

  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                         const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(inputs.size() == 1, "simccl: expected one list of inputs");
    return start({scattering(only(outputs), inputs[0], options.reduceOp)},
                 c10d::OpType::REDUCE_SCATTER, outputs);
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    return start({scattering(output, parts(input, output), options.reduceOp)},
                 c10d::OpType::_REDUCE_SCATTER_BASE, {output});
  }

  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    std::vector<Operation> operations;
    for (size_t i = 0; i < inputs.size(); ++i) {
      operations.push_back(scattering(outputs[i], parts(inputs[i], outputs[i]), options.reduceOp));
    }
    return start(std::move(operations), c10d::OpType::COALESCED, outputs);
  }

  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& received,
                        std::vector<int64_t>& sent, const c10d::AllToAllOptions&) override {
    return start({exchanging(split(output, received), split(input, sent))},
                 c10d::OpType::ALLTOALL_BASE, {output});
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override {
    return start({exchanging(outputs, inputs)}, c10d::OpType::ALLTOALL, outputs);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return start({{.name = "barrier", .description = "barrier", .complete = [](const auto&) {}}},
                 c10d::OpType::BARRIER, {at::zeros({1}, at::device(device(current_device())))});
  }

  WorkPtr send(Tensors& tensors, int to, int) override;
  WorkPtr recv(Tensors& tensors, int from, int) override;

  void startCoalescing() override { coalescing_ = std::vector<Operation>{}; }
  WorkPtr endCoalescing() override {
    TORCH_CHECK(coalescing_, "simccl: expected startCoalescing() before endCoalescing()");
    auto operations = std::move(*coalescing_);
    coalescing_.reset();
    Tensors outputs;
    for (const auto& one : operations) {
      outputs.insert(outputs.end(), one.outputs.begin(), one.outputs.end());
    }
    return start(std::move(operations), c10d::OpType::COALESCED, outputs);
  }

  TrafficByOperation traffic() const {
    std::lock_guard lock(mutex_);
    return traffic_;
  }

 private:
  static at::Tensor only(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "simccl: expected one tensor, got ", tensors.size());
    return tensors[0];
  }

  void check(const Tensors& tensors) const {
    for (const auto& tensor : tensors) {
      TORCH_CHECK(tensor.is_privateuseone(), "simccl: expected tensors on device \"sim\", got ",
                  tensor.device(), who());
      TORCH_CHECK(tensor.is_contiguous() || tensor.is_non_overlapping_and_dense(),
                  "simccl: expected contiguous tensors, got strides ", tensor.strides(), who());
      TORCH_CHECK(tensor.device() == tensors[0].device(),
                  "simccl: expected tensors on one device, got ", tensors[0].device(), " and ",
                  tensor.device(), who());
    }
  }

  std::string who() const { return c10::str(" (rank ", rank_, " of ", size_, ")"); }

  // `whole` cut into one part per rank, each of the size of `part`.
  Tensors parts(const at::Tensor& whole, const at::Tensor& part) const {
    check({whole, part});
    TORCH_CHECK(whole.is_contiguous() && whole.numel() == part.numel() * size_, "simccl: expected ",
                size_, " times ", part.numel(), " contiguous elements, got ", whole.numel(), who());
    return whole.view({size_, part.numel()}).unbind();
  }

  Tensors split(const at::Tensor& whole, const std::vector<int64_t>& sizes) const {
    check({whole});
    const auto rows = sizes.empty()
                          ? std::vector<int64_t>(size_, whole.dim() > 0 ? whole.size(0) / size_ : 0)
                          : sizes;
    return whole.split_with_sizes(rows);
  }

  static void copy_out(const std::vector<const uint8_t*>& terms, const Tensors& outputs) {
    for (size_t rank = 0; rank < outputs.size(); ++rank) {
      const auto& output = outputs[rank];
      if (output.numel() > 0) std::memcpy(host_bytes(output), terms[rank], output.nbytes());
    }
  }

  Operation gathering(const at::Tensor& input, const Tensors& outputs) const {
    check({input});
    check(outputs);
    for (const auto& output : outputs) {
      TORCH_CHECK(output.numel() == input.numel() && output.dtype() == input.dtype(),
                  "simccl: expected outputs of ", text_of(input), ", got ", text_of(output), who());
    }
    return {.name = "all_gather",
            .description = c10::str("all_gather of ", text_of(input)),
            .inputs = {input},
            .outputs = outputs,
            .complete = [outputs](const auto& terms) { copy_out(terms, outputs); }};
  }

  Operation scattering(const at::Tensor& output, const Tensors& inputs,
                       const c10d::ReduceOp& how) const {
    check({output});
    check(inputs);
    return {.name = "reduce_scatter",
            .description = c10::str("reduce_scatter(", text_of(how), ") of ", text_of(output)),
            .inputs = inputs,
            .outputs = {output},
            .complete = [output, how, rank = rank_](std::vector<const uint8_t*> terms) {
              for (auto& term : terms) term += rank * output.nbytes();
              combine(terms, how, output);
            }};
  }

  // The sizes travel too: ranks may send different amounts, but each as much as the other expects.
  Operation exchanging(const Tensors& outputs, const Tensors& inputs) const {
    check(outputs);
    check(inputs);
    Operation operation{.name = "all_to_all",
                        .description = c10::str("all_to_all of ", inputs.at(0).scalar_type()),
                        .inputs = inputs,
                        .outputs = outputs};
    for (const auto& input : inputs) {
      const int64_t bytes = static_cast<int64_t>(input.nbytes());
      append(operation.prefix, &bytes, sizeof(bytes));
    }
    operation.complete = [outputs, rank = rank_, size = size_,
                          who = who()](const std::vector<const uint8_t*>& terms) {
      for (int from = 0; from < size; ++from) {
        std::vector<int64_t> sizes(size);
        std::memcpy(sizes.data(), terms[from], size * sizeof(int64_t));
        int64_t offset = static_cast<int64_t>(size * sizeof(int64_t));
        for (int to = 0; to < rank; ++to) offset += sizes[to];
        const auto& output = outputs[from];
        TORCH_CHECK(sizes[rank] == static_cast<int64_t>(output.nbytes()), "simccl: expected ",
                    output.nbytes(), " bytes from rank ", from, ", got ", sizes[rank], who);
        if (output.numel() > 0) {
          std::memcpy(host_bytes(output), terms[from] + offset, output.nbytes());
        }
      }
    };
    return operation;
  }

  // Calls on the same memory follow each other, as they do on NCCL's stream.
  void finish_earlier(const std::vector<Operation>& operations) {
    std::erase_if(under_way_, [](const auto& one) {
      const auto arrival = one.lock();
      return !arrival || !arrival->under_way();
    });
    for (const auto& one : under_way_) {
      const auto arrival = one.lock();
      if (!arrival) continue;
      for (const auto& operation : operations) {
        if (arrival->touches(operation.inputs) || arrival->touches(operation.outputs)) {
          arrival->arrive();
        }
      }
    }
  }

  void count(const std::vector<Operation>& operations) {
    std::lock_guard lock(mutex_);
    const auto& name = operations.size() == 1 ? operations[0].name : "coalesced";
    auto& traffic = traffic_[operations.empty() ? "coalesced" : name];
    ++traffic.calls;
    for (const auto& one : operations) {
      traffic.bytes += std::max(bytes_of(one.inputs), bytes_of(one.outputs));
    }
  }

  WorkPtr start(std::vector<Operation> operations, c10d::OpType type, const Tensors& outputs) {
    const int device = outputs.empty() ? current_device() : outputs[0].device().index();
    if (coalescing_) {
      for (auto& one : operations) coalescing_->push_back(std::move(one));
      return nullptr;
    }
    finish_earlier(operations);
    count(operations);
    const auto arrival = std::make_shared<CallArrival>(channel_, std::move(operations));
    under_way_.push_back(arrival);
    ++number_;
    return c10::make_intrusive<SimWork>(rank_, type, arrival, outputs, device);
  }

  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<Channel> channel_;
  std::thread thread_;
  std::optional<std::vector<Operation>> coalescing_;
  std::vector<std::weak_ptr<CallArrival>> under_way_;
  uint64_t number_ = 0;
  std::map<int, int> sent_, received_;  // messages so far, by the other rank
  mutable std::mutex mutex_;
  TrafficByOperation traffic_;
};

// Messages between two ranks

struct MessageHeader {
  int64_t number, numel;
  int32_t dtype;
};

at::Tensor header_tensor(MessageHeader& header) {
  return at::from_blob(&header, {static_cast<int64_t>(sizeof(header))}, at::kByte);
}

class SendArrival : public Arrival {
 public:
  SendArrival(c10d::Backend& gloo, const at::Tensor& tensor, int to, int number)
      : tensor_(tensor), data_(host_tensor(tensor).contiguous().clone()) {
    header_ = {number, tensor.numel(), static_cast<int32_t>(tensor.scalar_type())};
    Tensors header{header_tensor(header_)}, data{data_};
    works_.push_back(gloo.send(header, to, 2 * number));
    if (tensor.numel() > 0) works_.push_back(gloo.send(data, to, 2 * number + 1));
  }
  void arrive() override {
    std::lock_guard lock(mutex_);
    for (const auto& work : works_) work->wait();
    if (!works_.empty()) {
      TORCH_CHECK(
          std::memcmp(data_.const_data_ptr(), host_tensor(tensor_).contiguous().const_data_ptr(),
                      data_.nbytes()) == 0,
          "simccl: a tensor was changed between send and wait()");
    }
    works_.clear();
    tensor_.reset();
  }
  bool under_way() override {
    std::lock_guard lock(mutex_);
    return !works_.empty();
  }
  // A message that nobody waits for still has to leave.
  ~SendArrival() override {
    try {
      for (const auto& work : works_) work->wait();
    } catch (...) {
    }
  }

 private:
  std::mutex mutex_;
  at::Tensor tensor_, data_;
  MessageHeader header_;
  std::vector<WorkPtr> works_;
};

class ReceiveArrival : public Arrival {
 public:
  ReceiveArrival(std::shared_ptr<Channel> channel, const at::Tensor& tensor, int from, int number)
      : channel_(std::move(channel)), tensor_(tensor), from_(from), number_(number) {
    if (tensor.numel() > 0) std::memset(host_bytes(tensor), kPoison, tensor.nbytes());
  }
  void arrive() override {
    std::lock_guard lock(mutex_);
    if (!tensor_.defined()) return;
    MessageHeader header;
    Tensors one{header_tensor(header)};
    channel_->gloo().recv(one, from_, 2 * number_)->wait();
    TORCH_CHECK(header.numel == tensor_.numel() &&
                    header.dtype == static_cast<int32_t>(tensor_.scalar_type()),
                "simccl: expected ", text_of(tensor_), " from rank ", from_, ", got ", header.numel,
                " x ", static_cast<at::ScalarType>(header.dtype), " (message ", number_, ")");
    if (tensor_.numel() > 0) {
      auto data = at::empty({tensor_.numel()}, tensor_.options().device(at::kCPU));
      Tensors received{data};
      channel_->gloo().recv(received, from_, 2 * number_ + 1)->wait();
      std::memcpy(host_bytes(tensor_), data.const_data_ptr(), data.nbytes());
    }
    tensor_.reset();
  }
  bool under_way() override {
    std::lock_guard lock(mutex_);
    return tensor_.defined();
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Channel> channel_;
  at::Tensor tensor_;
  int from_, number_;
};

WorkPtr Simccl::send(Tensors& tensors, int to, int) {
  const auto tensor = only(tensors);
  check({tensor});
  TORCH_CHECK(to != rank_, "simccl: expected another rank to send to, got this one", who());
  {
    std::lock_guard lock(mutex_);
    auto& traffic = traffic_["send"];
    ++traffic.calls;
    traffic.bytes += static_cast<int64_t>(tensor.nbytes());
  }
  const auto arrival = std::make_shared<SendArrival>(channel_->gloo(), tensor, to, sent_[to]++);
  return c10::make_intrusive<SimWork>(rank_, c10d::OpType::SEND, arrival, tensors,
                                      tensor.device().index());
}

WorkPtr Simccl::recv(Tensors& tensors, int from, int) {
  const auto tensor = only(tensors);
  check({tensor});
  TORCH_CHECK(from != rank_, "simccl: expected another rank to receive from, got this one", who());
  {
    std::lock_guard lock(mutex_);
    auto& traffic = traffic_["recv"];
    ++traffic.calls;
    traffic.bytes += static_cast<int64_t>(tensor.nbytes());
  }
  const auto arrival = std::make_shared<ReceiveArrival>(channel_, tensor, from, received_[from]++);
  return c10::make_intrusive<SimWork>(rank_, c10d::OpType::RECV, arrival, tensors,
                                      tensor.device().index());
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_simccl(const c10::intrusive_ptr<c10d::Store>& store,
                                              int rank, int size, std::chrono::milliseconds timeout,
                                              const std::vector<uint64_t>& global_ranks) {
  return c10::make_intrusive<Simccl>(store, rank, size, timeout, global_ranks);
}

c10::intrusive_ptr<c10d::ProcessGroup> make_group(const c10::intrusive_ptr<c10d::Store>& store,
                                                  int rank, int size,
                                                  std::chrono::milliseconds timeout) {
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(c10::DeviceType::PrivateUse1, c10d::ProcessGroup::BackendType::CUSTOM,
                    make_simccl(store, rank, size, timeout));
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  return group;
}

TrafficByOperation traffic(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  const auto backend = group->getBackend(c10::DeviceType::PrivateUse1);
  const auto* simccl = dynamic_cast<const Simccl*>(backend.get());
  TORCH_CHECK(simccl != nullptr, "sim: expected a group with simccl, got ",
              backend->getBackendName());
  return simccl->traffic();
}

}  // namespace sim
