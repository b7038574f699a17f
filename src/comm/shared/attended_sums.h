#pragma once

// PieceSums or HostSums, with an attendant: a thread that does this rank's part while the rank is
// elsewhere. Other ranks may need what this one has to copy, add or send before they reach the
// place where it waits: a collective of somebody else's, a long forward pass. As long as the rank
// calls here often, the attendant leaves the work to it.

#include <ATen/ATen.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/agreement.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {

template <class Sums>
class AttendedSums {
 public:
  template <class... Arguments>
  explicit AttendedSums(const std::shared_ptr<SharedMemory>& shared, Arguments&&... arguments)
      : state_(std::make_shared<State>(shared, std::forward<Arguments>(arguments)...)) {
    if (shared->world_size() == 1) return;  // nobody to share anything with
    attendant_ = std::thread([state = state_] { attend(*state); });
  }
  ~AttendedSums() {
    if (!attendant_.joinable()) return;
    // The attendant may need what the caller holds to free a tensor (Python's lock): it ends alone.
    const std::unique_lock at_rest(state_->mutex, std::try_to_lock);
    {
      const std::lock_guard lock(state_->stopping);
      state_->stop = true;
    }
    state_->stopped.notify_one();
    state_->bell().ring();
    at_rest ? attendant_.join() : attendant_.detach();
  }
  AttendedSums(const AttendedSums&) = delete;
  AttendedSums& operator=(const AttendedSums&) = delete;

  // As those of Sums.
  template <class... Arguments>
  auto start(const Arguments&... arguments) {
    const auto lock = take_over();
    return state_->sums.start(arguments...);
  }
  template <class... Arguments>
  void expect(const Arguments&... arguments) {
    const auto lock = take_over();
    state_->sums.expect(arguments...);
  }
  template <class Sum>
  bool done_by(const Sum& sum, std::chrono::steady_clock::time_point end) {
    const auto lock = take_over();
    return state_->sums.done_by(sum, end);
  }
  template <class Sum>
  void finish(const Sum& sum) {
    const auto lock = take_over();
    state_->sums.finish(sum);
  }

 private:
  struct State {
    template <class... Arguments>
    explicit State(std::shared_ptr<SharedMemory> shared, Arguments&&... arguments)
        : shared(shared), sums(std::move(shared), std::forward<Arguments>(arguments)...) {}
    Bell& bell() { return shared->mail_bell(shared->rank()); }

    std::shared_ptr<SharedMemory> shared;
    std::mutex mutex;  // whoever uses what follows
    Sums sums;
    std::exception_ptr error;  // of the attendant; the rank's next call throws it

    std::atomic<uint32_t> calls{0};
    std::atomic<bool> asleep{false};  // the attendant, until the bell rings
    std::mutex stopping;
    std::condition_variable stopped;
    bool stop = false;
  };

  std::unique_lock<std::mutex> take_over() {
    ++state_->calls;
    if (state_->asleep) state_->bell().ring();
    std::unique_lock lock(state_->mutex);
    if (const auto error = std::exchange(state_->error, nullptr)) std::rethrow_exception(error);
    return lock;
  }

  static void attend(State& state) {
    constexpr std::chrono::milliseconds kPatience{10}, kSleep{1000};
    uint32_t calls = 0;
    const auto stops_within = [&](std::chrono::milliseconds time) {
      std::unique_lock lock(state.stopping);
      return state.stopped.wait_for(lock, time, [&] { return state.stop; });
    };
    while (!stops_within(kPatience)) {
      const uint32_t heard = state.bell().heard();
      if (const uint32_t now = state.calls; now != calls) {
        calls = now;
        continue;
      }
      bool more_to_come = true;
      {
        const std::unique_lock lock(state.mutex, std::try_to_lock);
        // If not locked, the rank waits here, and looks itself.
        if (!lock || state.error) continue;
        try {
          more_to_come = state.sums.attend();
        } catch (...) {
          state.error = std::current_exception();
          state.shared->give_up(message_of(state.error));
        }
      }
      if (more_to_come) continue;
      state.asleep = true;
      while (state.bell().heard() == heard && state.calls == calls && !stops_within({})) {
        state.bell().wait(heard, kSleep);
      }
      state.asleep = false;
    }
  }

  std::shared_ptr<State> state_;
  std::thread attendant_;
};

}  // namespace shardstep::detail
