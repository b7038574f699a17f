#include "comm/shared/piece_sums.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "comm/gradient_blocks.h"
#include "comm/shared/copy_past_caches.h"
#include "failure_points.h"

namespace shardstep::detail {

namespace {

// Pieces that fit into half of this host's memory. The ranks that sent them have what they copied,
// and parameters of that size.
int64_t pieces_in_half_the_memory(int64_t piece_bytes) {
  static const int64_t bytes = int64_t{::sysconf(_SC_PHYS_PAGES)} * ::sysconf(_SC_PAGE_SIZE);
  return bytes / 2 / piece_bytes;
}

}  // namespace

PieceSums::PieceSums(std::shared_ptr<SharedMemory> shared, int64_t key)
    : shared_(std::move(shared)),
      layout_(header_bytes(shared_->world_size()),
              std::vector<int64_t>(shared_->world_size(), kSlots * kPieceBytes)),
      segment_(shared_->allocate(key, layout_, SharedMemory::ReserveOwn::kLater)),
      read_(shared_->world_size()),
      lent_(shared_->world_size()),
      noted_(shared_->world_size()) {}

int64_t PieceSums::header_bytes(int world_size) {
  return world_size * static_cast<int64_t>(sizeof(Source)) +
         int64_t{world_size} * world_size * static_cast<int64_t>(sizeof(Mailbox));
}

PieceSums::Source& PieceSums::source(int rank) {
  return reinterpret_cast<Source*>(segment_.memory.get())[rank];
}

PieceSums::Mailbox& PieceSums::mailbox(int source, int owner) {
  const int world_size = shared_->world_size();
  auto* const boxes = reinterpret_cast<Mailbox*>(segment_.memory.get() +
                                                 world_size * static_cast<int64_t>(sizeof(Source)));
  return boxes[source * world_size + owner];
}

std::byte* PieceSums::slot(int source, uint32_t slot) {
  return segment_.memory.get() + layout_.begin(source) + slot * kPieceBytes;
}

std::shared_ptr<PieceSum> PieceSums::start(MessageTag tag, const Parts& parts,
                                           const std::vector<at::Tensor>& into,
                                           const SumOptions& options) {
  const std::shared_ptr<PieceSum> sum(new PieceSum(tag, options));
  sum->own_ = parts[shared_->rank()];
  sum->into_ = into;
  for (const auto& tensor : sum->own_) sum->to_sum_.add(tensor.numel());
  sum->outgoing_.resize(shared_->world_size());
  for (int owner = 0; owner < shared_->world_size(); ++owner) {
    auto& [tensors, elements] = sum->outgoing_[owner];
    for (const auto& tensor : parts[owner]) {
      sum->sent_as_ = is_in_blocks(options.rounded_to)
                          ? at::kFloat
                          : options.rounded_to.value_or(tensor.scalar_type());
      if (owner == shared_->rank()) continue;
      tensors.push_back(tensor);
      elements.add(tensor.numel());
    }
  }
  TORCH_INTERNAL_ASSERT(adding_.count(tag.value()) == 0);
  source(shared_->rank()).activity.store(kComputes, std::memory_order_relaxed);
  adding_[tag.value()] = sum;
  posting_.push_back(sum);
  look();
  post_what_fits();
  add_up(*sum);
  return sum;
}

bool PieceSums::done_by(const PieceSum& sum, std::chrono::steady_clock::time_point end) {
  return done_by([&] { return sum.done(); }, end);
}

bool PieceSums::done_by(const std::function<bool()>& done,
                        std::chrono::steady_clock::time_point end) {
  auto& bell = shared_->mail_bell(shared_->rank());
  for (;;) {
    look();
    if (done()) return true;
    const auto left = end - std::chrono::steady_clock::now();
    if (left <= std::chrono::steady_clock::duration::zero()) return false;
    bell.wait(heard_, left);
  }
}

void PieceSums::finish(const PieceSum& sum) {
  wait_until([&] { return sum.done(); }, [&] { return missing_rank(sum); },
             [&] { return c10::str("the gradients with tag ", sum.tag_.value()); });
}

void PieceSums::wait_until(const std::function<bool()>& done, const std::function<int()>& awaited,
                           const std::function<std::string()>& what) {
  // About as long as a wake-up takes.
  for (int i = 0; i < 1000; ++i) {
    look();
    if (done()) return;
    spin_pause();
  }
  news_ = std::chrono::steady_clock::now();
  const auto reached = [&] {
    look();
    if (done()) return true;
    make_room(kWaits);
    return false;
  };
  shared_->wait_until(reached, {shared_->mail_bell(shared_->rank()), awaited, what, kPatience});
  source(shared_->rank()).activity.store(kComputes, std::memory_order_relaxed);
}

bool PieceSums::attend() {
  at::NoGradGuard no_grad;
  look();
  make_room(kComputes);
  return !posting_.empty() || !adding_.empty() || holds_slots();
}

// After a look, says what this rank does, and that it waits for slots if so.
void PieceSums::make_room(Activity activity) {
  constexpr std::chrono::milliseconds kLongPatience{100};
  source(shared_->rank())
      .activity.store(posting_.empty() ? activity : kWaitsForSlots, std::memory_order_relaxed);
  const auto waited = std::chrono::steady_clock::now() - news_;
  if (waited > kPatience) move_out(/*also_if_missing_is_on_its_way=*/waited > kLongPatience);
}

bool PieceSums::holds_slots() const {
  return std::any_of(noted_.begin(), noted_.end(), [](SlotSet slots) { return slots != 0; });
}

void PieceSums::look() {
  const uint32_t heard = shared_->mail_bell(shared_->rank()).heard();
  if (heard == heard_) return;
  heard_ = heard;
  news_ = std::chrono::steady_clock::now();
  for (int tag : take_notes()) {
    const auto sum = adding_.find(tag);
    if (sum != adding_.end()) add_up(*sum->second);
  }
  post_what_fits();
}

std::optional<uint32_t> PieceSums::free_slot() {
  if (free_.empty()) {
    for (int owner = 0; owner < shared_->world_size(); ++owner) {
      if (owner == shared_->rank()) continue;
      auto& queue = mailbox(shared_->rank(), owner).slots_back;
      const auto peer = shared_->input_of(owner);
      peer.check("the slots that came back", queue.waiting(read_[owner].slots_back), 0, kSlots);
      while (const auto slot = queue.pop(read_[owner].slots_back)) {
        peer.require(*slot < kSlots && (lent_[owner] >> *slot & 1) != 0,
                     "a slot that it did not have");
        lent_[owner] &= ~(SlotSet{1} << *slot);
        free_.push_back(*slot);
      }
    }
  }
  if (free_.empty() && reserved_ < kSlots) {
    const int64_t begin = layout_.begin(shared_->rank()) + reserved_ * kPieceBytes;
    const int error = segment_.reserve(begin, begin + kPieceBytes);
    if (error == 0) free_.push_back(reserved_++);
    // Fewer slots are slower, but enough.
    if (reserved_ == 0) shared_->throw_no_room(kPieceBytes, error);
  }
  if (free_.empty()) return std::nullopt;
  const uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

// In turns, so that all owners have something to do.
void PieceSums::post_what_fits() {
  while (!posting_.empty()) {
    auto& sum = *posting_.front();
    for (bool any = true; any;) {
      any = false;
      for (int distance = 1; distance < shared_->world_size(); ++distance) {
        const int owner = (shared_->rank() + distance) % shared_->world_size();
        if (sum.outgoing_[owner].elements.left() == 0) continue;
        const auto slot = free_slot();
        if (!slot) return;
        post_piece(sum, owner, *slot);
        any = true;
      }
    }
    sum.outgoing_.clear();
    sum.posted_ = true;
    posting_.pop_front();
  }
}

void PieceSums::post_piece(PieceSum& sum, int owner, uint32_t slot) {
  auto& [tensors, elements] = sum.outgoing_[owner];
  std::byte* to = this->slot(shared_->rank(), slot);
  const auto item = static_cast<int64_t>(c10::elementSize(sum.sent_as_));
  elements.advance(kPieceBytes / item, [&](size_t which, int64_t offset, int64_t size) {
    const auto& tensor = tensors[which];
    if (is_in_blocks(sum.options_.rounded_to)) {
      through_blocks(tensor, offset, at::from_blob(to, {size}, at::kFloat));
    } else if (tensor.scalar_type() == sum.sent_as_) {
      const auto* from = static_cast<const std::byte*>(tensor.const_data_ptr());
      copy_past_caches(to, from + offset * item, size * item);
    } else {
      at::from_blob(to, {size}, tensor.options().dtype(sum.sent_as_))
          .copy_(tensor.narrow(0, offset, size));
    }
    to += size * item;
  });
  SHARDSTEP_FAILURE_POINT("sums: copied");
  lent_[owner] |= SlotSet{1} << slot;
  shared_->count_copied(to - this->slot(shared_->rank(), slot));
  mailbox(shared_->rank(), owner).notes.push({sum.tag_.value(), slot});
  SHARDSTEP_FAILURE_POINT("sums: noted");
  shared_->mail_bell(owner).ring();
}

// The tags of pieces that have arrived.
std::vector<int> PieceSums::take_notes() {
  std::vector<int> tags;
  for (int from = 0; from < shared_->world_size(); ++from) {
    if (from == shared_->rank()) continue;
    const auto& queue = mailbox(from, shared_->rank()).notes;
    const auto peer = shared_->input_of(from);
    peer.check("the notes", queue.waiting(read_[from].notes), 0, kSlots);
    while (const auto note = queue.pop(read_[from].notes)) {
      peer.require(note->slot < kSlots && (noted_[from] >> note->slot & 1) == 0,
                   "a note of a slot that cannot be");
      peer.check("the tag of a note", note->tag, 0, MessageTag::kMost);
      noted_[from] |= SlotSet{1} << note->slot;
      auto& arrived = arrived_[note->tag];
      arrived.resize(shared_->world_size());
      arrived[from].push_back({note->slot, {}});
      if (tags.empty() || tags.back() != note->tag) tags.push_back(note->tag);
    }
  }
  return tags;
}

// As far as all ranks' pieces have arrived.
void PieceSums::add_up(PieceSum& sum) {
  if (sum.to_sum_.left() > 0) {
    auto& arrived = arrived_[sum.tag_.value()];
    arrived.resize(shared_->world_size());
    while (sum.to_sum_.left() > 0) {
      if (missing_rank(sum) != shared_->rank()) return;
      add_up_piece(sum, arrived);
    }
  }
  sum.own_.clear();
  sum.into_.clear();
  adding_.erase(sum.tag_.value());
}

// What this rank adds to what it owns, as others would send it.
at::Tensor PieceSums::own_term(const PieceSum& sum, const at::Tensor& own, int64_t offset,
                               int64_t size) {
  if (!is_in_blocks(sum.options_.rounded_to)) return own.narrow(0, offset, size);
  if (!restored_.defined()) restored_ = at::empty({kPieceBytes / int64_t{sizeof(float)}});
  const auto term = restored_.narrow(0, 0, size);
  through_blocks(own, offset, term);
  return term;
}

void PieceSums::add_up_piece(PieceSum& sum, Arrived& arrived) {
  at::NoGradGuard no_grad;
  const auto item = static_cast<int64_t>(c10::elementSize(sum.sent_as_));
  auto options = sum.options_;
  if (is_in_blocks(options.rounded_to)) options.rounded_to.reset();  // the terms are what arrives
  int64_t begin = 0;                                                 // in the piece
  sum.to_sum_.advance(kPieceBytes / item, [&](size_t which, int64_t offset, int64_t size) {
    const auto& own = sum.own_[which];
    std::vector<at::Tensor> terms;
    for (int rank = 0; rank < shared_->world_size(); ++rank) {
      if (rank == shared_->rank()) {
        terms.push_back(own_term(sum, own, offset, size));
        continue;
      }
      const auto& [slot, moved] = arrived[rank].front();
      auto* const piece = moved.defined() ? static_cast<std::byte*>(moved.mutable_data_ptr())
                                          : this->slot(rank, slot);
      terms.push_back(
          at::from_blob(piece + begin * item, {size}, own.options().dtype(sum.sent_as_)));
    }
    sum.squares_ += sum_in_rank_order(terms, sum.into_[which].narrow(0, offset, size), options);
    begin += size;
  });
  SHARDSTEP_FAILURE_POINT("sums: added");
  for (int rank = 0; rank < shared_->world_size(); ++rank) {
    if (rank == shared_->rank()) continue;
    const auto piece = std::move(arrived[rank].front());
    arrived[rank].pop_front();
    if (piece.moved.defined()) {
      --moved_;
    } else {
      return_slot(rank, piece.slot);
    }
  }
}

void PieceSums::return_slot(int source, uint32_t slot) {
  noted_[source] &= ~(SlotSet{1} << slot);
  mailbox(source, shared_->rank()).slots_back.push(slot);
  shared_->mail_bell(source).ring();
}

// Moves pieces out of the slots of ranks that wait for slots. The piece that is missing for a sum
// is on its way if its rank computes. This only moves memory from one rank to another.
void PieceSums::move_out(bool also_if_missing_is_on_its_way) {
  const auto activity_of = [&](int rank) {
    return source(rank).activity.load(std::memory_order_relaxed);
  };
  for (auto& [tag, arrived] : arrived_) {
    const auto sum = adding_.find(tag);
    const bool on_its_way =
        sum != adding_.end() && activity_of(missing_rank(*sum->second)) == kComputes;
    if (on_its_way && !also_if_missing_is_on_its_way) continue;
    for (int from = 0; from < shared_->world_size(); ++from) {
      if (activity_of(from) != kWaitsForSlots) continue;
      for (auto& piece : arrived[from]) {
        if (!piece.moved.defined()) move_out(from, piece);
      }
    }
  }
}

void PieceSums::move_out(int from, Piece& piece) {
  shared_->input_of(from).require(moved_ < pieces_in_half_the_memory(kPieceBytes),
                                  "more pieces of gradients than this host has memory for");
  piece.moved = at::empty({kPieceBytes}, at::kByte);
  std::memcpy(piece.moved.mutable_data_ptr(), slot(from, piece.slot), kPieceBytes);
  ++moved_;
  return_slot(from, piece.slot);
}

int PieceSums::missing_rank(const PieceSum& sum) const {
  const auto arrived = arrived_.find(sum.tag_.value());
  for (int rank = 0; rank < shared_->world_size(); ++rank) {
    if (rank == shared_->rank() || sum.to_sum_.left() == 0) continue;
    if (arrived == arrived_.end() || arrived->second[rank].empty()) return rank;
  }
  return shared_->rank();
}

}  // namespace shardstep::detail
