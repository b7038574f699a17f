#pragma once

// Sums parts of buckets over the ranks, in rank order, in memory that grows neither with the
// buckets nor with their number. A source copies a part piece by piece into slots of its own and
// sends each owner a note; the owner sums a piece as soon as every rank's has arrived, and returns
// the slot. Parts for which there is no slot stay where they are and are sent whenever this rank
// looks. A rank looks in every call here, and only finish() waits; an attendant (attended_sums.h)
// looks while the rank is elsewhere.
//
// Ranks may start their buckets in any order. So that no rank waits for ever, a rank that waits or
// is elsewhere moves pieces that it cannot sum yet out of the slots of ranks that need one.
// Modelled in proofs/piece_sums.pml.

#include <ATen/core/Tensor.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "comm/message_tag.h"
#include "comm/parts.h"
#include "comm/rank_order_sum.h"
#include "comm/shared/cursor.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {

// The sum of a bucket, from this rank's side.
class PieceSum {
 public:
  bool done() const { return posted_ && to_sum_.left() == 0; }
  // Elements of this rank's own that are not summed yet; the first ones are summed first.
  int64_t left() const { return to_sum_.left(); }
  double squares() const { return squares_; }

 private:
  friend class PieceSums;
  struct Outgoing {
    std::vector<at::Tensor> tensors;
    Cursor elements;
  };

  PieceSum(MessageTag tag, SumOptions options) : tag_(tag), options_(options) {}

  MessageTag tag_;
  SumOptions options_;
  at::ScalarType sent_as_ = at::kFloat;  // what went through 8-bit blocks is in float32 again
  std::vector<Outgoing> outgoing_;       // by owner; still to be posted
  bool posted_ = false;                  // all of it
  std::vector<at::Tensor> own_;
  std::vector<at::Tensor> into_;
  Cursor to_sum_;
  double squares_ = 0;
};

class PieceSums {
 public:
  PieceSums(std::shared_ptr<SharedMemory> shared, int64_t key);

  // Starts to sum parts[r] of all ranks on rank r. `into` has a tensor for each of this rank's
  // own, which may be the same. REQUIRES: parts of one dtype; the last sum with this tag is done.
  std::shared_ptr<PieceSum> start(MessageTag tag, const Parts& parts,
                                  const std::vector<at::Tensor>& into, const SumOptions& options);
  // Whether it is done by `end`; what it holds is released as soon as it is not needed.
  bool done_by(const PieceSum& sum, std::chrono::steady_clock::time_point end);
  // Returns when it is done.
  void finish(const PieceSum& sum);

  // The same for a condition that may depend on several sums, and on what rings this rank's mail
  // bell. `awaited` and `what` are for errors, as in SharedMemory::Waiting.
  bool done_by(const std::function<bool()>& done, std::chrono::steady_clock::time_point end);
  void wait_until(const std::function<bool()>& done, const std::function<int()>& awaited,
                  const std::function<std::string()>& what);
  // Does what other ranks have made possible since the last call.
  void look();
  // The same for a rank that is elsewhere, and makes room as one that waits. Returns whether there
  // is more to come.
  bool attend();
  // The first rank whose next piece has not arrived; this rank if there is none.
  int missing_rank(const PieceSum& sum) const;

 private:
  static constexpr int64_t kPieceBytes = 512 * 1024;
  static constexpr std::chrono::milliseconds kPatience{1};  // until a rank that waits makes room
  static constexpr uint32_t kSlots = 24;                    // 12 MiB per rank
  static constexpr uint32_t kQueueSize = 32;                // at least kSlots, and a power of two

  struct Note {
    int32_t tag;
    uint32_t slot;
  };
  // The header has one per (source, owner).
  struct Mailbox {
    SharedQueue<Note, kQueueSize> notes;
    SharedQueue<uint32_t, kQueueSize> slots_back;
  };
  // And one of these per source.
  enum Activity : uint32_t { kComputes, kWaits, kWaitsForSlots };
  struct Source {
    alignas(64) std::atomic<Activity> activity;
  };
  // How much of a mailbox has been read, at both ends.
  struct Read {
    uint32_t notes = 0;
    uint32_t slots_back = 0;
  };
  // A set of slots.
  using SlotSet = uint32_t;
  static_assert(kSlots <= 32);
  struct Piece {
    uint32_t slot = 0;
    at::Tensor moved;  // the slot's content, if the slot had to be returned early
  };
  // Pieces that have arrived and are not summed yet, by source.
  using Arrived = std::vector<std::deque<Piece>>;

  static int64_t header_bytes(int world_size);
  Mailbox& mailbox(int source, int owner);
  Source& source(int rank);
  std::byte* slot(int source, uint32_t slot);

  std::optional<uint32_t> free_slot();
  void post_what_fits();
  void post_piece(PieceSum& sum, int owner, uint32_t slot);
  std::vector<int> take_notes();
  void add_up(PieceSum& sum);
  void add_up_piece(PieceSum& sum, Arrived& arrived);
  at::Tensor own_term(const PieceSum& sum, const at::Tensor& own, int64_t offset, int64_t size);
  void return_slot(int source, uint32_t slot);
  void make_room(Activity activity);
  bool holds_slots() const;
  void move_out(bool also_if_missing_is_on_its_way);
  void move_out(int from, Piece& piece);

  std::shared_ptr<SharedMemory> shared_;
  SegmentLayout layout_;
  Segment segment_;
  at::Tensor restored_;                              // room for own terms that went through blocks
  uint32_t reserved_ = 0;                            // slots that this rank has so far
  std::vector<uint32_t> free_;                       // of these
  std::vector<Read> read_;                           // by rank
  std::vector<SlotSet> lent_;                        // to each rank: own slots that hold a piece
  std::vector<SlotSet> noted_;                       // by rank: its slots that hold one for this
  uint32_t heard_ = 0;                               // of this rank's bell
  std::chrono::steady_clock::time_point news_;       // when it was last heard to ring
  std::deque<std::shared_ptr<PieceSum>> posting_;    // in the order in which they started
  std::map<int, std::shared_ptr<PieceSum>> adding_;  // by tag
  std::map<int, Arrived> arrived_;                   // by tag
  int64_t moved_ = 0;                                // of these, out of their slots
};

}  // namespace shardstep::detail
