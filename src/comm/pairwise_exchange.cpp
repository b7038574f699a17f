#include "comm/pairwise_exchange.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include "comm/pending_works.h"
#include "comm/rank_order_sum.h"

namespace shardstep::detail {
namespace {

// Memory to receive into, used again and again: glibc gives large blocks back to the kernel when
// they are freed, and then every page of a new one faults.
class Scratch {
 public:
  // At least `numel` elements.
  at::Tensor take(int64_t numel, const at::TensorOptions& options) {
    const std::lock_guard lock(mutex_);
    auto best = spare_.end();
    for (auto one = spare_.begin(); one != spare_.end(); ++one) {
      const bool fits = one->numel() >= numel && one->device() == options.device() &&
                        one->dtype() == options.dtype();
      if (fits && (best == spare_.end() || one->numel() < best->numel())) best = one;
    }
    if (best == spare_.end()) return at::empty({numel}, options);
    auto taken = std::move(*best);
    spare_.erase(best);
    return taken;
  }
  void give_back(std::vector<at::Tensor> tensors) {
    const std::lock_guard lock(mutex_);
    for (auto& tensor : tensors) spare_.push_back(std::move(tensor));
  }

 private:
  std::mutex mutex_;
  std::vector<at::Tensor> spare_;
};

// Tensors like `parts`, side by side in `memory`.
std::vector<at::Tensor> laid_out_like(const std::vector<at::Tensor>& parts,
                                      const at::Tensor& memory) {
  std::vector<at::Tensor> views;
  int64_t offset = 0;
  for (const auto& part : parts) {
    views.push_back(memory.narrow(0, offset, part.numel()));
    offset += part.numel();
  }
  return views;
}

// Runs jobs one after the other in a thread of its own.
class Worker {
 public:
  Worker() : thread_([state = state_] { serve(*state); }) {}
  ~Worker() {
    bool busy = false;
    {
      const std::lock_guard lock(state_->mutex);
      state_->stop = true;
      busy = state_->busy || !state_->jobs.empty();
    }
    state_->changed.notify_one();
    // A job that waits for a rank ends at the group's timeout: do not wait with it.
    busy ? thread_.detach() : thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::future<double> run(std::function<double()> job) {
    std::packaged_task<double()> task(std::move(job));
    auto result = task.get_future();
    {
      const std::lock_guard lock(state_->mutex);
      state_->jobs.push_back(std::move(task));
    }
    state_->changed.notify_one();
    return result;
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::packaged_task<double()>> jobs;
    bool busy = false;
    bool stop = false;
  };

  static void serve(State& state) {
    std::unique_lock lock(state.mutex);
    for (;;) {
      state.changed.wait(lock, [&] { return state.stop || !state.jobs.empty(); });
      if (state.jobs.empty()) return;
      {
        auto job = std::move(state.jobs.front());
        state.jobs.pop_front();
        state.busy = true;
        lock.unlock();
        job();
      }
      lock.lock();
      state.busy = false;
    }
  }

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

// One round of adding up, from the messages on.
struct Round {
  std::shared_ptr<PendingWorks> pending;
  std::vector<at::Tensor> own;
  Parts received;
  std::vector<at::Tensor> memory;

  double add_up(const std::vector<at::Tensor>& into, int self, const SumOptions& options) {
    pending->wait();
    if (memory.empty()) return 0;  // nothing to own
    double squares = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      std::vector<at::Tensor> terms;
      for (int rank = 0; rank < static_cast<int>(received.size()); ++rank) {
        terms.push_back(rank == self ? own[i] : received[rank][i]);
      }
      squares += sum_in_rank_order(terms, into[i], options);
    }
    return squares;
  }
};

class PairwiseExchange : public Exchange {
 public:
  using Exchange::Exchange;

  const char* name() const override { return "pairwise"; }
  bool any_order() const override { return true; }

  std::unique_ptr<Pending> all_gather(const Parts& parts, MessageTag tag) override {
    auto pending = std::make_unique<PendingWorks>(group_);
    for (int distance = 1; distance < world_size(); ++distance) {
      const int source = (rank() - distance + world_size()) % world_size();
      traffic_.bytes_received += receive(group_, *pending, parts[source], source, message_tag(tag));
    }
    for (int distance = 1; distance < world_size(); ++distance) {
      const int target = (rank() + distance) % world_size();
      traffic_.bytes_sent += send(group_, *pending, parts[rank()], target, message_tag(tag));
    }
    return pending;
  }

