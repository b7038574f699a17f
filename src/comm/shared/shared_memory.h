#pragma once

// Memory that the ranks of a group on one host share, and in which they wait for each other. Ranks
// may be threads of one process. They are numbered within the host here; errors name them by their
// rank in the group. Thread safety: one thread at a time per rank, except for raise(), give_up()
// and bells.

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/peer_input.h"
#include "comm/shared/counters.h"
#include "comm/shared/hosts.h"
#include "comm/shared/notice_board.h"
#include "comm/shared/segment.h"
#include "shardstep/process_group.h"

namespace shardstep::detail {

class SharedMemory {
 public:
  // With the ranks of the group whose memory this one can open, and that can open its own. Null on
  // all ranks if one of them has no memory to share. In tests, the variable SHARDSTEP_TEST_HOSTS
  // names the host of each rank ("a,a,b"; the last name is that of the rest), and ranks of
  // different hosts do not try. Collective.
  static std::shared_ptr<SharedMemory> connect(const ProcessGroupPtr& group);
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  // All hosts of the group; which of them is this one, and who is on it.
  const Hosts& hosts() const { return hosts_; }
  size_t host() const { return host_; }
  const std::vector<int>& group_ranks() const { return hosts_.ranks[host_]; }
  int rank() const { return rank_; }
  int world_size() const { return static_cast<int>(group_ranks().size()); }

  // Zeroed memory that all ranks that pass the same key and layout share. The header is reserved,
  // and with ReserveOwn::kNow this rank's range too. Throws if there is no room. Does not wait for
  // other ranks, which may use their keys in any order.
  enum class ReserveOwn { kNow, kLater };
  Segment allocate(int64_t key, const SegmentLayout& layout,
                   ReserveOwn reserve_own = ReserveOwn::kNow);
  // Tells the other ranks first.
  [[noreturn]] void throw_no_room(int64_t bytes, int error);

  // Raises a count of this rank, and wakes the ranks that wait for it.
  void raise(SharedCount& count);
  // Returns when `count` of `rank` has reached `value`. `what` says what is waited for: "the
  // parameters". Throws as wait_until does.
  void wait(const SharedCount& count, uint32_t value, int rank,
            const std::function<std::string()>& what);

  // Throws unless `count` of `rank` is at most `most`: a damaged rank must not make this one read
  // what is not there.
  void check_count(const SharedCount& count, uint32_t most, int rank);
  // Nonsense in it ends the waits of all ranks.
  PeerInput input_of(int rank) { return {group_, group_ranks()[rank], giver_up()}; }

  // Rung by other ranks when they have done something for `rank`.
  Bell& mail_bell(int rank) { return ranks_[rank].mail; }
  // Checks `reached` whenever `bell` rings, and at least every `look`, until it is true. Throws if
  // a rank has given up, `awaited()` has died, or the group's timeout has passed, of which it tells
  // the other ranks.
  struct Waiting {
    Bell& bell;
    std::function<int()> awaited;  // the rank, for the error; -1 if it is not on this host
    std::function<std::string()> what;
    std::chrono::milliseconds look = std::chrono::milliseconds(100);
  };
  void wait_until(const std::function<bool()>& reached, const Waiting& waiting);

  // Counts bytes that this rank has copied into shared memory for others. From any thread.
  void count_copied(int64_t bytes) { bytes_copied_ += bytes; }
  int64_t bytes_copied() const { return bytes_copied_; }

  // From here on, every wait of any rank ends in an error with this message.
  void give_up(const std::string& message);
  // As Exchange says.
  void start_anew();

 private:
  // What a rank shares with all others.
  struct Rank {
    static constexpr size_t kMessage = 1024;
    Bell raised;  // a count of this rank
    Bell mail;
    std::atomic<uint32_t> gave_up;
    char message[kMessage];
  };

  explicit SharedMemory(const ProcessGroupPtr& group);
  static int64_t control_bytes(int ranks);
  void join(Hosts hosts, Segment control);
  std::string name_of(int rank) const;
  bool is_gone(int rank) const;
  std::optional<int> who_is_gone(int awaited, bool anyone) const;
  // Returns when a rank of this host is gone, or after `patience`.
  void await_a_death(std::chrono::milliseconds patience) const;
  void check_nobody_gave_up() const;
  PeerInput::GiveUp giver_up() {
    return [this](const std::string& message) { give_up(message); };
  }
  // Gives up, and throws.
  [[noreturn]] void fail(const std::string& message);
  // `maker` becomes the rank that offers it.
  Segment find_or_make(NoticeBoardLock& lock, int64_t key, const SegmentLayout& layout, int& maker);
  void check_notice(const Notice& notice);
  // Throws unless a rank has died, which explains why what `maker` offers is not there.
  void explain_missing(int maker);
  // The rank that holds the notice board; -1 if none does.
  int board_holder();
  void close_what_all_have_opened();

  ProcessGroupPtr group_;
  std::chrono::milliseconds timeout_;
  Hosts hosts_;
  size_t host_ = 0;
  int rank_ = 0;
  std::atomic<int64_t> bytes_copied_{0};
  std::mutex giving_up_;
  std::vector<int64_t> pids_;
  std::vector<FileDescriptor> processes_;  // not open where the kernel does not support them
  Segment control_;
  Rank* ranks_ = nullptr;
  NoticeBoard* board_ = nullptr;
  // Segments that this rank created and not all others have opened yet, by key.
  std::map<int64_t, std::shared_ptr<const FileDescriptor>> offered_;
};

}  // namespace shardstep::detail
