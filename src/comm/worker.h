#pragma once

// Runs jobs in threads of its own, one after the other. Jobs wait for messages, because Gloo does
// not report whether one has arrived. A job that waits for long does not hold up the next, since
// its message may come only after theirs: another thread takes that. Destruction ends all waits:
// one that reached the group's timeout would make Gloo close the group's connections, and with them
// whatever else uses them. Thread safety: run() and the destructor from one thread at a time.

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "comm/pending_works.h"

namespace shardstep::detail {

class Worker {
 public:
  Worker() = default;
  ~Worker() {
    bool busy = false;
    {
      const std::lock_guard lock(state_->mutex);
      state_->stop = true;
      busy = !state_->waited_for.empty() || !state_->jobs.empty();
      for (const auto& waits : state_->waited_for) abort(waits);
      for (const auto& job : state_->jobs) abort(job.waits);
    }
    state_->changed.notify_all();
    // A thread may need what the caller holds to free a tensor (Python's lock): it ends alone.
    for (auto& thread : state_->threads) busy ? thread.detach() : thread.join();
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
      keep_a_thread_idle(state_);
    }
    state_->changed.notify_one();
    return result;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Job {
    std::packaged_task<double()> task;
    Waits waits;
  };
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::thread> threads;
    int idle = 0;
    std::deque<Job> jobs;
    std::list<Waits> waited_for;  // by the jobs that run
    Clock::time_point taken;      // the last of them
    bool stop = false;
  };

  static void abort(const Waits& waits) {
    for (const auto& pending : waits) pending->abort();
  }

  // For the jobs that wait. REQUIRES: the lock is held.
  static void keep_a_thread_idle(const std::shared_ptr<State>& state) {
    if (state->idle > 0 || state->jobs.empty() || state->stop) return;
    ++state->idle;
    state->threads.emplace_back([state] { serve(state); });
  }

  // Returns when there is a job for this thread; false if there will be none.
  static bool await_job(State& state, std::unique_lock<std::mutex>& lock) {
    constexpr std::chrono::seconds kPatience{1};  // with a job
    for (;;) {
      if (state.jobs.empty()) {
        if (state.stop) return false;
        state.changed.wait(lock);
      } else if (state.waited_for.empty() || Clock::now() >= state.taken + kPatience) {
        return true;
      } else {
        state.changed.wait_until(lock, state.taken + kPatience);
      }
    }
  }

  static void serve(const std::shared_ptr<State>& state) {
    std::unique_lock lock(state->mutex);
    while (await_job(*state, lock)) {
      {
        auto job = std::move(state->jobs.front());
        state->jobs.pop_front();
        const auto waits = state->waited_for.insert(state->waited_for.end(), job.waits);
        state->taken = Clock::now();
        --state->idle;
        keep_a_thread_idle(state);
        lock.unlock();
        job.task();
        lock.lock();
        state->waited_for.erase(waits);
        ++state->idle;
        lock.unlock();
      }
      state->changed.notify_one();
      lock.lock();
    }
  }

  std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace shardstep::detail
