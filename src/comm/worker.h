#pragma once

// Runs jobs in a thread of its own, one after the other. Jobs wait for messages, because Gloo does
// not report whether one has arrived. Destruction ends their waits: one that reached the group's
// timeout would make Gloo close the group's connections, and with them whatever else uses them.
// Thread safety: run() and the destructor from one thread.

#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/pending_works.h"

namespace shardstep::detail {

class Worker {
 public:
  Worker() : thread_([state = state_] { serve(*state); }) {}
  ~Worker() {
    bool busy = false;
    {
      const std::lock_guard lock(state_->mutex);
      state_->stop = true;
      busy = state_->busy || !state_->jobs.empty();
      for (const auto& pending : state_->waited_for) pending->abort();
      for (const auto& job : state_->jobs) {
        for (const auto& pending : job.waits) pending->abort();
      }
    }
    state_->changed.notify_one();
    // The thread may need what the caller holds to free a tensor (Python's lock): it ends alone.
    busy ? thread_.detach() : thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  using Waits = std::vector<std::shared_ptr<PendingWorks>>;
  // `waits` is what the job waits for. The job must own what it uses: it may outlive this.
  std::future<double> run(std::function<double()> job, Waits waits) {
    std::packaged_task<double()> task(std::move(job));
    auto result = task.get_future();
    {
      const std::lock_guard lock(state_->mutex);
      state_->jobs.push_back({std::move(task), std::move(waits)});
    }
    state_->changed.notify_one();
    return result;
  }

 private:
  struct Job {
    std::packaged_task<double()> task;
    Waits waits;
  };
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Job> jobs;
    Waits waited_for;  // by the job that runs
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
        state.waited_for = job.waits;
        lock.unlock();
        job.task();
      }
      lock.lock();
      state.waited_for.clear();
      state.busy = false;
    }
  }

  std::shared_ptr<State> state_ = std::make_shared<State>();
  std::thread thread_;
};

}  // namespace shardstep::detail