  std::unique_ptr<Pending> reduce_scatter(const Parts& parts, MessageTag tag,
                                          double divisor) override {
    auto round = std::make_shared<Round>(start(parts, tag, std::nullopt));
    auto pending = std::make_unique<Waiting>();
    pending->wait_for = [round, divisor, self = rank(), scratch = scratch_] {
      round->add_up(round->own, self, {.divisor = divisor});
      scratch->give_back(round->memory);
    };
    return pending;
  }

  std::unique_ptr<Reduction> make_reduction(const ReductionOptions& options) override;

  Round start(const Parts& parts, MessageTag tag, std::optional<at::ScalarType> wire) {
    Round round{std::make_shared<PendingWorks>(group_), parts[rank()], Parts(world_size()), {}};
    int64_t numel = 0;
    for (const auto& part : round.own) numel += part.numel();
    for (int distance = 1; distance < world_size() && numel > 0; ++distance) {
      const int source = (rank() - distance + world_size()) % world_size();
      const auto options = round.own.front().options();
      round.memory.push_back(scratch_->take(numel, wire ? options.dtype(*wire) : options));
      round.received[source] = laid_out_like(round.own, round.memory.back());
      traffic_.bytes_received +=
          receive(group_, *round.pending, round.received[source], source, message_tag(tag));
    }
    for (int distance = 1; distance < world_size(); ++distance) {
      const int target = (rank() + distance) % world_size();
      auto sent = parts[target];
      for (auto& part : sent) part = wire ? part.to(*wire) : part;
      traffic_.bytes_sent += send(group_, *round.pending, sent, target, message_tag(tag));
    }
    return round;
  }

  // Adds up in the background; what the round holds is dropped there.
  std::future<double> add_up_later(Round round, std::vector<at::Tensor> into,
                                   const SumOptions& options) {
    if (!worker_) worker_ = std::make_unique<Worker>();
    auto shared = std::make_shared<Round>(std::move(round));
    return worker_->run([round = std::move(shared), into = std::move(into), options, self = rank(),
                         scratch = scratch_] {
      const double squares = round->add_up(into, self, options);
      scratch->give_back(std::move(round->memory));
      return squares;
    });
  }

 private:
  struct Waiting : Pending {
    std::function<void()> wait_for;
    void wait() override { wait_for(); }
  };

  std::shared_ptr<Scratch> scratch_ = std::make_shared<Scratch>();
  std::unique_ptr<Worker> worker_;
};

class PairwiseReduction : public Reduction {
 public:
  PairwiseReduction(PairwiseExchange& exchange, int rank, const ReductionOptions& options)
      : exchange_(exchange),
        tag_(options.tag),
        options_{.divisor = options.divisor, .rounded_to = options.wire},
        rank_(rank) {
    sum_ = at::empty({options.numel[rank]}, options.tensor);
  }

  void post(Parts parts, bool squares) override {
    auto into = laid_out_like(parts[rank_], sum_);
    options_.squares = squares;
    added_up_ = exchange_.add_up_later(exchange_.start(parts, tag_, options_.rounded_to),
                                       std::move(into), options_);
  }

  bool ready(std::chrono::milliseconds patience) override {
    return added_up_.wait_for(patience) == std::future_status::ready;
  }

  at::Tensor finish() override {
    squares_ = added_up_.get();
    return sum_;
  }

  std::optional<double> squares() const override {
    return options_.squares ? std::optional(squares_) : std::nullopt;
  }

  void release() override {}

 private:
  PairwiseExchange& exchange_;
  MessageTag tag_;
  SumOptions options_;
  int rank_;
  at::Tensor sum_;
  double squares_ = 0;
  std::future<double> added_up_;
};

std::unique_ptr<Reduction> PairwiseExchange::make_reduction(const ReductionOptions& options) {
  return std::make_unique<PairwiseReduction>(*this, rank(), options);
}

}  // namespace

std::unique_ptr<Exchange> make_pairwise_exchange(const ProcessGroupPtr& group, int64_t channel) {
  return std::make_unique<PairwiseExchange>(group, channel);
}

}  // namespace shardstep::detail
