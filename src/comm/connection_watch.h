#pragma once

// Ends waits for ranks whose connection is closed. When a connection breaks, Gloo fails the
// messages that have not begun, but forgets one that it has sent or received in part: the wait for
// it would last until the group's timeout. Thread safety: watch() and unwatch() from any thread.
// Not collective.

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "shardstep/process_group.h"

namespace shardstep::detail {

class PendingWorks;

// Looks after the waits for messages of one exchange, in a thread that starts with the first.
class ConnectionWatch {
 public:
  explicit ConnectionWatch(const ProcessGroupPtr& group) : group_(group) {}
  ~ConnectionWatch();
  ConnectionWatch(const ConnectionWatch&) = delete;
  ConnectionWatch& operator=(const ConnectionWatch&) = delete;

  // From watch() to unwatch(), calls lose() of `pending` if a rank that it needs is gone: that
  // which it waits for, or any. REQUIRES: works of single messages, not of collectives.
  void watch(PendingWorks& pending);
  void unwatch(PendingWorks& pending);

 private:
  struct Entry {
    PendingWorks* pending;
    int64_t seen = -1;  // how many of its messages had arrived when it was last looked at
    int looks = 0;      // since one arrived
    bool lost = false;  // whether the rank that it waits for was gone then
    bool hopeless =
        false;  // whether any rank that it needs was gone when all were last asked about
  };

  void serve();
  void look();

  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  std::mutex mutex_;
  std::condition_variable stopping_;
  std::optional<bool> can_be_asked_;  // unset until the first wait
  std::vector<Entry> entries_;
  bool stop_ = false;
  std::thread thread_;
};

// Waits for a collective that needs every rank; throws if one of them is gone.
void wait_for_collective(c10d::Work& work, const ProcessGroupPtr& group);

}  // namespace shardstep::detail
