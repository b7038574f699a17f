#include "comm/connection_watch.h"

#include <algorithm>

#include "comm/lost_ranks.h"
#include "comm/pending_works.h"
#include "launch/process_group_backends.h"

namespace shardstep::detail {
namespace {

// A wait that is shorter is never looked at.
constexpr std::chrono::milliseconds kInterval = std::chrono::seconds(2);

}  // namespace

ConnectionWatch::~ConnectionWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopping_.notify_one();
  if (thread_.joinable()) thread_.join();
}

// The thread is not woken for a wait, which usually takes far less time than that.
void ConnectionWatch::watch(PendingWorks& pending) {
  const std::lock_guard lock(mutex_);
  if (!can_be_asked_) can_be_asked_ = can_ask_for_lost_ranks(group_.lock());
  if (!*can_be_asked_) return;
  entries_.push_back({&pending});
  if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
}

void ConnectionWatch::unwatch(PendingWorks& pending) {
  const std::lock_guard lock(mutex_);
  std::erase_if(entries_, [&](const Entry& entry) { return entry.pending == &pending; });
}

void ConnectionWatch::serve() {
  std::unique_lock lock(mutex_);
  while (!stopping_.wait_for(lock, kInterval, [this] { return stop_; })) look();
}

// A rank that sends its last message and leaves is not lost, so a wait has an interval to notice
// that what it waits for has come. If another rank is gone, who is waited for may have raised, and
// will send nothing; but if it is sending, to one after the other, who got its part may have left.
// So all are asked about more rarely, and nothing may arrive for several intervals.
void ConnectionWatch::look() {
  for (auto& [pending, seen, looks, lost, hopeless] : entries_) {
    const int64_t arrived = pending->arrived();
    const int rank = pending->awaited_rank();
    // Asking leaves a message, so only who waits for long is asked about.
    const bool waits = std::exchange(seen, arrived) == arrived && rank >= 0;
    const auto group = waits ? group_.lock() : nullptr;
    looks = group ? looks + 1 : 0;
    const bool was_lost = std::exchange(lost, group && !is_connected(group, rank));
    bool was_hopeless = false;
    if (looks == 0) {
      hopeless = false;
    } else if (looks % 2 == 0 && pending->needs_every_rank()) {
      was_hopeless = std::exchange(hopeless, !lost_ranks(group).empty());
    }
    if ((was_lost && lost) || (was_hopeless && hopeless)) pending->lose();
  }
}

void wait_for_collective(c10d::Work& work, const ProcessGroupPtr& group) {
  bool lost = false;
  while (reports_completion(work) && !work.isCompleted()) {
    try {
      work.wait(kInterval);
      return;
    } catch (const c10::Error&) {
      if (work.isCompleted()) break;
    }
    // A rank that has done its part may leave while the others complete theirs.
    const bool was_lost = std::exchange(lost, !lost_ranks(group).empty());
    TORCH_CHECK(!(was_lost && lost), "shardstep: lost a rank in the middle of a collective");
  }
  work.wait();
}

}  // namespace shardstep::detail
