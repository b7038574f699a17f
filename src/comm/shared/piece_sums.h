#pragma once

// Adds up parts of buckets over the ranks, in rank order, in memory that does not grow with the
// buckets nor with their number. A source copies a part piece by piece into places of its own and
// sends each owner a note; the owner adds a piece up as soon as every rank's is there, and sends
// the place back. Parts for which there is no place are held back where they are, and go out
// whenever this rank looks. A rank looks in every call here, and only finish() waits.
//
// Ranks may come with their buckets in any order. So that nobody waits for ever, a rank that waits
// moves pieces that it cannot add up yet out of the places of ranks that wait for some.

#include <ATen/core/Tensor.h>

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "comm/message_tag.h"
#include "comm/parts.h"
#include "comm/rank_order_sum.h"
#include "comm/shared/cursor.h"
#include "comm/shared/shared_memory.h"

namespace shardstep::detail {

// The adding up of a bucket, from this rank's side.
class PieceSum {
 public:
  bool done() const { return posted_ && to_sum_.left() == 0; }
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
  at::ScalarType sent_as_ = at::kFloat;
  std::vector<Outgoing> outgoing_;  // by owner; what is to be posted
  bool posted_ = false;             // all of it
  std::vector<at::Tensor> own_;
  std::vector<at::Tensor> into_;
  Cursor to_sum_;
  double squares_ = 0;
};

class PieceSums {
 public:
  PieceSums(SharedMemory& shared, int64_t key);

  // Starts to add up: parts[r] of all ranks on rank r. `into` has a tensor for each of this rank's
  // own, which may be the same. REQUIRES: parts of one dtype; the last one with this tag is done.
  std::shared_ptr<PieceSum> start(const Parts& parts, MessageTag tag,
                                  const std::vector<at::Tensor>& into, const SumOptions& options);
  // Whether it is done by `end`; what it holds is dropped as soon as it is not needed.
  bool done_by(const PieceSum& sum, std::chrono::steady_clock::time_point end);
  // Returns when it is done.
  void finish(const PieceSum& sum);

 private:
  static constexpr int64_t kPieceBytes = 512 * 1024;
  static constexpr uint32_t kPlaces = 24;  // 12 MiB per rank
  static constexpr uint32_t kSlots = 32;   // no fewer than places, and a power of two

  struct Note {
    int32_t tag;
    uint32_t place;
  };
  // The header has one for each (source, owner).
  struct Mailbox {
    SharedQueue<Note, kSlots> notes;
    SharedQueue<uint32_t, kSlots> places_back;
  };
  // And this for each source.
  enum Activity : uint32_t { kComputes, kWaits, kWaitsForPlaces };
  struct Source {
    alignas(64) std::atomic<Activity> activity;
  };
  // What has been read of a mailbox, from both ends.
  struct Read {
    uint32_t notes = 0;
    uint32_t places_back = 0;
  };
  struct Piece {
    uint32_t place = 0;
    at::Tensor moved;  // what was in the place, if that had to be given back
  };
  // Pieces that have come and are not added up yet, by source.
  using Arrived = std::vector<std::deque<Piece>>;

  static int64_t header_bytes(int world_size);
  Mailbox& mailbox(int source, int owner);
  Source& source(int rank);
  std::byte* place(int source, uint32_t place);

  void look();
  std::optional<uint32_t> free_place();
  void post_what_fits();
  void post_piece(PieceSum& sum, int owner, uint32_t place);
  std::vector<int> take_notes();
  void add_up(PieceSum& sum);
  void add_up_piece(PieceSum& sum, Arrived& arrived);
  void move_out(bool also_if_missing_is_on_its_way);
  int missing_rank(const PieceSum& sum) const;

  SharedMemory& shared_;
  SegmentLayout layout_;
  Segment segment_;
  uint32_t reserved_ = 0;                            // places that this rank has so far
  std::vector<uint32_t> free_;                       // of these
  std::vector<Read> read_;                           // by rank
  uint32_t heard_ = 0;                               // of this rank's bell
  std::deque<std::shared_ptr<PieceSum>> posting_;    // in the order in which they started
  std::map<int, std::shared_ptr<PieceSum>> adding_;  // by tag
  std::map<int, Arrived> arrived_;                   // by tag
};

}  // namespace shardstep::detail
